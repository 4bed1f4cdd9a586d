# The operator. Its context is prepared by hack/images/build.sh (third-party wheels by hash in site/, ours in app/),
# so that the build needs no network. Runs as a user without rights on a read-only root file system.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
COPY site /opt/modelswap/site
RUN python3 -m compileall -q /opt/modelswap/site
COPY app /opt/modelswap/app
RUN python3 -m compileall -q /opt/modelswap/app
ENV PYTHONPATH=/opt/modelswap/app:/opt/modelswap/site \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
LABEL org.opencontainers.image.title="modelswap operator" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python3", "-m", "modelswap_operator"]
