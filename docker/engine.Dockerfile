# Our side of a pod. `docker build --target engine`, the embedded engine, leaves torch and transformers out, to be mounted
# at /opt/modelswap/site (how the tests and the demo run it); `--target sidecar` has all that `modelswap proxy` needs, which
# is no torch; `--target engine-full`, the default, is complete.
# Its context is prepared by hack/images/build.sh, so that the build needs no network.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS engine
COPY app /opt/modelswap/app
RUN python3 -m compileall -q /opt/modelswap/app
COPY modelswap /usr/local/bin/modelswap
# USER: torch asks for the name of its user, who has no entry in /etc/passwd.
ENV PYTHONPATH=/opt/modelswap/app:/opt/modelswap/site \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    USER=modelswap \
    HOME=/tmp
LABEL org.opencontainers.image.title="modelswap engine" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["modelswap"]

FROM ${BASE} AS sidecar-packages
COPY site /opt/modelswap/site
RUN python3 -m compileall -q /opt/modelswap/site

FROM engine AS sidecar
COPY --from=sidecar-packages /opt/modelswap/site /opt/modelswap/site
LABEL org.opencontainers.image.title="modelswap sidecar"

FROM engine AS engine-full
COPY site /opt/modelswap/site
