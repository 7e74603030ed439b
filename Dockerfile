# The demo as a container, for the compose file's profile `demo`.
FROM python:3.12-slim-bookworm

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY dashboards ./dashboards
# The cache folder is made here for its owner: a volume mounted where nothing is would belong to root.
RUN pip install --no-cache-dir '.[demo]' \
    && useradd --create-home demo && install -d -o demo -g demo /home/demo/.cache
USER demo

# Listens on every address of the container: only the compose network can reach it.
ENV OTEL_EXPORTER_PROMETHEUS_HOST=0.0.0.0
EXPOSE 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/-/healthy', timeout=2)"]
# SIGTERM ends the run at its next step, with the summary.
CMD ["moe-telemetry", "demo"]
