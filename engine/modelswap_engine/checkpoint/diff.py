"""What differs between two manifests. Pure: it decides nothing and reads nothing."""

import msgspec

from modelswap_engine.checkpoint.manifest import Manifest


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """Names, sorted. A tensor is in ``changed`` when only its bytes differ.

    One whose shape and dtype both differ is in ``reshaped`` and in ``retyped``. ``side_changed`` holds side files
    that were added, removed or whose canonical form differs.
    """

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    retyped: tuple[str, ...] = ()
    side_changed: tuple[str, ...] = ()

    @property
    def same_layout(self) -> bool:
        """True when both have the same tensors in the same shapes and dtypes."""
        return not (self.added or self.removed or self.reshaped or self.retyped)

    @property
    def empty(self) -> bool:
        """True when the two are the same content."""
        return self.same_layout and not self.changed and not self.side_changed


def diff(live: Manifest, target: Manifest) -> Diff:
    """Say what must happen to ``live`` for it to become ``target``; both manifests must be complete."""
    old, new = live.by_name, target.by_name
    both = [(old[entry.name], entry) for entry in target.tensors if entry.name in old]
    return Diff(
        changed=tuple(b.name for a, b in both if (a.dtype, a.shape) == (b.dtype, b.shape) and a.sha256 != b.sha256),
        added=tuple(entry.name for entry in target.tensors if entry.name not in old),
        removed=tuple(entry.name for entry in live.tensors if entry.name not in new),
        reshaped=tuple(b.name for a, b in both if a.shape != b.shape),
        retyped=tuple(b.name for a, b in both if a.dtype != b.dtype),
        side_changed=_side_changed(live, target),
    )


def _side_changed(live: Manifest, target: Manifest) -> tuple[str, ...]:
    old = {side.name: side.canonical_sha256 for side in live.side_files}
    new = {side.name: side.canonical_sha256 for side in target.side_files}
    return tuple(sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)))
