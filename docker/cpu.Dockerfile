# GSplit on CPUs, from a checkout:
#   docker build -f docker/cpu.Dockerfile -t gsplit:cpu --build-arg TORCH_INDEX=... .
# TORCH_INDEX is the index of torch's CPU wheels; without it the image gets the CUDA libraries, too.
#   docker run --rm -v "$PWD:/data" gsplit:cpu doctor --nproc 2
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
RUN pip install --no-cache-dir build==1.2.2.post1
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m build --wheel --outdir /wheels

FROM python:3.11-slim-bookworm
ARG TORCH=2.13.0
ARG TORCH_INDEX
RUN PIP_EXTRA_INDEX_URL="${TORCH_INDEX}" pip install --no-cache-dir "torch==${TORCH}"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[all]" \
    && useradd --create-home --uid 1000 gsplit
USER 1000
WORKDIR /data
ENTRYPOINT ["gsplit"]
CMD ["--help"]
