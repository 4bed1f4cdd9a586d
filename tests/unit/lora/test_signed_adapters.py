"""Adapters that must be signed: real folders, real keys, the policy of the engine and of the slot."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelswap_engine.cli import main
from modelswap_engine.lora.desk import AdapterDesk
from modelswap_engine.lora.settings import LoraSettings
from modelswap_engine.lora.vouching import Vouching
from modelswap_engine.protocol.adapter_calls import LoadAdapterRequest, ResolveAdaptersRequest
from modelswap_engine.protocol.adapters import AdapterChange, AdapterSource, AdapterStatus
from modelswap_engine.protocol.errors import (
    ManifestMismatch,
    ModelswapError,
    NotReady,
    SignatureInvalid,
    SignatureMissing,
    TrustedKeysUnusable,
)
from modelswap_engine.protocol.messages import Fence, VersionRef
from modelswap_engine.protocol.policy import Verification
from modelswap_engine.signing.policy import Signatures
from modelswap_engine.sources.file import FileSource
from modelswap_engine.swap.clock import SystemClock
from tests.support.adapters import CONFIG, FIELDS, MODULE, matrix, pair, write_adapter
from tests.support.fake_adapters import FakeBase, FakeHost
from tests.support.signers import KeyPair, write_key

REQUIRED = Verification(required=True)


@pytest.fixture
def key(tmp_path: Path) -> KeyPair:
    return write_key(tmp_path / "keys")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a")


def sign(folder: Path, key: KeyPair) -> None:
    main.app(["manifest", "build", str(folder), "--sign", str(key.private)], standalone_mode=False)


class Engine:
    def __init__(self, folder: Path, key: KeyPair, *, required: bool = True) -> None:
        trusted = folder / "trusted"
        trusted.mkdir()
        (trusted / "release.pub").write_bytes(key.public.read_bytes())
        self.host, self.base = FakeHost(slots=2), FakeBase()
        self.desk = AdapterDesk(
            host=self.host,
            opener=FileSource(roots=[folder], cache=None),
            clock=SystemClock(),
            settings=LoraSettings(slots=2, served_model_name="base", pod_uid="pod"),
            vouching=Vouching(Signatures(required=required, trusted=trusted)),
        )
        self.desk.attach(self.base)

    async def load(self, folder: Path, **more: Any) -> AdapterStatus:
        fence = Fence(pod_uid="pod", owner_uid="cli", epoch=1, revision=1)
        source = AdapterSource(name="a", uri=folder.as_uri(), **more)
        return await self.desk.load(LoadAdapterRequest(fence=fence, source=source))

    async def refuses(self, folder: Path, error: type[ModelswapError], match: str, **more: Any) -> None:
        with pytest.raises(error, match=match):
            await self.load(folder, **more)
        assert self.host.calls == [], "nothing of it has come to the engine"


async def test_an_engine_that_requires_signatures_takes_signed_adapters_only(
    tmp_path: Path, folder: Path, key: KeyPair
) -> None:
    engine = Engine(tmp_path, key)
    await engine.refuses(folder, SignatureMissing, f"adapter a at {folder.as_uri()}: it has no modelswap.manifest.json")
    sign(folder, key)
    assert (await engine.load(folder)).name == "a"


async def test_a_stranger_s_key_vouches_for_nothing(tmp_path: Path, folder: Path, key: KeyPair) -> None:
    sign(folder, write_key(tmp_path / "others", "other"))
    await Engine(tmp_path, key).refuses(folder, SignatureInvalid, "not among the trusted ones")


async def test_tensors_that_were_changed_since_are_refused(tmp_path: Path, folder: Path, key: KeyPair) -> None:
    sign(folder, key)
    stem = f"base_model.model.{MODULE}"
    changed = pair() | {f"{stem}.lora_A.weight": matrix(2, 4, fill=7)}
    write_adapter(folder, tensors=changed)
    await Engine(tmp_path, key).refuses(folder, ManifestMismatch, rf"bytes of tensor '{stem}.lora_A.weight'")


async def test_another_shape_or_config_is_refused_before_a_byte_is_read(
    tmp_path: Path, folder: Path, key: KeyPair
) -> None:
    sign(folder, key)
    config = (folder / CONFIG).read_bytes()
    write_adapter(folder, fields=FIELDS | {"lora_alpha": 400})
    engine = Engine(tmp_path, key)
    await engine.refuses(folder, ManifestMismatch, r"side file 'adapter_config\.json'")
    write_adapter(folder, fields=config, tensors=pair(rank=1))
    await engine.refuses(folder, ManifestMismatch, "shape")


async def test_the_slot_s_policy_holds_where_the_engine_has_none(tmp_path: Path, folder: Path, key: KeyPair) -> None:
    engine = Engine(tmp_path, key, required=False)
    await engine.refuses(folder, SignatureMissing, "adapter a", verification=REQUIRED)
    sign(folder, key)
    named = Verification(required=True, keys=("staging.pub",))
    await engine.refuses(folder, TrustedKeysUnusable, r"staging\.pub", verification=named)
    await engine.load(folder, verification=REQUIRED)


async def test_beside_a_base_that_had_to_be_signed_nothing_unsigned_is_loaded_by_hand(
    tmp_path: Path, folder: Path, key: KeyPair
) -> None:
    engine = Engine(tmp_path, key, required=False)
    engine.base.live = VersionRef(version="1.0", digest="sha256:" + "b" * 64, verification=REQUIRED)
    await engine.refuses(folder, SignatureMissing, "adapter a")
    engine.base.live = VersionRef(version="1.0", digest="sha256:" + "b" * 64)
    await engine.load(folder)


async def test_what_is_looked_up_for_objects_and_planned_with_a_base_is_asked_for_its_signature(
    tmp_path: Path, folder: Path, key: KeyPair
) -> None:
    engine = Engine(tmp_path, key)
    source = AdapterSource(name="a", uri=folder.as_uri())
    found = await engine.desk.reader.resolve(ResolveAdaptersRequest(sources=[source]))
    error = found.adapters[0].error
    assert error is not None
    assert (error.code, error.retryable, "modelswap manifest build" in error.advice) == (
        "SignatureMissing",
        False,
        True,
    )
    effect = await engine.desk.assess(AdapterChange(sources=[source]), target=VersionRef(digest="sha256:" + "c" * 64))
    assert [refusal.code for refusal in effect.refusals] == ["SignatureMissing"]


SIGNED_BASE = VersionRef(version="1.0", digest="sha256:" + "b" * 64, verification=REQUIRED)


async def test_a_call_can_ask_for_more_than_the_base_s_policy_never_for_less(
    tmp_path: Path, folder: Path, key: KeyPair
) -> None:
    engine = Engine(tmp_path, key, required=False)
    engine.base.live = SIGNED_BASE
    await engine.refuses(folder, SignatureMissing, "adapter a", verification=Verification())
    sign(folder, key)
    await engine.refuses(folder, TrustedKeysUnusable, r"x\.pub", verification=Verification(keys=("x.pub",)))
    only = msgspec.structs.replace(REQUIRED, keys=("release.pub",))
    engine.base.live = msgspec.structs.replace(SIGNED_BASE, verification=only)
    other = Verification(required=True, keys=("x.pub",))
    await engine.refuses(
        folder, SignatureInvalid, r"names the keys x\.pub, its base's release\.pub", verification=other
    )
    await engine.load(folder, verification=Verification(keys=("x.pub", "release.pub")))
    assert engine.base.registrations["a"].sources[0].verification == only, "a restart asks for the same"


async def test_while_a_base_is_restored_its_policy_holds_and_without_one_nothing_is_taken(
    tmp_path: Path, folder: Path, key: KeyPair
) -> None:
    engine = Engine(tmp_path, key, required=False)
    engine.base.live = None
    await engine.refuses(folder, NotReady, "no base is live")
    await engine.desk.restore(SIGNED_BASE)
    await engine.refuses(folder, SignatureMissing, "adapter a")


async def test_what_a_swap_names_is_held_to_the_policy_of_the_base_that_it_brings(
    tmp_path: Path, folder: Path, key: KeyPair
) -> None:
    engine = Engine(tmp_path, key, required=False)
    change = AdapterChange(sources=[AdapterSource(name="a", uri=folder.as_uri(), verification=Verification())])
    target = msgspec.structs.replace(SIGNED_BASE, digest="sha256:" + "c" * 64)
    effect = await engine.desk.assess(change, target=target)
    assert [refusal.code for refusal in effect.refusals] == ["SignatureMissing"]
    with pytest.raises(SignatureMissing, match="adapter a"):
        await engine.desk.stage("op", change, target=target)
    await engine.desk.settle()
    assert engine.host.calls == []
    await engine.desk.adopt(change, target=target)
    assert engine.base.registrations["a"].sources[0].verification == REQUIRED, "it is loaded with the base as asked"
    others = msgspec.structs.replace(change.sources[0], verification=Verification(required=True, keys=("x.pub",)))
    mine = msgspec.structs.replace(target, verification=Verification(required=True, keys=("release.pub",)))
    effect = await engine.desk.assess(AdapterChange(sources=[others]), target=mine)
    assert [refusal.code for refusal in effect.refusals] == ["SignatureInvalid"]
