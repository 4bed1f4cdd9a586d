"""Only signed versions are taken where that is asked: by the engine, by a version, at a swap and at a start."""

from pathlib import Path

import pytest

from modelswap_engine.checkpoint.manifest import encode
from modelswap_engine.protocol.assignment import Assignment, AssignmentTarget
from modelswap_engine.protocol.errors import SignatureInvalid, SignatureMissing, TrustedKeysUnusable
from modelswap_engine.protocol.messages import PlanRequest, VersionRef
from modelswap_engine.protocol.policy import Verification
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.protocol.updates import BeginUpdate
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.signing.sign import sign
from tests.support.signers import KeyPair, write_key
from tests.support.swapping import OWNER, World, checkpoint

REQUIRED = Verification(required=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys")


@pytest.fixture(scope="module")
def release(keys: Path) -> KeyPair:
    return write_key(keys)


@pytest.fixture(scope="module")
def trusted(keys: Path, release: KeyPair) -> Path:
    (folder := keys / "trusted").mkdir()
    (folder / "release.pub").write_bytes(release.public.read_bytes())
    write_key(keys, "old").public.rename(folder / "old.pub")
    return folder


def sign_at(world: World, target: VersionRef, key: KeyPair) -> None:
    manifest = encode(world.sources.checkpoints[target.uri].manifest())
    world.sources.signatures[target.uri] = sign(manifest, key=key.private)


async def pod(folder: Path, trusted: Path, *, required: bool = False, signer: KeyPair | None = None) -> World:
    world = World(folder)
    if signer is not None:
        sign_at(world, world.template, signer)
    world.signatures = Signatures(required=required, trusted=trusted)
    world.build()
    await world.start()
    return world


def asked(target: VersionRef, verification: Verification | None = REQUIRED, *, pin: bool = False) -> VersionRef:
    return VersionRef(
        version=target.version, uri=target.uri, digest=target.digest if pin else "", verification=verification
    )


async def refused(world: World, target: VersionRef, error: type[Exception], operation_id: str = "op-1") -> None:
    revision = int(operation_id.removeprefix("op-"))
    resolved = len(world.sources.resolved)
    status = await world.swap(target, operation_id, revision=revision)
    assert status.state is SwapState.ABORTED
    assert status.error.code == error.__name__
    assert len(world.sources.resolved) > resolved or target.digest
    assert not {"stage", "pause"} & set(world.backend.steps), "refused before anything is staged"
    world.assert_serves(world.template)
    with pytest.raises(error):
        await world.clock.run(world.coordinator.plan(PlanRequest(target=target)))


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine asks", "version asks"])
async def test_what_is_not_signed_is_refused_and_the_old_version_serves_on(
    tmp_path: Path, trusted: Path, release: KeyPair, by_engine: bool
) -> None:
    world = await pod(tmp_path, trusted, required=by_engine, signer=release)
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    wanted = asked(target, None if by_engine else REQUIRED)
    await refused(world, wanted, SignatureMissing)
    sign_at(world, world.template, release)
    world.sources.signatures[target.uri] = world.sources.signatures[world.template.uri]
    await refused(world, wanted, SignatureInvalid, "op-2")
    world.sources.signatures[target.uri] = b"garbage"
    await refused(world, wanted, SignatureInvalid, "op-3")
    sign_at(world, target, release)
    status = await world.swap(wanted, "op-4", revision=4)
    assert status.state is SwapState.SERVING
    assert status.plan.signed_by.startswith("key release.pub")
    assert world.holds(target)
    await world.stop()


async def test_a_stricter_version_names_its_keys(tmp_path: Path, trusted: Path, keys: Path, release: KeyPair) -> None:
    world = await pod(tmp_path, trusted, required=True, signer=release)
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    sign_at(world, target, release)
    await refused(world, asked(target, Verification(required=True, keys=("old.pub",))), SignatureInvalid)
    await refused(world, asked(target, Verification(keys=("old.pub",))), SignatureInvalid, "op-2")
    await refused(world, asked(target, Verification(keys=("new.pub",))), TrustedKeysUnusable, "op-3")
    wanted = asked(target, Verification(required=False, keys=("release.pub", "old.pub")))
    assert (await world.swap(wanted, "op-4", revision=4)).state is SwapState.SERVING
    await world.stop()


async def test_without_a_policy_nobody_is_asked(tmp_path: Path, trusted: Path) -> None:
    world = await pod(tmp_path, trusted)
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    world.sources.signatures[target.uri] = b"garbage"
    status = await world.swap(asked(target, None))
    assert (status.state, status.plan.signed_by) == (SwapState.SERVING, "")
    await world.stop()


async def test_keys_are_read_when_they_are_wanted(tmp_path: Path, release: KeyPair) -> None:
    trusted = tmp_path / "mounted"
    trusted.mkdir()
    world = await pod(tmp_path / "pod", trusted)
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    sign_at(world, target, release)
    await refused(world, asked(target), TrustedKeysUnusable)
    (trusted / "release.pub").write_bytes(release.public.read_bytes())
    assert (await world.swap(asked(target), "op-2", revision=2)).state is SwapState.SERVING
    (trusted / "release.pub").unlink()
    sign_at(world, world.template, release)
    back = asked(world.template)
    status = await world.swap(back, "op-3", revision=3)
    assert (status.state, status.error.code) == (SwapState.ABORTED, "TrustedKeysUnusable")
    await world.stop()


async def test_what_is_live_or_retained_is_asked_for_its_signature_too(
    tmp_path: Path, trusted: Path, release: KeyPair
) -> None:
    world = await pod(tmp_path, trusted)
    await refused(world, asked(world.template, pin=True), SignatureMissing)
    sign_at(world, world.template, release)
    assert world.state.live.verification is None
    await world.stop()


async def test_what_was_known_before_it_was_signed_is_asked_for_again(
    tmp_path: Path, trusted: Path, release: KeyPair
) -> None:
    world = await pod(tmp_path, trusted)
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    resolve = world.sources.resolve

    async def remembering(uri, *, digest="", credentials=""):
        resolved = await resolve(uri)
        if digest:  # as a source does that has the version: without asking, as it was then
            resolved.header_bytes, resolved.evidence = 0, None
        return resolved

    world.sources.resolve = remembering
    await refused(world, asked(target, pin=True), SignatureMissing)
    sign_at(world, target, release)
    assert (await world.swap(asked(target, pin=True), "op-2", revision=2)).state is SwapState.SERVING
    await world.stop()


async def test_a_pod_that_starts_loads_nothing_unsigned(tmp_path: Path, trusted: Path, release: KeyPair) -> None:
    world = await pod(tmp_path / "a", trusted, required=True)
    assert (world.state.live, world.state.reason) == (None, "LoadFailed")
    assert "modelswap.manifest.json.sig" in world.state.message
    await world.stop()

    world = World(tmp_path / "b")
    target = world.publish("1.1", checkpoint(q=b"QQQQ"))
    stable = AssignmentTarget(version="1.1", uri=target.uri, digest=target.digest, verification=REQUIRED)
    world.assignment = Assignment(owner_uid=OWNER, epoch=1, revision=1, stable=stable)
    world.signatures = Signatures(trusted=trusted)
    world.build()
    await world.start()
    assert (world.state.live, world.state.reason) == (None, "LoadFailed")
    sign_at(world, target, release)
    await world.stop()
    await world.crash()
    await world.start()
    assert world.holds(target)
    assert world.state.live.verification == REQUIRED, "what is loaded after a loss is asked the same"
    world.sources.signatures.clear()
    world.assignment = None  # lost; the journal says what is served
    await world.stop()
    await world.crash()
    await world.start()
    assert world.state.live is None
    await world.stop()


async def test_weights_that_are_sent_have_no_signature(tmp_path: Path, trusted: Path, release: KeyPair) -> None:
    world = await pod(tmp_path, trusted, required=True, signer=release)
    with pytest.raises(SignatureMissing):
        await world.coordinator.updates.begin(BeginUpdate(update_id="u-1", owner="trainer"))
    await world.stop()
