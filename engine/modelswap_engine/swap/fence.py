"""Who may change this pod: each mutating call against the last decision that was accepted. Pure.

Decisions of one owner are ordered by (epoch, revision), so that an old leader or a call that was delayed on the way can
do no harm. The owner ``cli`` is the break-glass path of a person: free where no object owns the pod, else only with a
revision that is higher than the owner's; it never becomes the owner of an owned pod, so the owner's next revision is
welcome again.
"""

from typing import Final

import msgspec

from modelswap_engine.protocol.errors import ForeignOwner, StaleRevision, StateMoved, WrongPod
from modelswap_engine.protocol.messages import Fence, VersionRef

CLI: Final = "cli"


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted", omit_defaults=True):
    """The last decision that was accepted.

    ``operation_id`` is "" for one that was taken over from an assignment file at start. ``done`` is True once its
    target has served; what a trainer does afterwards changes nothing about that.
    """

    owner_uid: str = ""
    epoch: int = 0
    revision: int = 0
    operation_id: str = ""
    target: VersionRef = VersionRef()
    released: bool = False
    done: bool = False

    @property
    def owned(self) -> bool:
        """True when an object owns the pod."""
        return self.owner_uid not in ("", CLI) and not self.released

    @property
    def order(self) -> tuple[int, int]:
        """What decisions of one owner are ordered by."""
        return (self.epoch, self.revision)


def check_pod(fence: Fence, pod_uid: str) -> None:
    """Refuse a call that is meant for another pod.

    Raises:
        WrongPod: it is.
    """
    if fence.pod_uid != pod_uid:
        raise WrongPod(
            f"the call is meant for pod UID {fence.pod_uid!r}, this is {pod_uid!r}",
            advice="list the pods again: addresses are reused",
            details={"expected": pod_uid, "actual": fence.pod_uid},
        )


def check_order(fence: Fence, accepted: Accepted | None, *, target: VersionRef) -> None:
    """Refuse a decision that is older than, or contradicts, the accepted one.

    Raises:
        ForeignOwner: another object owns this pod.
        StaleRevision: an older (epoch, revision), or the same one with another target.
    """
    if accepted is None or not _comparable(fence, accepted):
        return
    asked = (accepted.epoch if fence.owner_uid == CLI else fence.epoch, fence.revision)
    if asked > accepted.order:
        return
    if asked == accepted.order and fence.owner_uid == accepted.owner_uid and _same_target(target, accepted):
        return  # one more attempt of the same decision
    raise StaleRevision(
        f"(epoch {fence.epoch}, revision {fence.revision}) is not newer than the accepted "
        f"(epoch {accepted.epoch}, revision {accepted.revision}) of {accepted.owner_uid}",
        advice=f"decide again on the current state; a revision above {accepted.revision} is needed",
        details={"epoch": str(accepted.epoch), "revision": str(accepted.revision)},
    )


def check_control(fence: Fence, accepted: Accepted | None) -> None:
    """Refuse a call about an operation (cancel) from somebody who could not have started it.

    Raises:
        ForeignOwner: another object owns this pod.
        StaleRevision: an older (epoch, revision).
    """
    if accepted is None or fence.owner_uid == CLI or not _comparable(fence, accepted):
        return
    if (fence.epoch, fence.revision) < accepted.order:
        check_order(fence, accepted, target=VersionRef())


def accept(fence: Fence, accepted: Accepted | None, *, operation_id: str, target: VersionRef) -> Accepted:
    """Return the decision as it is remembered; it was checked before."""
    if fence.owner_uid in ("", CLI) and accepted is not None:
        owner, epoch = (accepted.owner_uid, accepted.epoch) if accepted.owned else (fence.owner_uid, accepted.epoch)
        revision = max(fence.revision, accepted.revision)
    else:
        owner, epoch, revision = fence.owner_uid, fence.epoch, fence.revision
    return Accepted(owner_uid=owner, epoch=epoch, revision=revision, operation_id=operation_id, target=target)


def check_match(if_match: str | None, etag: str) -> None:
    """Refuse a call that was decided on another state than the present one.

    Raises:
        StateMoved: the tags differ.
    """
    if if_match is None or if_match.strip() == "*":
        return
    wanted = if_match.strip().removeprefix("W/").strip('"')
    if wanted != etag.strip('"'):
        raise StateMoved(
            f"the call was decided on state {wanted!r}, the state is {etag} now",
            advice="read the state and decide again",
            details={"expected": wanted, "actual": etag.strip('"')},
        )


def _comparable(fence: Fence, accepted: Accepted) -> bool:
    """Say whether the two decisions must be put in order; False lets the call pass."""
    if not accepted.owned:
        # Nobody owns the pod; but an old leader of the owner that released it stays old.
        return accepted.released and fence.owner_uid == accepted.owner_uid and fence.owner_uid not in ("", CLI)
    if fence.owner_uid in (accepted.owner_uid, CLI):
        return True
    raise ForeignOwner(
        f"this pod belongs to owner {accepted.owner_uid!r} (revision {accepted.revision}), "
        f"the call comes from {fence.owner_uid!r}",
        advice="delete the other ModelVersion or give the pod another slot label; a person may use the owner 'cli'",
        details={"owner": accepted.owner_uid},
    )


def _same_target(target: VersionRef, accepted: Accepted) -> bool:
    if not accepted.operation_id:
        return True  # taken over from the assignment at start: the file names the pod's place, not a swap
    if target.digest and accepted.target.digest:
        return target.digest == accepted.target.digest
    return target.uri == accepted.target.uri
