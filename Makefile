# Everything runs from .venv, which `make setup` makes. PYTHON picks the interpreter; ARGS goes on to the tool that a
# target runs. On Linux, `make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` takes the CPU build of
# torch, a tenth of the size of what the plain index serves.
PYTHON ?= python3
IMAGE ?= k3svc:latest
BIN := .venv/bin
CHECKED := k3svc services tests $(wildcard benchmarks)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(1) --grpc_python_out=$(1) --pyi_out=$(1) \
	$(wildcard protos/k3svc/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint types proto proto-check bench bench-transfer docker-image clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/stamp ## Make .venv with k3svc and its development tools

.venv/stamp: pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup ## Start the services and stream an answer
	$(BIN)/k3svc demo $(ARGS)

test: setup ## Run the tests but the slow ones
	$(BIN)/pytest -m "not slow" $(ARGS)

test-slow: setup ## Run the slow tests
	$(BIN)/pytest -m slow $(ARGS)

lint: setup proto-check ## Check format, style, layers, boundaries and protocol
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	scripts/check-boundaries
	$(BIN)/buf lint

types: setup ## Check types
	$(BIN)/mypy $(CHECKED)

proto: setup ## Generate k3svc/v1 from protos
	$(call PROTOC,.)

proto-check: setup ## Check that k3svc/v1 is what protos generate
	generated=$$(mktemp -d) && trap 'rm -rf "$$generated"' EXIT && $(call PROTOC,"$$generated") && \
	diff -r --exclude=__init__.py --exclude=__pycache__ "$$generated/k3svc/v1" k3svc/v1

bench: setup ## Measure the whole stack, one JSON object last
	$(BIN)/python -m benchmarks.stack --json $(ARGS)

bench-transfer: setup ## Measure the hand-off path against raw TCP and plain protobuf, one JSON object last
	$(BIN)/python -m benchmarks.transfer --json $(ARGS)

docker-image: ## Build the image of all roles
	docker build --network host --tag $(IMAGE) $(ARGS) .

clean: ## Remove caches and build outputs, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find k3svc services tests scripts -name __pycache__ -prune -exec rm -rf {} +
