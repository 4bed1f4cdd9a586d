"""Signatures of people who may not sign, and files that are none: refused by type, whatever they hold."""

import base64
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelswap_engine.checkpoint.layout import MAX_SIGNATURE_BYTES, Evidence
from modelswap_engine.protocol.errors import SignatureInvalid, TrustedKeysUnusable
from modelswap_engine.signing.sign import sign
from modelswap_engine.signing.trust import Trusted, named, read_trusted
from modelswap_engine.signing.verify import Signer, verify
from tests.support.signers import DAY, NOW, SERVER, Authority, KeyPair, write_key

MANIFEST = b'{"format": 1, "digest": "sha256:00"}'


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return write_key(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def signature(key: KeyPair) -> bytes:
    return sign(MANIFEST, key=key.private)


def check(signature: bytes, *trusted: Path, manifest: bytes = MANIFEST, now: datetime = NOW) -> Signer:
    return verify(Evidence(manifest, signature), trusted=read_trusted(trusted), now=now)


def refused(signature: bytes, *trusted: Path, manifest: bytes = MANIFEST, now: datetime = NOW) -> str:
    with pytest.raises(SignatureInvalid) as caught:
        check(signature, *trusted, manifest=manifest, now=now)
    assert not caught.value.retryable
    assert caught.value.advice
    return caught.value.message


def test_it_holds_for_the_one_manifest_only(key: KeyPair, signature: bytes) -> None:
    assert check(signature, key.public).name == "release.pub"
    for changed in (MANIFEST[:-1], MANIFEST + b"\n", MANIFEST.replace(b"00", b"01"), b""):
        assert "another manifest" in refused(signature, key.public, manifest=changed)


def test_another_key(key: KeyPair, signature: bytes, tmp_path: Path) -> None:
    other = write_key(tmp_path, "other")
    assert "not among the trusted ones (other.pub)" in refused(signature, other.public)
    assert check(signature, other.public, key.public).name == "release.pub"
    # The hint is the attacker's to write: under the trusted key's name the signature of another key does not hold.
    forged = json.loads(sign(MANIFEST, key=other.private))
    forged["verificationMaterial"] = json.loads(signature)["verificationMaterial"]
    assert "does not hold" in refused(json.dumps(forged).encode(), key.public)


def test_a_payload_that_was_not_signed(key: KeyPair, signature: bytes) -> None:
    changed = b"{}"
    forged = json.loads(sign(changed, key=key.private))
    ours = json.loads(signature)
    ours["dsseEnvelope"]["payload"] = forged["dsseEnvelope"]["payload"]
    assert "does not hold" in refused(json.dumps(ours).encode(), key.public, manifest=changed)
    ours["dsseEnvelope"]["signatures"] = []
    refused(json.dumps(ours).encode(), key.public, manifest=changed)


def test_certificates_that_do_not_count(tmp_path: Path, key: KeyPair) -> None:
    ours, foreign = Authority(tmp_path / "ours"), Authority(tmp_path / "foreign", name="authority")

    def signed(authority: Authority, **how: Any) -> bytes:
        private, certificate = authority.issue("trainer", **how)
        return sign(MANIFEST, key=private, certificate=certificate)

    good = signed(ours)
    assert check(good, ours.certificate).name == "CN=trainer"
    assert check(signed(ours, use=None), ours.certificate).kind == "certificate"
    assert "not trusted" in refused(good, foreign.certificate)
    assert "not trusted" in refused(signed(foreign), ours.certificate)
    assert "not among the trusted ones" in refused(good, key.public)
    assert "not for signing code" in refused(signed(ours, use=SERVER), ours.certificate)
    expired = signed(ours, valid=(NOW - 9 * DAY, NOW - 8 * DAY))
    assert "only" in refused(expired, ours.certificate)
    assert "only" in refused(good, ours.certificate, now=NOW + 30 * DAY)
    assert "only" in refused(signed(ours, valid=(NOW + 8 * DAY, NOW + 9 * DAY)), ours.certificate)
    assert check(expired, ours.certificate, now=NOW - 8.5 * DAY)


def test_a_certificate_beside_a_signature_of_another_key(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ours")
    private, certificate = authority.issue("trainer")
    bundle = json.loads(sign(MANIFEST, key=private, certificate=certificate))
    other = json.loads(sign(MANIFEST, key=write_key(tmp_path).private))
    bundle["dsseEnvelope"] = other["dsseEnvelope"]
    refused(json.dumps(bundle).encode(), authority.certificate)


def _keyless(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"] = {"certificate": {"rawBytes": "AA=="}, "tlogEntries": []}


def _no_certificate(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"] = {"x509CertificateChain": {"certificates": []}, "tlogEntries": []}


def _garbage_certificate(bundle: dict[str, Any]) -> None:
    chain = {"certificates": [{"rawBytes": base64.b64encode(b"garbage").decode()}]}
    bundle["verificationMaterial"] = {"x509CertificateChain": chain, "tlogEntries": []}


def _no_hint(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"]["publicKey"] = {"hint": ""}


def _both(bundle: dict[str, Any]) -> None:
    bundle["verificationMaterial"]["certificate"] = {"rawBytes": "AA=="}


def _old(bundle: dict[str, Any]) -> None:
    bundle["mediaType"] = "application/vnd.dev.sigstore.bundle+json;version=0.1"


@pytest.mark.parametrize("change", [_keyless, _no_certificate, _garbage_certificate, _no_hint, _both, _old])
def test_bundles_of_other_kinds(key: KeyPair, signature: bytes, change: Any) -> None:
    bundle = json.loads(signature)
    change(bundle)
    refused(json.dumps(bundle).encode(), key.public)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00" * 99, b"null", b"[]", b"{", b"[" * 100_000, b'{"mediaType": 1}', b" " * (MAX_SIGNATURE_BYTES + 1)],
    ids=["empty", "zeros", "null", "list", "half", "deep", "wrong type", "huge"],
)
def test_what_is_no_bundle_at_all(key: KeyPair, data: bytes) -> None:
    refused(data, key.public)


def test_one_key_twice_in_a_bundle_is_no_way_to_show_two_things(key: KeyPair, signature: bytes) -> None:
    twice = signature.replace(b'{"mediaType"', b'{"verificationMaterial": {}, "mediaType"', 1)
    assert "duplicate" in refused(twice, key.public)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_opens_the_door(key: KeyPair, signature: bytes, at: int, bit: int) -> None:
    changed = bytearray(signature)
    changed[at % len(changed)] ^= 1 << bit
    try:
        signer = check(bytes(changed), key.public)
    except SignatureInvalid:
        return
    # A letter of a name that nobody reads, or a digit of base64 that stands for no bit: it signs the same thing.
    assert signer == check(signature, key.public)


def test_trusted_files_that_are_none(tmp_path: Path, key: KeyPair, signature: bytes) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pub").write_text("ssh-ed25519 AAAA somebody")
    (tmp_path / "broken.pub").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    for place in ("empty", "text.pub", "broken.pub", "none"):
        with pytest.raises(TrustedKeysUnusable):
            check(signature, tmp_path / place)
    with pytest.raises(TrustedKeysUnusable):
        check(signature, key.private)


def test_a_name_that_is_not_mounted_is_not_replaced_by_others() -> None:
    trusted = (Trusted(name="a.pub"), Trusted(name="b.pub"))
    assert named(trusted, ()) == trusted
    assert named(trusted, ("b.pub",)) == trusted[1:]
    with pytest.raises(TrustedKeysUnusable, match=r"c\.pub"):
        named(trusted, ("a.pub", "c.pub"))
