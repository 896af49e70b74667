# titan_like for NVIDIA GPUs; docs/install.md says how to build and run it. PyTorch's wheels bring the CUDA libraries, so
# the image adds only what the NVIDIA container runtime looks for. The tests' versions are installed: constraints.txt.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base
# gcc and Python's headers are for torch.compile. The base image's release fixes their versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/titan_like
ENV PATH=/opt/titan_like/bin:$PATH

FROM base AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY train_configs train_configs
COPY titan_like titan_like
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM base
COPY constraints.txt /opt/
# A layer of its own, which a change of the code does not build again.
RUN pip install --no-cache-dir -c /opt/constraints.txt torch
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir -c /opt/constraints.txt "$(echo /wheel/*.whl)[hf,data,float8,plot,cloud,mlflow]"
COPY --chmod=755 scripts/k8s/run.sh /opt/titan_like/bin/titan-pod
# A user without root's rights, and places to write for any other one that docker run --user names.
RUN mkdir /work && chown 1000:1000 /work
ENV HOME=/tmp TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["titan-train"]
CMD ["--help"]
