"""Takes the place of SGLang's kernel package where there is no GPU.

The published package is CUDA code and cannot be imported without a driver. On a processor without AMX, SGLang computes
with torch and needs three things of it: that it can be imported, one small function that fills its table of cached
tokens, and no page-locked memory, which only a driver can give.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

__version__ = "0.4.10"
_MAKERS = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")


def assign_req_to_token_pool_cpu(rows: Any, table: Any, starts: Any, ends: Any, places: Any, _width: int) -> None:
    """Write the places of each request's new tokens into its row of the table."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=False):
        count = end - start
        table[row, start:end] = places[at : at + count].to(table.dtype)
        at += count


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_") or not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*_args: Any, **_keywords: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name}: only the package for GPUs has it")

    return absent


def _pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **keywords: Any) -> Any:
        return make(*args, **{key: value for key, value in keywords.items() if key != "pin_memory"})

    return made


if not torch.accelerator.is_available():
    _device_constructors()  # remembers the makers by which `with torch.device(...)` works, as they are before this
    for maker in _MAKERS:
        setattr(torch, maker, _pageable(getattr(torch, maker)))
    torch.Tensor.pin_memory = lambda self, *_args, **_keywords: self  # type: ignore[method-assign]
