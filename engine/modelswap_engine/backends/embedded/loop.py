"""Asks transformers for its loop of continuous batching, and reads what the loop has.

The library has no public call for most of this; what is reached into before the loop runs, and what is read of it while
it does, is kept here. Knows nothing of requests; what a commit does with them is in ``flush``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from modelswap_engine.backends.embedded import flush, sampler
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.protocol.errors import IncompatibleModel, ModelswapError
from modelswap_engine.weights.place import full

_GREEDY: Final[Any] = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class KvSizes:
    """Bytes of a KV cache: all of it, what is free, and what no request uses but is kept for others to find.

    ``buffers`` are the inputs and outputs of a step, masks above all, which each loop has once.
    """

    total: int = 0
    free: int = 0
    cached: int = 0
    buffers: int = 0


class _Router(OutputRouter):
    """Hands outputs on in the thread that made them, instead of queueing them for an event loop."""

    def __init__(self, sink: Callable[[GenerationOutput], None]) -> None:
        super().__init__()
        self._sink = sink

    def deliver(self, output: GenerationOutput) -> None:
        """Hand one output on."""
        self._sink(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        """Hand the outputs of one step on."""
        for output in outputs:
            self._sink(output)


def prepared(model: PreTrainedModel, settings: EmbeddedSettings, sink: Callable[[GenerationOutput], None]) -> Any:
    """Return a loop that has its KV cache and does not run yet; ``sink`` takes outputs, in the thread that made them.

    Raises:
        InsufficientMemory: the cache does not fit.
        IncompatibleModel: the library cannot run this model with these settings.
    """
    try:
        library: Any = model
        with torch.no_grad():
            manager = library.init_continuous_batching(
                generation_config=_GREEDY,
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=settings.page_size,
                    num_blocks=settings.num_blocks,
                    max_batch_tokens=settings.max_batch_tokens,
                    max_requests_per_batch=min(settings.max_requests, settings.max_batch_tokens),
                    max_memory_percent=0.95,
                    use_async_batching=False,
                    use_cuda_graph=False,
                    auto_switch_to_flash=False,
                    allow_block_sharing=True,
                    cpu_offload_space=0.0,
                    cpu_group_timeout=settings.peer_timeout,
                ),
            )
            manager.output_router = _Router(sink)
            manager.logit_processor = sampler.processors()
            # The loop would do this as its first act; done here, the cache is there before anything can use it.
            manager.batch_processor = manager._create_batch_processor()
    except ModelswapError:
        raise
    except torch.OutOfMemoryError as error:
        raise full(error) from error
    except Exception as error:
        raise IncompatibleModel(
            f"{type(model).__name__} cannot be run by continuous batching: {error}",
            advice="use a model with plain attention",
        ) from error
    return manager


def captured(processor: Any) -> bool:
    """True when steps run as captured graphs or compiled code, which may know weights by address."""
    runner = processor.model_runner
    graphs = runner.use_cuda_graph_varlen or runner.use_cuda_graph_decode
    return bool(graphs) or (runner._compiled_varlen, runner._compiled_decode) != (None, None)


def kv_sizes(processor: Any) -> KvSizes:
    """Return what the KV cache takes, and how much of it is in use."""
    cache = processor.cache
    return KvSizes(
        total=int(cache.cache_tensor.nbytes),
        free=flush.free_bytes(cache),
        cached=flush.cached_bytes(cache),
        buffers=_buffer_bytes(processor.inputs_and_outputs),
    )


def _buffer_bytes(inputs_and_outputs: Any) -> int:
    tensors = [item for item in vars(inputs_and_outputs).values() if isinstance(item, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
