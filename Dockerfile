# syntax=docker/dockerfile:1
# The images of warmroute: --target router, replica-cpu or replica-gpu; docs/images.md says what each holds.
# All versions of Python packages are those of constraints.txt, but for vLLM's own environment in replica-gpu: what it
# depends on is what its release asks for. A base image is pinned for good by its digest:
# --build-arg PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
ARG VLLM_VERSION=0.33.0

FROM ${PYTHON_IMAGE} AS python
# The pip that builds is a tool of the build alone; each target has a virtual environment without one.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# ---- what is installed

# Lists of what we depend on, so that a change of our own code installs, pushes and pulls nothing else anew.
FROM python AS requirements
WORKDIR /build
COPY pyproject.toml ./
# No here-document: Podman 4 reads none.
RUN python -c "import pathlib, tomllib; \
    project = tomllib.loads(pathlib.Path('pyproject.toml').read_text())['project']; \
    extras = project['optional-dependencies']; \
    lines = lambda *names: project['dependencies'] + [line for name in names for line in extras[name]]; \
    write = lambda target, lines: pathlib.Path(target + '.txt').write_text('\n'.join(lines) + '\n'); \
    replica = lines('replica', 'kuberay'); \
    router = lines('hub', 'picker', 'tracing'); \
    write('router', [line for line in router if not line.startswith('numpy')]); \
    write('replica', replica); \
    write('replica-gpu', [line for line in replica if not line.startswith('torch')])  # vLLM brings its own"

FROM python AS router-packages
WORKDIR /build
COPY constraints.txt ./
COPY --from=requirements /build/router.txt ./
RUN python -m venv --without-pip /opt/warmroute
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip --python /opt/warmroute/bin/python install --no-compile -c constraints.txt -r router.txt
# Nothing can be compiled later, on a read-only file system; and by hash, so that no time stamp makes it stale.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/warmroute/lib

# PyTorch comes alone: its own index has not all versions of what it needs in turn.
FROM python AS replica-cpu-packages
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
COPY constraints.txt ./
COPY --from=requirements /build/replica.txt ./
RUN python -m venv --without-pip /opt/warmroute
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip --python /opt/warmroute/bin/python install --no-compile --no-deps --index-url "${TORCH_INDEX}" \
        -c constraints.txt torch
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip --python /opt/warmroute/bin/python install --no-compile -c constraints.txt -r replica.txt
# Of PyTorch's own tests one is not for all versions of Python.
RUN python -m compileall -q -j 0 -x /torch/testing/ --invalidation-mode unchecked-hash /opt/warmroute/lib

# vLLM with its PyTorch and all of CUDA's libraries, in an environment of its own; only the driver comes from the machine.
FROM python AS vllm-packages
ARG VLLM_VERSION
RUN python -m venv --without-pip /opt/vllm
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip --python /opt/vllm/bin/python install --no-compile "vllm==${VLLM_VERSION}"
# Of so many packages some have a file that is not for this Python, a template or a test: nobody imports it.
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/vllm/lib || echo "not all of it is Python"

# Ours sees that PyTorch, after its own packages; vLLM sees nothing of ours.
FROM vllm-packages AS replica-gpu-packages
WORKDIR /build
COPY constraints.txt ./
COPY --from=requirements /build/replica-gpu.txt ./
RUN sed -i '/^torch==/d' constraints.txt \
    && python -m venv --without-pip /opt/warmroute \
    && echo /opt/vllm/lib/python3.*/site-packages > "$(echo /opt/warmroute/lib/python3.*/site-packages)/vllm.pth"
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip --python /opt/warmroute/bin/python install --no-compile -c constraints.txt -r replica-gpu.txt
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/warmroute/lib

# Our own code, as files to lay over an environment: those of every target have the same place.
FROM python AS code
WORKDIR /build
RUN python -m venv --without-pip /opt/warmroute
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY engines engines
COPY events events
COPY fleet fleet
COPY kernels kernels
COPY lab lab
COPY replica replica
COPY router router
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m pip --python /opt/warmroute/bin/python install --no-compile --no-deps --prefix /code .
RUN python -m compileall -q -j 0 --invalidation-mode unchecked-hash /code/lib

# ---- what runs

FROM ${PYTHON_IMAGE} AS runtime
RUN groupadd --gid 10001 warmroute \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin warmroute \
    && install -d -o 10001 -g 10001 /models \
    && python -m pip uninstall --yes --root-user-action ignore pip \
    && rm -rf "$(python -c 'import ensurepip; print(ensurepip.__path__[0])')"
# What is written goes to /tmp and to the volume of models; the rest may be read-only.
ENV PATH=/opt/warmroute/bin:${PATH} \
    HOME=/tmp \
    HF_HOME=/models/huggingface \
    HF_HUB_DISABLE_TELEMETRY=1 \
    WARMROUTE_CACHE_DIR=/models/warmroute \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
# No init: router and replica handle the signals themselves, as process 1 too, and reap the one child that they have.
STOPSIGNAL SIGTERM
ENTRYPOINT ["warmroute"]
LABEL org.opencontainers.image.title="warmroute" \
      org.opencontainers.image.description="Serves language models, each request from the replica whose cache is warm" \
      org.opencontainers.image.licenses="Apache-2.0"

FROM runtime AS router
COPY --from=router-packages /opt/warmroute /opt/warmroute
COPY --from=code /code /opt/warmroute
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=4s --start-period=20s \
    CMD ["python", "-I", "-S", "-B", "-c", "import http.client as h, sys; c = h.HTTPConnection('127.0.0.1', 8000, timeout=3); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
CMD ["router", "--host", "0.0.0.0"]
# Last, so that nothing is made anew for another revision.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"

# What replicas of both kinds have beside their packages. KubeRay runs `ray` with bash; older ones' probes call wget.
FROM runtime AS replica
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/*
ENV RAY_USAGE_STATS_ENABLED=0
EXPOSE 8001 5557 5558 5559 5560
HEALTHCHECK --interval=10s --timeout=4s --start-period=120s \
    CMD ["python", "-I", "-S", "-B", "-c", "import http.client as h, sys; c = h.HTTPConnection('127.0.0.1', 8001, timeout=3); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
CMD ["replica", "--model", "demo", "--host", "0.0.0.0", "--events-host", "*"]

FROM replica AS replica-cpu
COPY --from=replica-cpu-packages /opt/warmroute /opt/warmroute
COPY --from=code /code /opt/warmroute
USER 10001:10001
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"

# The one image with a compiler: Triton needs it for the GPU that it finds.
FROM replica AS replica-gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# `vllm` is found behind our own programs; and what the driver lends, but not which devices: that, who starts it says.
ENV PATH=${PATH}:/opt/vllm/bin \
    VLLM_NO_USAGE_STATS=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=vllm-packages /opt/vllm /opt/vllm
COPY --from=replica-gpu-packages /opt/warmroute /opt/warmroute
COPY --from=code /code /opt/warmroute
USER 10001:10001
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
