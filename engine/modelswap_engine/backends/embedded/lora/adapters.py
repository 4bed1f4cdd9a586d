"""The adapters of one loaded model: what they may be, where they are, and that each batch is computed with its own."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from modelswap_engine.backends.adapters import AdapterLayout
from modelswap_engine.backends.embedded.lora.content import LoadedAdapter
from modelswap_engine.backends.embedded.lora.layers import AdapterLayers
from modelswap_engine.backends.embedded.lora.store import AdapterStore
from modelswap_engine.backends.embedded.sampler import ADAPTER
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.protocol.errors import AdapterLimit

_NO_SLOTS: Final = "it was started with no slots for adapters"


class Adapters:
    """See the module. Without slots nothing is installed, and every call is refused.

    Args:
        model: on its device.
        settings: how many slots, and which ranks.
    """

    def __init__(self, model: torch.nn.Module, settings: EmbeddedSettings) -> None:
        self._settings = settings
        self._dtype = next(model.parameters()).dtype
        self._layers: AdapterLayers | None = None
        self._store: AdapterStore | None = None
        if settings.lora_slots:
            # Brings peft, which takes a second to import: before serving, and not without a use for it.
            from modelswap_engine.backends.embedded.lora.second_opinion import check_with_peft

            self._layers = AdapterLayers(model)
            self._store = AdapterStore(settings.lora_slots, self._layers.modules, check=check_with_peft)

    def layout(self) -> AdapterLayout:
        """Say what adapters can be; valid after :meth:`probing`."""
        if self._layers is None:
            return AdapterLayout(reason=_NO_SLOTS)
        return AdapterLayout(
            slots=self._settings.lora_slots,
            max_rank=self._settings.lora_max_rank,
            element_bytes=self._dtype.itemsize,
            targets=self._layers.targets(),
            refused=dict(self._layers.refused),
        )

    @contextlib.contextmanager
    def probing(self) -> Iterator[None]:
        """Find out by the batches that run meanwhile which modules adapters can change, then make them changeable."""
        with self._layers.probing() if self._layers is not None else contextlib.nullcontext():
            yield

    def attach(self, processor: Any) -> None:
        """Have every batch of a generation loop computed with the adapters that its requests carry."""
        layers, runner = self._layers, processor.model_runner
        if layers is None:
            return
        compute = runner.compute_batch

        def compute_batch(model: Any, batch_data: dict[str, Any]) -> None:
            batch = processor.inputs_and_outputs.requests_in_batch
            carried = [(item.query_length, item.state.logit_processor_kwargs.get(ADAPTER)) for item in batch]
            with layers.batch(carried):
                compute(model, batch_data)

        runner.compute_batch = compute_batch

    @property
    def store(self) -> AdapterStore:
        """The adapters that are here.

        Raises:
            AdapterLimit: none can be.
        """
        if self._store is None:
            raise AdapterLimit(f"this engine serves no adapters: {_NO_SLOTS}", advice="start it with --lora-slots")
        return self._store

    def of(self, adapter_id: str) -> LoadedAdapter | None:
        """Return the adapter that a request asks for, None when it is in no slot."""
        return self._store.of(adapter_id) if self._store is not None else None

    def nbytes(self) -> int:
        """Return the bytes of all adapters."""
        return self._store.nbytes() if self._store is not None else 0
