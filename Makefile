# Everything runs from .venv, which `make setup` makes. PYTHON picks the interpreter; ARGS goes on to the tool that a
# target runs. On Linux, `make setup PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` takes the CPU build of
# torch, a tenth of the size of what the plain index serves.
PYTHON ?= python3
IMAGE ?= k3svc:latest
SEEDS ?= 200
FIRST ?= 0
SECONDS ?= 600
BIN := .venv/bin
NPU_EXTRA = $$(.venv-npu/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["npu"])')
CHECKED := k3svc services tests benchmarks training
PROTOC = $(BIN)/python -m grpc_tools.protoc -I protos --python_out=$(1) --grpc_python_out=$(1) --pyi_out=$(1) \
	$(wildcard protos/k3svc/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-npu sim mutants lint types proto proto-check bench bench-stack bench-step bench-cpu bench-accelerator bench-transfer bench-interference bench-speculation verify-times bench-gateway chaos soak fuzz docker-image docker-check clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/stamp ## Make .venv with k3svc and its development tools

.venv/stamp: pyproject.toml constraints.txt setup.py $(wildcard k3svc/ops/cpu/csrc/*)
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@$(BIN)/python -m k3svc.ops.cpu --default
	touch $@

demo: setup ## Start the services and stream an answer
	$(BIN)/k3svc demo $(ARGS)

test: setup ## Run the tests but the slow ones
	$(BIN)/pytest -m "not slow" $(ARGS)

test-slow: setup .venv/triton-stamp ## Run the slow tests
	$(BIN)/pytest -m slow $(ARGS)

# Its interpreter runs the kernels of the cuda backend; 3.9 is the first that takes numpy 2.4.
.venv/triton-stamp: constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt "triton>=3.9; sys_platform == 'linux'"
	touch $@

test-npu: setup .venv-npu/stamp ## Run the Ascend tests on the schemas of the real torch_npu, and the mutants
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH=build/npu-stubs .venv-npu/bin/python -m pytest tests/npu $(ARGS)
	$(BIN)/python scripts/npu_mutants.py

# A venv of its own, because torch_npu breaks a plain `import torch` where CANN is missing. The extra `npu` is all that it
# has of k3svc's dependencies beside what models and tests load; Triton's interpreter runs a kernel of sglang.
.venv-npu/stamp: constraints.txt pyproject.toml $(wildcard tests/npu/stubs/*)
	test -x .venv-npu/bin/pip || $(PYTHON) -m venv .venv-npu
	.venv-npu/bin/pip install --quiet --constraint constraints.txt torch pyyaml setuptools numpy safetensors crc32c \
	  pytest pytest-asyncio pytest-timeout "triton>=3.9" $(NPU_EXTRA)
	.venv-npu/bin/pip install --quiet --no-deps sglang==0.5.23
	tests/npu/stubs/build.sh build/npu-stubs
	touch $@

sim: setup ## Run SEEDS seeds of the simulation from FIRST on, one JSON object last
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST) $(ARGS)

mutants: setup ## Break production code in many ways, and see that it is noticed
	$(BIN)/python -m tests.mutants $(ARGS)

lint: setup proto-check ## Check format, style, layers, boundaries and protocol
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	scripts/check-boundaries
	$(BIN)/buf lint

types: setup ## Check types
	$(BIN)/mypy $(CHECKED)

proto: setup ## Generate k3svc/v1 and docs/protocol.md from protos
	$(call PROTOC,.)
	$(BIN)/python scripts/protocol_reference.py

proto-check: setup ## Check that k3svc/v1 is what protos generate
	generated=$$(mktemp -d) && trap 'rm -rf "$$generated"' EXIT && $(call PROTOC,"$$generated") && \
	diff -r --exclude=__init__.py --exclude=__pycache__ "$$generated/k3svc/v1" k3svc/v1

bench: setup ## Measure the whole stack, one JSON object last; ARGS="--reps 1" for one round
	$(BIN)/python -m benchmarks.stack --json $(ARGS)

bench-stack: bench ## The same as bench

bench-step: setup ## Measure what a decode step takes outside of the model, one JSON object last
	$(BIN)/python -m benchmarks.step_overhead --json $(ARGS)

bench-cpu: setup ## Measure the cpu backend beside torch and, with --llama-bench PATH in ARGS, llama.cpp, one JSON object last
	$(BIN)/python -m benchmarks.cpu --json $(ARGS)

bench-accelerator: ## Measure the cuda backend on a GPU with PYTHON, beside fla-core, one JSON object last
	$(PYTHON) -m benchmarks.accelerator $(ARGS)

bench-transfer: setup ## Measure the hand-off path against raw TCP, Mooncake and plain protobuf, one JSON object last
	$(BIN)/python -m benchmarks.transfer --json $(ARGS)

bench-interference: setup ## Measure decode steps while state arrives, one JSON object last
	$(BIN)/python -m benchmarks.interference --json $(ARGS)

bench-speculation: setup ## Measure acceptance and speed of speculation through the services, one JSON object last
	$(BIN)/python -m benchmarks.speculation --json $(ARGS)

verify-times: setup ## Measure how long decode steps take by their rows, one JSON object last
	$(BIN)/python -m training.verify_times $(ARGS)

bench-gateway: setup ## Measure what the gateway adds to the first and to each token, one JSON object last
	$(BIN)/python -m benchmarks.gateway $(ARGS)

chaos: setup ## Kill services under load and compare every token, one JSON object last
	$(BIN)/python -m benchmarks.chaos $(ARGS)

soak: setup ## Load the stack for 15 minutes and watch throughput and memory, one JSON object last
	$(BIN)/python -m benchmarks.soak $(ARGS)

fuzz: setup ## Throw hostile input at everything for SECONDS, one JSON object last
	$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS) $(ARGS)

docker-image: ## Build the image of all roles
	docker build --network host --tag $(IMAGE) $(ARGS) .

docker-check: setup ## Build the image, run docker-compose.yml and check it: golden tokens, SIGKILL, TLS, scale, down
	$(BIN)/python scripts/check_compose.py $(ARGS)

clean: ## Remove caches and build outputs, but not .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find k3svc services tests scripts -name __pycache__ -prune -exec rm -rf {} +
