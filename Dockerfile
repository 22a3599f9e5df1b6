# One image for every process: gateway, engine (GPU or CPU) and the commands of an operator.
#   docker build -t stencilpress .
#   docker build -t stencilpress --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .   # no GPU: 4 GB less

FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://pypi.org/simple
RUN python -m venv /opt/stencilpress
ENV PATH=/opt/stencilpress/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
RUN pip install --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt torch
COPY . .
RUN pip install -c constraints.txt '.[cold,oidc,otel,postgres,redis]'

FROM python:3.12-slim
# Triton compiles small launchers with the system's C compiler when an engine starts on a GPU.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home stencilpress \
    && install -d -o stencilpress -g stencilpress -m 0700 /data /run/stencilpress
COPY --from=build /opt/stencilpress /opt/stencilpress
ENV PATH=/opt/stencilpress/bin:$PATH \
    STENCILPRESS_DATA=/data \
    STENCILPRESS_LOG_FORMAT=json
USER stencilpress
VOLUME ["/data", "/run/stencilpress"]
EXPOSE 8000
ENTRYPOINT ["stencilpress"]
CMD ["serve", "--host", "0.0.0.0"]
