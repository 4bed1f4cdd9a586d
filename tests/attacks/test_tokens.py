"""Every way to get into the control port without being entitled to, against the offline token check."""

import asyncio
from collections.abc import Callable

import pytest

from modelswap_engine.http.kubernetes_auth import Expected, KeySet, KubernetesAuthenticator, issuer_of
from modelswap_engine.protocol.errors import Forbidden, Unauthenticated, Unavailable, WrongPod
from tests.support.tokens import ISSUER, NOW, POD_UID, SUBJECT, Signer, claims, forged, key_set

RSA = Signer("rsa-1")
EC = Signer("ec-1", "ES256")
STRANGER = Signer("rsa-1")  # same id, another key
OTHER_UID = "6f1c0b0e-7d0c-4a52-9f43-0d6a7b1f8f12"


class Cluster:
    """The API server's key route, and a clock."""

    def __init__(self) -> None:
        self.document = key_set(RSA, EC)
        self.now = NOW
        self.fetches = 0
        self.up = True

    async def fetch(self) -> bytes:
        self.fetches += 1
        if not self.up:
            raise ConnectionError("refused")
        return self.document

    def authenticator(self) -> KubernetesAuthenticator:
        return KubernetesAuthenticator(
            expected=Expected(audience=POD_UID, issuer=ISSUER, subjects=frozenset({SUBJECT}), one_pod=True),
            keys=KeySet(self.fetch, clock=lambda: self.now),
            clock=lambda: self.now,
        )


@pytest.mark.parametrize("signer", [RSA, EC], ids=["RS256", "ES256"])
async def test_the_operators_token_for_this_pod_is_good(signer: Signer) -> None:
    principal = await Cluster().authenticator().authenticate(signer.sign(claims()))
    assert principal.subject == SUBJECT


FORGERIES: dict[str, Callable[[], str | None]] = {
    "nothing": lambda: None,
    "empty": lambda: "",
    "alg none": lambda: forged({"alg": "none", "kid": "rsa-1"}, claims()),
    "alg None": lambda: forged({"alg": "None", "kid": "rsa-1"}, claims()),
    "no alg": lambda: forged({"kid": "rsa-1"}, claims()),
    "hs256 with the public key": lambda: forged({"alg": "HS256", "kid": "rsa-1"}, claims(), secret=RSA.public_pem()),
    "rs256 header over an hmac": lambda: forged({"alg": "RS256", "kid": "rsa-1"}, claims(), secret=RSA.public_pem()),
    "es256 header on an rsa key": lambda: forged({"alg": "ES256", "kid": "rsa-1"}, claims(), secret=b"x"),
    "another key under the same id": lambda: STRANGER.sign(claims()),
    "signature cut off": lambda: RSA.sign(claims()).rsplit(".", 1)[0] + ".",
    "no kid": lambda: RSA.sign(claims(), kid=None),
    "unknown kid": lambda: RSA.sign(claims(), kid="other"),
    "kid of another key": lambda: RSA.sign(claims(), kid="ec-1"),
    "key inside the token": lambda: STRANGER.sign(claims(), jwk=STRANGER.jwk()),
    "no pod's name": lambda: RSA.sign(claims(aud=["another-pod"])),
    "api server's audience": lambda: RSA.sign(claims(aud=[ISSUER])),
    "two pods": lambda: RSA.sign(claims(aud=[OTHER_UID, "6f1c0b0e-7d0c-4a52-9f43-0d6a7b1f8f13"])),
    "another pod, expired": lambda: RSA.sign(claims(aud=[OTHER_UID], exp=int(NOW) - 11)),
    "another pod, by a stranger": lambda: STRANGER.sign(claims(aud=[OTHER_UID])),
    "another pod, of another cluster": lambda: RSA.sign(claims(aud=[OTHER_UID], iss="https://elsewhere")),
    "audience is an object": lambda: RSA.sign(claims(aud=[{"uid": POD_UID}])),
    "no audience": lambda: RSA.sign(claims(aud=None)),
    "expired": lambda: RSA.sign(claims(exp=int(NOW) - 11)),
    "no expiry": lambda: RSA.sign(claims(exp=None)),
    "expiry is text": lambda: RSA.sign(claims(exp="never")),
    "expiry is true": lambda: RSA.sign(claims(exp=True)),
    "not yet": lambda: RSA.sign(claims(nbf=int(NOW) + 60)),
    "issued in the future": lambda: RSA.sign(claims(iat=int(NOW) + 60)),
    "other issuer": lambda: RSA.sign(claims(iss="https://elsewhere")),
    "no issuer": lambda: RSA.sign(claims(iss=None)),
    "no subject": lambda: RSA.sign(claims(sub=None)),
    "huge": lambda: "a" * 20_000,
    "huge header": lambda: forged({"alg": "RS256", "kid": "k" * 20_000}, claims()),
    "garbage": lambda: "\udcff.\x00.🙂",
    "three dots": lambda: "...",
    "not json": lambda: "bm90.anNvbg.eA",
    "header is a list": lambda: forged(["RS256"], claims()),  # type: ignore[arg-type]
    "deep header": lambda: "W1tb" * 2000 + ".e30.e30",
    "claims are a list": lambda: forged({"alg": "RS256", "kid": "rsa-1"}, []),
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_forged_and_foreign_tokens_are_refused(name: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        await Cluster().authenticator().authenticate(FORGERIES[name]())
    assert "Traceback" not in caught.value.message


async def test_a_good_token_of_a_subject_not_on_the_list_is_forbidden() -> None:
    with pytest.raises(Forbidden, match="default:default"):
        await Cluster().authenticator().authenticate(RSA.sign(claims(sub="system:serviceaccount:default:default")))


@pytest.mark.parametrize("audience", [[OTHER_UID], OTHER_UID])
async def test_a_token_for_the_pod_that_had_this_address_before_says_so(audience: object) -> None:
    with pytest.raises(WrongPod, match=OTHER_UID) as caught:
        await Cluster().authenticator().authenticate(RSA.sign(claims(aud=audience)))
    assert caught.value.details == {"expected": OTHER_UID, "actual": POD_UID}


async def test_who_may_not_decide_here_does_not_learn_which_pod_it_is() -> None:
    stranger = claims(aud=[OTHER_UID], sub="system:serviceaccount:default:default")
    with pytest.raises(Forbidden) as caught:
        await Cluster().authenticator().authenticate(RSA.sign(stranger))
    assert POD_UID not in str(caught.value.body())


async def test_leeway_is_small() -> None:
    cluster = Cluster()
    token = RSA.sign(claims())
    cluster.now = NOW + 600 + 9
    await cluster.authenticator().authenticate(token)
    cluster.now = NOW + 600 + 10
    with pytest.raises(Unauthenticated, match="expired"):
        await cluster.authenticator().authenticate(token)


async def test_made_up_key_ids_do_not_hammer_the_api_server() -> None:
    cluster = Cluster()
    authenticator = cluster.authenticator()
    for number in range(50):
        with pytest.raises(Unauthenticated):
            await authenticator.authenticate(RSA.sign(claims(), kid=f"made-up-{number}"))
    assert cluster.fetches == 1


async def test_a_rotated_key_is_found_and_the_old_one_dropped() -> None:
    cluster = Cluster()
    authenticator = cluster.authenticator()
    await authenticator.authenticate(RSA.sign(claims()))
    fresh = Signer("rsa-2")
    cluster.document = key_set(fresh)
    cluster.now += 11
    await authenticator.authenticate(fresh.sign(claims()))
    with pytest.raises(Unauthenticated):
        await authenticator.authenticate(RSA.sign(claims()))


async def test_keys_in_hand_outlive_the_api_server() -> None:
    cluster = Cluster()
    authenticator = cluster.authenticator()
    token = RSA.sign(claims(exp=int(NOW) + 100_000))
    await authenticator.authenticate(token)
    cluster.up = False
    cluster.now += 7200
    await authenticator.authenticate(token)


async def test_without_any_keys_nobody_gets_in_and_the_caller_may_retry() -> None:
    cluster = Cluster()
    cluster.up = False
    authenticator = cluster.authenticator()
    with pytest.raises(Unavailable):
        await authenticator.authenticate(RSA.sign(claims()))
    cluster.up = True
    cluster.now += 11
    await authenticator.authenticate(RSA.sign(claims()))


BROKEN_KEY_SETS = [b"", b"[]", b'{"keys": 1}', b"\xff", b'{"keys": [1, {"kid": 1}, {"kty": "oct"}]}', b"[" * 100_000]


@pytest.mark.parametrize("document", BROKEN_KEY_SETS, ids=lambda document: repr(document[:12]))
async def test_a_broken_key_set_lets_nobody_in(document: bytes) -> None:
    cluster = Cluster()
    cluster.document = document
    with pytest.raises((Unavailable, Unauthenticated)):
        await cluster.authenticator().authenticate(RSA.sign(claims()))


async def test_symmetric_keys_in_the_key_set_are_not_used() -> None:
    cluster = Cluster()
    cluster.document = b'{"keys": [{"kty": "oct", "kid": "oct-1", "k": "c2VjcmV0"}]}'
    with pytest.raises(Unauthenticated):
        await cluster.authenticator().authenticate(forged({"alg": "HS256", "kid": "oct-1"}, claims(), secret=b"secret"))


def test_the_issuer_comes_from_the_pods_own_token() -> None:
    assert issuer_of(RSA.sign(claims())) == ISSUER
    with pytest.raises(ValueError, match="issuer"):
        issuer_of(RSA.sign(claims(iss=None)))
    with pytest.raises(ValueError, match="service-account"):
        issuer_of("garbage")


async def test_a_good_token_does_not_wait_for_the_fetch_that_a_made_up_key_began() -> None:
    cluster, release = Cluster(), asyncio.Event()
    authenticator = cluster.authenticator()
    await authenticator.authenticate(RSA.sign(claims()))
    fetch = cluster.fetch

    async def slow() -> bytes:
        await release.wait()
        return await fetch()

    authenticator._keys._fetch = slow
    cluster.now += 60
    attacking = asyncio.create_task(authenticator.authenticate(RSA.sign(claims(), kid="made-up")))
    await asyncio.sleep(0)
    good = asyncio.create_task(authenticator.authenticate(RSA.sign(claims())))
    for _ in range(10):
        await asyncio.sleep(0)
    assert good.done()
    assert good.result().subject == SUBJECT
    release.set()
    with pytest.raises(Unauthenticated):
        await attacking
