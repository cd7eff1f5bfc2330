# didi serve on a CPU, offline, with the shipped models. Build: docker build -t didi .
# The default index may serve a CUDA build of torch, several GB larger. For a CPU build, name PyTorch's
# CPU index: docker build --build-arg TORCH_INDEX=URL -t didi .
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
ARG TORCH_INDEX=
RUN python -m venv /opt/didi \
    && /opt/didi/bin/pip install --no-cache-dir --constraint constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[serve]"

FROM python:3.12-slim
COPY --from=build /opt/didi /opt/didi
RUN useradd --create-home --shell /usr/sbin/nologin didi
USER didi
ENV PATH=/opt/didi/bin:$PATH HF_HUB_OFFLINE=1
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=5)"]
# Inside a container all addresses are its own; which of the host's reach it is said by `docker run -p`.
ENTRYPOINT ["didi", "serve", "--host", "0.0.0.0"]
