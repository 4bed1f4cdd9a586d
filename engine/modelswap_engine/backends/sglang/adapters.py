"""SGLang's routes about LoRA adapters; see :class:`~modelswap_engine.backends.external.adapters.AdapterControl`.

SGLang loads an adapter that was unloaded again, by itself and from its last path, as soon as a request names it, and
then refuses another content under that name. So names here say their content, no request names what is not registered,
and whatever is there under a name is unloaded before it is loaded.
"""

from collections.abc import Sequence

from modelswap_engine.backends.external.adapters import HeldAdapter
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.protocol.errors import BadRequest, IncompatibleAdapter, WorkerLost


class SglangAdapters:
    """The adapters of one SGLang; calls are made one at a time by whoever owns it.

    Args:
        client: its routes.
    """

    def __init__(self, client: SglangClient) -> None:
        self._client = client

    async def adapters(self, *, seconds: float) -> Sequence[HeldAdapter]:
        """Ask its registry, which has what every rank loaded."""
        cards = await self._client.models(seconds=seconds)
        return [HeldAdapter(name=card.id, directory=card.root, everywhere=True) for card in cards if card.parent]

    async def load_adapter(self, name: str, directory: str, *, seconds: float) -> None:
        """Load it; a part that some ranks have loaded of one that others refuse is taken away again."""
        await self.unload_adapter(name, seconds=seconds)
        try:
            await self._client.load_adapter(name, directory, seconds=seconds)
        except BadRequest as error:
            await self.unload_adapter(name, seconds=seconds)
            raise IncompatibleAdapter(f"adapter {name}: {error.message}", advice="see the engine's log") from None

    async def unload_adapter(self, name: str, *, seconds: float) -> None:
        """Unload it, which waits for requests that use it."""
        try:
            await self._client.unload_adapter(name, seconds=seconds)
        except BadRequest as error:
            if "does not exist" not in error.message:
                raise WorkerLost(error.message, advice="restart the engine") from None
