"""What a change of the base does to the adapters on it: staged with it, switched in its commit, taken back with it.

Which content each name has on the new base is decided by whoever asks for the swap, else by what is assigned, else by
what was registered for that base before. A name that has none is bound to another base: it blocks the swap, or goes in
the same commit.
From :meth:`Together.seal` to the end nothing is awaited by a switch, so base and adapters change for requests at once.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from modelswap_engine.lora.entries import Content, Entry
from modelswap_engine.lora.reading import Fitting, Reader
from modelswap_engine.lora.registry import Registry
from modelswap_engine.lora.shelf import Shelf
from modelswap_engine.lora.terms import OnTerms, settled
from modelswap_engine.protocol.adapters import AdapterSource, OnIncompatible
from modelswap_engine.protocol.errors import IncompatibleAdapter, ModelswapError, Refused
from modelswap_engine.swap.companion import Effect
from modelswap_engine.swap.fence import Accepted
from modelswap_engine.swap.records import Registered

Open = Callable[[OnTerms], Awaitable[Fitting]]
Assigned = Callable[[str, str], AdapterSource | None]
"""Returns the content that a name is assigned on a base."""


@dataclass(frozen=True, kw_only=True)
class _Staged:
    """A content that is claimed for the new base, and what was registered under its name when it was brought."""

    entry: Entry
    content: Content
    source: OnTerms
    registered: Registered | None


@dataclass(kw_only=True)
class Together:
    """The adapters' part of one swap.

    Attributes:
        registered: what is registered now, by name; the desk's own mapping.
        assigned: what is assigned; that comes before what was registered for a base once.
        decisions: the assignment by name, as it was when this began.
        source, target: digests of the old and the new base.
        sources: what was asked for.
        on_incompatible: what is done about what cannot stay.
        ahead: what was registered before and after contents for the new base were remembered ahead of its commit.
    """

    registry: Registry
    shelf: Shelf
    registered: Mapping[str, Registered]
    assigned: Assigned
    decisions: Mapping[str, Accepted]
    source: str
    target: str
    sources: Sequence[OnTerms]
    on_incompatible: OnIncompatible
    sealed: bool = False
    switched: bool = False
    _staged: dict[str, _Staged] = field(default_factory=dict)
    ahead: dict[str, tuple[Registered | None, Registered]] = field(default_factory=dict)
    _undo: list[tuple[str, Entry | None]] = field(default_factory=list)
    _switched: list[_Staged] = field(default_factory=list)

    async def assess(self, open_fitting: Open) -> Effect:
        """Say what would be done, from headers alone.

        Raises:
            Unavailable: a source cannot be read now.
        """
        refusals: list[Refused] = []
        lines: list[str] = []
        for name, source in self._wanted().items():
            if source is None:
                lines.append(f"{name}: unloaded, it is bound to another base")
                if self.on_incompatible is OnIncompatible.BLOCK:
                    refusals.append(self._blocked(name))
            elif not self._serves(source):
                lines.append(f"{name}: {source.uri}")
                try:
                    await open_fitting(source)
                except Refused as error:
                    error.details.setdefault("adapter", name)
                    refusals.append(error)
        return Effect(refusals=tuple(refusals), changes=tuple(lines))

    async def stage(self, bring: Reader, operation_id: str) -> None:
        """Bring what is wanted into the engine's memory, claimed; no name leads to it yet.

        Raises:
            ModelswapError: something cannot be had; :meth:`end` gives the rest back.
        """
        for name, source in self._wanted().items():
            if source is None or self._serves(source):
                continue
            try:
                await self._stage(source, bring, operation_id)
            except ModelswapError as error:
                error.details.setdefault("adapter", name)  # it is not the base that is to blame
                raise

    async def _stage(self, source: OnTerms, bring: Reader, operation_id: str) -> None:
        async with self.shelf.name(source.name):
            read = await bring(source, operation_id)
            entry = await self.shelf.bring(read)
            self._staged[source.name] = _Staged(
                entry=entry,
                content=read.content,
                source=msgspec.structs.replace(source, digest=read.content.digest),
                registered=self.registered.get(source.name),
            )

    def bound(self) -> list[OnTerms]:
        """Return the staged contents that are bound to the new base, of names that nobody decided about meanwhile."""
        return [
            staged.source
            for name, staged in self._staged.items()
            if staged.source.base_digest == self.target and not self._overtaken(name, staged)
        ]

    def seal(self) -> None:
        """Look once more before the engine stops: names may have come since. From now on none bound to a base does.

        Raises:
            IncompatibleAdapter: one that is bound to another base serves, and the swap may not unload it.
        """
        if self.on_incompatible is OnIncompatible.BLOCK:
            for name in self._incompatible():
                raise self._blocked(name)
        self.sealed = True

    def switch(self) -> None:
        """Let all names lead to what belongs to the new base."""
        self.switched = True
        for name in self._incompatible():
            self._undo.append((name, self._kept(self.registry.withdraw(name))))
        for name, staged in list(self._staged.items()):
            if self._overtaken(name, staged):
                continue
            del self._staged[name]
            former = self.registry.publish(staged.entry, staged.content)
            self._undo.append((name, self._kept(former) if former is not None else None))
            self._switched.append(staged)

    def revert(self) -> None:
        """Let all names lead to what they led to before; without a switch there is nothing to do."""
        for name, former in reversed(self._undo):
            now = self.registry.resolve(name) if self.registry.has(name) else None
            if former is not None:
                self.registry.publish(former, former.content)
            elif now is not None:
                self.registry.withdraw(name)
            if now is not None:
                self.shelf.sweep(now)
        self._undo, self._switched, self.switched = [], [], False

    def end(self, *, drain_seconds: float) -> list[tuple[Entry, OnTerms]]:
        """Give back what is not wanted any more; return the contents that took names over, and where they are from."""
        for staged in self._staged.values():
            self.registry.unstage(staged.entry, staged.content)
            self.shelf.sweep(staged.entry)
        for _, former in self._undo:
            if former is not None:
                self.registry.unstage(former, former.content)
                self.shelf.drain(former, drain_seconds)
        switched = [(staged.entry, staged.source) for staged in self._switched]
        self._staged, self._undo, self._switched = {}, [], []
        return switched

    def _wanted(self) -> dict[str, OnTerms | None]:
        """Return name → content on the new base; None for one that serves now and has none."""
        asked = {source.name for source in self.sources}
        found = {name: self._source(name) for name in sorted(asked | set(self.registered) | self._waiting())}
        return {name: source for name, source in found.items() if source is not None or self.registry.has(name)}

    def _waiting(self) -> set[str]:
        """Names that are assigned a content for just the new base: that comes with it, whatever there was before."""
        found = {name: self.assigned(name, self.target) for name in self.decisions}
        return {name for name, source in found.items() if source is not None and source.base_digest == self.target}

    def _source(self, name: str) -> OnTerms | None:
        mine = {source.base_digest: source for source in self.sources if source.name == name}
        registered = self.registered.get(name)
        known = registered.source_for(self.target) if registered is not None else None
        before = self.assigned(name, self.target) or known
        return mine.get(self.target) or mine.get("") or (settled(before) if before is not None else None)

    def _incompatible(self) -> list[str]:
        names = (entry.content.name for entry in self.registry.registered())
        return [name for name in names if name not in self._staged and self._source(name) is None]

    def _serves(self, source: AdapterSource) -> bool:
        """Say whether a name leads to this very content already, and may do so on the new base."""
        if not source.digest or not self.registry.has(source.name):
            return False
        now = self.registry.resolve(source.name).content
        same_terms = (now.base_digest, now.pinned) == (source.base_digest, source.pinned)
        return now.digest == source.digest and same_terms

    def _overtaken(self, name: str, staged: _Staged) -> bool:
        """Say whether somebody decided about the name after its content was staged."""
        now = self.registered.get(name)
        if now is staged.registered or now is self.ahead.get(name, (None, None))[1]:
            return False
        return now is None or not now.sources or now.source_for(self.target) is not None

    def _kept(self, former: Entry) -> Entry:
        """Keep what is replaced until the swap can no longer be taken back."""
        self.registry.hold(former)
        return former

    def _blocked(self, name: str) -> IncompatibleAdapter:
        bound = self.registry.resolve(name).content.base_digest
        return IncompatibleAdapter(
            f"adapter {name} is bound to base {bound}, and has no content for {self.target}",
            advice="name its content for the new base in adapters.sources, unload it, or set adapters.onIncompatible: "
            "Unload",
            details={"adapter": name, "expected": bound, "actual": self.target},
        )
