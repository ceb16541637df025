# GSplit on NVIDIA GPUs, from a checkout; the host needs a driver and the NVIDIA container toolkit:
#   docker build -f docker/cuda.Dockerfile -t gsplit:cuda .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/data" gsplit:cuda doctor --device cuda
# torch's wheel for Linux brings the CUDA libraries; gcc is there because Triton compiles a launcher on first use.
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
RUN pip install --no-cache-dir build==1.2.2.post1
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m build --wheel --outdir /wheels

FROM python:3.11-slim-bookworm
ARG TORCH=2.13.0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "torch==${TORCH}"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[all]" \
    && useradd --create-home --uid 1000 gsplit
USER 1000
WORKDIR /data
ENTRYPOINT ["gsplit"]
CMD ["--help"]
