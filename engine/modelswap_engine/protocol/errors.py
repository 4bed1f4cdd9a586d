"""Errors with a meaning, and their form on the wire.

Each error is a type; its ``code`` is the reason string that ends up in a condition and an Event, its ``status``
the HTTP status, its ``retryable`` whether the same request can succeed later without anybody changing it. They are in
one file, however long: :func:`from_body` must know each of them, whatever else a process has imported.

    ModelswapError
    ├── Refused            the version cannot be served here; nothing was touched        422
    │   ├── InvalidCheckpoint, InvalidDelta, ManifestMismatch, DigestMismatch, IncompatibleModel,
    │   │   IncompatibleAdapter, UnsupportedAdapter, AdapterLimit,
    │   │   UnsupportedFormat, SourceNotAllowed, CredentialsNotMounted, PeerNotAllowed, UnsupportedScheme,
    │   │   SourceNotFound, AlreadyPublished,
    │   │   SignatureMissing, SignatureInvalid, TrustedKeysUnusable,
    │   │   InsufficientMemory, InsufficientDisk, UnsupportedChange, Unverifiable, ChecksFailed
    ├── Unavailable        not now; ask again                                            503 / 409
    │   ├── SourceUnreadable, SourceDenied, SourceChanged, Busy, Paused, NotReady, WorkerLost, DeviceUnavailable,
    │   │   PublishFailed, PeerFailed, SlotsBusy, DrainTimeout, HoldEnded, Cancelled
    ├── Fenced             the caller is not (or no longer) entitled                     4xx
    │   ├── WrongPod (421), ForeignOwner, StaleRevision, WeightsManaged (409), StateMoved (412)
    ├── Denied             Unauthenticated (401), Forbidden (403)
    ├── BadRequest (400), UnknownLoader (400), NotFound (404), AdapterNotFound (404)
    └── Internal           a defect of ours; the message holds no traceback              500
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec


class ErrorBody(msgspec.Struct, rename="camel", omit_defaults=True):
    """``error`` of a JSON error answer; readable by OpenAI clients too (``message``, ``type``, ``code``)."""

    code: str
    message: str
    retryable: bool = False
    advice: str = ""
    type: str = ""
    details: dict[str, str] = {}


class ErrorEnvelope(msgspec.Struct):
    """The whole JSON error answer: ``{"error": {...}}``."""

    error: ErrorBody


class ModelswapError(Exception):
    """Root of everything this project raises on purpose.

    Args:
        message: names the object (field, tensor, file) and the cause, for a person.
        advice: the next step, for the same person.
        details: machine-readable facts, e.g. ``{"tensor": ..., "expected": ..., "actual": ...}``.
    """

    code: ClassVar[str] = "Internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, advice: str = "", details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.details: dict[str, str] = dict(details or {})

    def body(self) -> ErrorBody:
        """Return the wire form."""
        return ErrorBody(
            code=self.code,
            message=self.message,
            retryable=self.retryable,
            advice=self.advice,
            type="server_error" if self.status >= 500 else "invalid_request_error",
            details=self.details,
        )

    def envelope(self) -> ErrorEnvelope:
        """Return the wire form as answered over HTTP."""
        return ErrorEnvelope(error=self.body())


class Internal(ModelswapError):
    """A defect of ours."""


class Refused(ModelswapError):
    """The version cannot be served here; the live weights and the traffic were not touched."""

    code = "Refused"
    status = 422


class InvalidCheckpoint(Refused):
    """Malformed, truncated, overlapping, duplicate or missing content."""

    code = "InvalidCheckpoint"


class InvalidDelta(Refused):
    """A delta pack that is malformed, or does not make the bytes that it promises."""

    code = "InvalidDelta"


class UnsupportedFormat(Refused):
    """Not safetensors (pickle, GGUF, ...); never parsed."""

    code = "UnsupportedFormat"


class ManifestMismatch(Refused):
    """The bytes are not what the checkpoint's own manifest says."""

    code = "ManifestMismatch"


class DigestMismatch(Refused):
    """The content digest is not the pinned one."""

    code = "DigestMismatch"


class SignatureMissing(Refused):
    """Only signed versions are taken, and this one has no manifest, or no signature beside it."""

    code = "SignatureMissing"


class SignatureInvalid(Refused):
    """The signature is not one of this manifest by a trusted key or certificate."""

    code = "SignatureInvalid"


class TrustedKeysUnusable(Refused):
    """The keys that signatures are to be held against are not mounted in this engine, or cannot be read."""

    code = "TrustedKeysUnusable"
    retryable = True


class IncompatibleModel(Refused):
    """Other architecture, shapes, dtypes or tensor names than the running model has."""

    code = "IncompatibleModel"


class UnsupportedChange(Refused):
    """A side file changed in a way this backend or traffic mode cannot apply live."""

    code = "UnsupportedChange"


class IncompatibleAdapter(Refused):
    """The adapter does not fit the base: another base digest, other modules or shapes."""

    code = "IncompatibleAdapter"


class UnsupportedAdapter(Refused):
    """The adapter needs something that this engine does not do (DoRA, biases, trained embeddings, ...)."""

    code = "UnsupportedAdapter"


class AdapterLimit(Refused):
    """More than this engine was started for: rank, pinned adapters, bytes of one adapter, or adapters at all."""

    code = "AdapterLimit"


class SourceNotAllowed(Refused):
    """Outside the allowed roots."""

    code = "SourceNotAllowed"


class CredentialsNotMounted(Refused):
    """The source names credentials that the engine's pod does not have; a pod cannot get new mounts while it runs."""

    code = "CredentialsNotMounted"


class PeerNotAllowed(Refused):
    """Outside the networks that this engine may exchange weights with."""

    code = "PeerNotAllowed"


class AlreadyPublished(Refused):
    """The folder that was to be published to holds another version; versions are never overwritten."""

    code = "AlreadyPublished"
    status = 409


class UnsupportedScheme(Refused):
    """No source knows this URI scheme."""

    code = "UnsupportedScheme"


class SourceNotFound(Refused):
    """Nothing is at this URI; a volume or a mirror may bring it later."""

    code = "SourceNotFound"
    retryable = True


class InsufficientMemory(Refused):
    """Staging or loading would exceed the memory that the process may use at this moment."""

    code = "InsufficientMemory"
    retryable = True


class InsufficientDisk(Refused):
    """Writing the checkpoint for the engine would exceed the disk, or the volume's limit, at this moment."""

    code = "InsufficientDisk"
    retryable = True


class Unverifiable(Refused):
    """What would be live, or is, could not be proved to be the version: the engine does not show it."""

    code = "Unverifiable"


class ChecksFailed(Refused):
    """Output of the staged weights is not finite, or a user's check did not pass."""

    code = "ChecksFailed"


class Unavailable(ModelswapError):
    """Not now; the same request may succeed later."""

    code = "Unavailable"
    status = 503
    retryable = True


class SourceUnreadable(Unavailable):
    """The source failed while it was read."""

    code = "SourceUnreadable"


class SourceDenied(Unavailable):
    """The source does not take the credentials, or not any more; new ones may be mounted while the engine runs."""

    code = "SourceDenied"


class SourceChanged(Unavailable):
    """The source was overwritten while it was read."""

    code = "SourceChanged"


class PublishFailed(Unavailable):
    """A file of a version could not be written to where it was to be published; nobody sees the version."""

    code = "PublishFailed"


class Busy(Unavailable):
    """Another operation is in progress."""

    code = "Busy"
    status = 409


class Paused(Unavailable):
    """The gate is closed and its queue is full or the wait was too long."""

    code = "paused"


class NotReady(Unavailable):
    """The engine is starting, stopping or quarantined."""

    code = "NotReady"


class WorkerLost(Unavailable):
    """A rank worker died or does not answer; it is being restarted."""

    code = "WorkerLost"


class DeviceUnavailable(Unavailable):
    """The engine was told to serve on a GPU and the process sees none, or too few for its ranks."""

    code = "DeviceUnavailable"


class SlotsBusy(Unavailable):
    """Every slot for adapters is taken by one that running requests use, or that is pinned."""

    code = "SlotsBusy"


class PeerFailed(Unavailable):
    """Another rank of the same model failed; that rank's own answer says why."""

    code = "PeerFailed"


class GroupFailed(Unavailable):
    """A process group with somebody outside broke, or did not come about; it is left, and must be made anew."""

    code = "GroupFailed"


class DrainTimeout(Unavailable):
    """Requests in flight did not finish in time and the mode says to keep the old version."""

    code = "DrainTimeout"
    status = 409


class HoldEnded(Unavailable):
    """A swap was to wait once it had staged, and nobody told it to go on or renewed its lease."""

    code = "HoldEnded"
    status = 409


class Cancelled(Unavailable):
    """The operation was cancelled by a call."""

    code = "Cancelled"
    status = 409


class VersionRequired(Unavailable):
    """The client demanded another version than the live one."""

    code = "version_mismatch"
    status = 409


class Fenced(ModelswapError):
    """The caller is not, or no longer, entitled to change this pod."""

    code = "Fenced"
    status = 409


class WrongPod(Fenced):
    """The call names another pod's UID (pod IPs are reused)."""

    code = "WrongPod"
    status = 421


class ForeignOwner(Fenced):
    """Another object owns this pod."""

    code = "ForeignOwner"


class StaleRevision(Fenced):
    """An older (epoch, revision) than the last accepted one."""

    code = "StaleRevision"


class StateMoved(Fenced):
    """The state that the decision was made on is gone (``If-Match``)."""

    code = "StateMoved"
    status = 412


class WeightsManaged(Fenced):
    """The weights of this pod are an object's to decide, and no trainer's."""

    code = "WeightsManaged"


class Denied(ModelswapError):
    """Authentication or authorisation failed."""

    code = "Denied"
    status = 403


class Unauthenticated(Denied):
    """No token, or one that is malformed, expired or for another audience."""

    code = "Unauthenticated"
    status = 401


class Forbidden(Denied):
    """A valid token of a subject that is not on the list."""

    code = "Forbidden"


class BadRequest(ModelswapError):
    """The request does not have the required form."""

    code = "BadRequest"
    status = 400


class UnknownLoader(BadRequest):
    """A custom weight loader that this engine was not started with."""

    code = "UnknownLoader"


class NotFound(ModelswapError):
    """No such operation, model or route."""

    code = "NotFound"
    status = 404


class UnknownGroup(NotFound):
    """This engine is in no process group of that name."""

    code = "UnknownGroup"


class AdapterNotFound(NotFound):
    """No adapter is registered under this name."""

    code = "AdapterNotFound"


def _tree(root: type[ModelswapError]) -> dict[str, type[ModelswapError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_body(body: ErrorBody) -> ModelswapError:
    """Rebuild the typed error that a peer answered; an unknown code keeps its text as :class:`Internal`."""
    kind = _tree(ModelswapError).get(body.code, Internal)
    return kind(body.message, advice=body.advice, details=body.details)
