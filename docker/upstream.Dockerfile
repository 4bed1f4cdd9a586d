# A stand-in for the image of vLLM's or SGLang's own server, for tests and the demo where none can be pulled: the machine's
# environment of the real engine (hack/engines) is mounted at /opt/engine. Nothing of modelswap is in it.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
# What the wheels do not bring along; our own base image has it, others must fetch it.
RUN for library in libnuma.so.1 libgomp.so.1; do /sbin/ldconfig -p | grep -q "$library" || missing=1; done; \
    [ -z "$missing" ] || { apt-get update && apt-get install -y --no-install-recommends libnuma1 libgomp1 && rm -rf /var/lib/apt/lists/*; }
COPY vllm serve_vllm.py serve_sglang.py /usr/local/bin/
RUN python3 -c "import site, sys; from pathlib import Path; folder = Path(site.getsitepackages()[0]); \
folder.mkdir(parents=True, exist_ok=True); version = f'python{sys.version_info[0]}.{sys.version_info[1]}'; \
(folder / 'engine.pth').write_text(f'/opt/engine/lib/{version}/site-packages\\n')"
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /tmp
