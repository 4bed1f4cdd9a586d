#!/usr/bin/env bash
# sglang.sh: makes an environment with the real SGLang on CPU and prints where it is. Cheap when nothing changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
engine_begin sglang sglang.sh sglang.txt sglang_wheel.txt sgl_kernel/__init__.py
engine_packages sglang.txt
engine_packages sglang_wheel.txt
engine_cuda
mkdir -p "$site/sgl_kernel"
cp "$engines/sgl_kernel/__init__.py" "$site/sgl_kernel/"
engine_step "byte code of SGLang" "$python" -m compileall -q -j 0 "$site/sglang/srt" "$site/sglang/kernels"
SGLANG_USE_CPU_ENGINE=1 engine_end sglang.launch_server sglang.srt.entrypoints.http_server sglang.srt.managers.scheduler \
  sglang.srt.managers.detokenizer_manager sglang.srt.lora.lora_manager sglang.srt.models.llama sglang.srt.models.qwen2 \
  sglang.srt.models.qwen3 peft
