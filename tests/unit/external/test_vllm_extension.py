"""Our class in vLLM's workers, and a user's own beside it."""

import pytest

from modelswap_engine.backends.vllm import extension


class Users:
    """What a user's extension may look like."""

    def their_method(self) -> str:
        return "theirs"


class Clashing:
    """One that has our name."""

    def modelswap(self) -> None:
        """Do something else."""


def test_alone_it_has_one_public_name() -> None:
    public = [name for name in dir(extension.combined("")) if not name.startswith("_")]
    assert public == ["modelswap"]


def test_a_users_own_extension_keeps_its_methods() -> None:
    made = extension.combined(f"{__name__}.Users")
    assert made().their_method() == "theirs"
    assert made.modelswap is extension.combined("").modelswap  # type: ignore[attr-defined]


def test_one_with_our_name_is_refused() -> None:
    with pytest.raises(TypeError, match="modelswap"):
        extension.combined(f"{__name__}.Clashing")
