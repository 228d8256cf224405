# One image for every role. Run it as: IMAGE services.decode --config FILE. Nothing is written outside /tmp, so the
# root may be read-only.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}

FROM ${BUILD_BASE} AS build
# Wheels in a folder wheels/ of the context are taken first, and then no index but pip's own is asked. Otherwise torch
# comes from TORCH_INDEX, since the plain index serves a CUDA build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Compiles the kernels of the cpu backend; the image itself carries no compiler.
RUN command -v g++ >/dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; }
WORKDIR /src
COPY constraints.txt wheels* /wheels/
RUN python -m venv /opt/k3svc \
    && if ls /wheels/*.whl >/dev/null 2>&1; then set -- --find-links /wheels; \
       else set -- --extra-index-url "$TORCH_INDEX"; fi \
    && /opt/k3svc/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt "$@" torch
COPY pyproject.toml setup.py README.md LICENSE NOTICE ./
COPY k3svc k3svc
COPY services services
RUN /opt/k3svc/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt ".[gateway]"

FROM ${BASE}
COPY --from=build /opt/k3svc /opt/k3svc
RUN useradd --system --uid 10001 --no-create-home --home-dir /tmp k3svc
ENV PATH=/opt/k3svc/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /tmp
EXPOSE 50051
# Each check starts an interpreter, about a second of one core.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["k3svc", "health", "127.0.0.1:50051"]
ENTRYPOINT ["python", "-m"]
CMD ["services.decode", "--help"]
