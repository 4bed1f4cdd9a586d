"""Tokens in a file: several at once, rotated without a restart, revoked by removing them."""

import os
from pathlib import Path

import pytest

from modelswap_engine.http.auth import TokenFileAuthenticator, bearer_token
from modelswap_engine.protocol.errors import BadRequest, Unauthenticated


def rewrite(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


async def test_every_token_of_the_file_is_good_and_comments_are_not(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# for the operator\nfirst\n\n  second  \n")
    authenticator = TokenFileAuthenticator(path)
    for token in ("first", "second"):
        assert (await authenticator.authenticate(token)).subject == "token-file"
    for token in (None, "", "third", "# for the operator", "firs", "first ", "FIRST", "x" * 20_000, "\udcff"):
        with pytest.raises(Unauthenticated):
            await authenticator.authenticate(token)


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    authenticator = TokenFileAuthenticator(path)
    await authenticator.load()
    rewrite(path, "new\n")
    await authenticator.authenticate("new")
    with pytest.raises(Unauthenticated):
        await authenticator.authenticate("old")


async def test_removing_the_file_revokes_all(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    authenticator = TokenFileAuthenticator(path)
    await authenticator.authenticate("old")
    path.unlink()
    with pytest.raises(Unauthenticated):
        await authenticator.authenticate("old")


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n", b"\xff\xfe"])
async def test_a_useless_file_is_an_error_at_start_naming_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadRequest, match=r"token file .*tokens"):
        await TokenFileAuthenticator(path).load()


@pytest.mark.parametrize(
    ("header", "token"),
    [(None, None), ("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), ("Bearer", None), ("", None)],
)
def test_bearer_header(header: str | None, token: str | None) -> None:
    assert bearer_token(header) == token
