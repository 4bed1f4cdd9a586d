"""Chooses the device of a rank: its own GPU, or the CPU. Knows torch and the setting, no model."""

import functools

import torch

from modelswap_engine.backends.embedded.settings import Device
from modelswap_engine.protocol.errors import DeviceUnavailable
from modelswap_engine.weights.cuda import CudaCopies
from modelswap_engine.weights.place import HOST, OnDevice, Place


@functools.cache
def place_of(wanted: Device, *, rank: int) -> Place:
    """Return where a rank's weights lie; the same for the life of the process.

    Raises:
        DeviceUnavailable: a GPU is wanted and this process has none for the rank.
    """
    if wanted is Device.CPU or (wanted is Device.AUTO and not torch.cuda.is_available()):
        return HOST
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank >= found:
        raise DeviceUnavailable(
            f"rank {rank} needs a CUDA device of its own, torch {torch.__version__} sees {found}",
            advice=_ADVICE_FEW if found else _ADVICE_NONE,
            details={"device": wanted.value, "found": str(found)},
        )
    return OnDevice(CudaCopies(torch.device("cuda", rank)))


_ADVICE_NONE = (
    "serve on the CPU (--device cpu), or give the container a GPU (resource limit nvidia.com/gpu, a runtime class that "
    "brings the driver in) and check it with nvidia-smi"
)
_ADVICE_FEW = "give the container one GPU for each rank, or run fewer ranks"


def name_of(place: Place) -> str:
    """Return the device for a person: ``cpu``, or ``cuda:0 (its model)``."""
    device = place.device
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
