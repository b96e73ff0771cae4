# The server in a container: docker build -t pyggml . && docker run -p 8080:8080 -v /models:/models pyggml -m /models/m.gguf
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels ".[serve]"

FROM python:3.12-slim-bookworm
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir --no-index --find-links=/wheels "pyggml[serve]"
RUN useradd --create-home pyggml
USER pyggml
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=2m CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["pyggml", "serve", "--host", "0.0.0.0"]
