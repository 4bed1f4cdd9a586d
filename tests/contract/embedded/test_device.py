"""Where the worker puts the model; on a machine that has a GPU it is hidden from it here."""

import os

import msgspec
import pytest
import torch

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import Device
from tests.contract.embedded.conftest import SETTINGS, Checkpoints, Engine
from tests.support.orders import load_order

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]


async def test_without_a_gpu_cuda_is_refused_with_the_next_step(
    checkpoints: Checkpoints,
) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    backend = EmbeddedBackend(msgspec.structs.replace(SETTINGS, device=Device.CUDA), environ=hidden)
    try:
        await backend.start()
        (reply,) = await backend.load(load_order(checkpoints.v1))
        assert reply.error is not None
        assert reply.error.code == "DeviceUnavailable"
        assert "--device cpu" in reply.error.advice
        memory = await backend.memory()
        assert (memory.model_bytes, memory.device_limit_bytes) == (0, -1)
    finally:
        await backend.stop()


async def test_auto_takes_what_there_is(engine: Engine) -> None:
    assert SETTINGS.device is Device.AUTO
    memory = await engine.backend.memory()
    assert memory.model_bytes > 0
    if not torch.cuda.is_available():
        assert (memory.device, memory.device_limit_bytes, memory.device_available_bytes) == ("cpu", -1, -1)
    else:
        assert memory.device.startswith("cuda")
