"""A slot as its objects show it, typed. Pure: JSON in, values out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from modelswap_operator.api.conditions import Condition, find
from modelswap_operator.api.labels import SLOT_LABEL
from modelswap_operator.api.modelversion import ModelVersionSpec, ModelVersionStatus, Revision
from modelswap_operator.api.reasons import ConditionType
from modelswap_operator.cli.failures import PluginError


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One ModelVersion; ``managed_by`` names what else writes it, "" for people."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: ModelVersionSpec
    status: ModelVersionStatus
    managed_by: str

    @property
    def current(self) -> bool:
        """Say whether the status speaks of this generation."""
        return self.status.observed_generation == self.generation

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return a condition that speaks of this generation."""
        found = find(self.status.conditions, kind)
        return found if found is not None and found.observed_generation == self.generation else None

    @property
    def ready(self) -> bool:
        """Say whether every counted pod has proved this generation's version."""
        found = self.condition(ConditionType.READY)
        return self.current and found is not None and found.true

    @property
    def stalled(self) -> Condition | None:
        """Return why a person is needed, None when nobody is."""
        return self.condition(ConditionType.STALLED) if self.current else None

    @property
    def message(self) -> str:
        """Return the one line that says how it stands."""
        found = self.condition(ConditionType.READY)
        if found is None:
            return "no operator has seen this generation yet"
        return found.message


def slot_of(thing: dict[str, Any]) -> Slot:
    """Read a ModelVersion.

    Raises:
        PluginError: it is of a form that this version of the plugin cannot read.
    """
    meta = thing["metadata"]
    try:
        spec = msgspec.convert(thing["spec"], ModelVersionSpec, strict=False)
        status = msgspec.convert(thing.get("status") or {}, ModelVersionStatus, strict=False)
    except msgspec.ValidationError as error:
        raise PluginError(
            f"modelversion {meta['name']} is of a form that this plugin cannot read: {error}",
            advice="use the plugin of the operator's release",
        ) from None
    return Slot(
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        generation=meta.get("generation", 0),
        spec=spec,
        status=status,
        managed_by=manager_of(meta),
    )


def manager_of(meta: dict[str, Any]) -> str:
    """Name what applies an object again and again, by the marks that it leaves; "" when there are none."""
    labels, notes = meta.get("labels") or {}, meta.get("annotations") or {}
    if name := labels.get("kustomize.toolkit.fluxcd.io/name"):
        return f"Flux (Kustomization {labels.get('kustomize.toolkit.fluxcd.io/namespace', '?')}/{name})"
    if name := labels.get("helm.toolkit.fluxcd.io/name"):
        return f"Flux (HelmRelease {labels.get('helm.toolkit.fluxcd.io/namespace', '?')}/{name})"
    if tracking := notes.get("argocd.argoproj.io/tracking-id"):
        return f"Argo CD (application {str(tracking).partition(':')[0]})"
    if name := labels.get("argocd.argoproj.io/instance"):
        return f"Argo CD (application {name})"
    if name := notes.get("meta.helm.sh/release-name"):
        return f"Helm (release {notes.get('meta.helm.sh/release-namespace', '?')}/{name})"
    return ""


def pods_of(things: Sequence[dict[str, Any]], slot: str) -> list[dict[str, Any]]:
    """Return a slot's pods that are not on their way out."""
    return [
        thing
        for thing in things
        if thing["metadata"].get("labels", {}).get(SLOT_LABEL) == slot
        and "deletionTimestamp" not in thing["metadata"]
        and thing.get("status", {}).get("phase") not in ("Failed", "Succeeded")
    ]


def adapters_of(adapters: Sequence[dict[str, Any]], meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the LoRAAdapters of a slot, by the metadata of its ModelVersion."""
    return [
        adapter
        for adapter in adapters
        if adapter["metadata"].get("namespace") == meta.get("namespace")
        and adapter.get("spec", {}).get("modelRef", {}).get("name") == meta["name"]
    ]


def revision_to_return_to(slot: Slot, wanted: int | None) -> Revision:
    """Return the revision that ``rollback`` means: the one asked for, else the last good one that is not wanted now.

    Raises:
        PluginError: there is none, or nobody knows where it came from.
    """
    history = slot.status.history
    if wanted is not None:
        found = next((r for r in history if r.revision == wanted), None)
        if found is None:
            known = ", ".join(str(r.revision) for r in history) or "none"
            raise PluginError(f"modelversion {slot.name} has no revision {wanted}", advice=f"it remembers: {known}")
    else:
        good = (r for r in history if r.result == "Succeeded" and not _wanted_now(slot, r))
        found = next(good, None)
        if found is None:
            raise PluginError(
                f"modelversion {slot.name} remembers no other version that was served",
                advice="change spec.version and spec.source yourself",
            )
    if not found.source:
        raise PluginError(f"revision {found.revision} of {slot.name} does not say where it came from")
    return found


def _wanted_now(slot: Slot, revision: Revision) -> bool:
    return (revision.version, revision.source) == (slot.spec.version, slot.spec.source.uri)


def change_to(revision: Revision, slot: Slot) -> list[dict[str, Any]]:
    """Return the same as a JSON patch that is refused when the spec has changed since; status may change meanwhile."""
    pin = {"path": "/spec/source/digest"}
    digest: list[dict[str, Any]] = [{"op": "add", **pin, "value": revision.digest}] if revision.digest else []
    if not revision.digest and slot.spec.source.digest:
        digest = [{"op": "remove", **pin}]
    return [
        {"op": "test", "path": "/metadata/generation", "value": slot.generation},
        {"op": "replace", "path": "/spec/version", "value": revision.version},
        {"op": "replace", "path": "/spec/source/uri", "value": revision.source},
        *digest,
    ]


def patch_to(revision: Revision) -> dict[str, Any]:
    """Return the merge patch of a spec that leads to a revision, pinned to the bytes that it had."""
    return {
        "spec": {
            "version": revision.version,
            "source": {"uri": revision.source, "digest": revision.digest or None},
        }
    }
