"""How long staging will take is said from what was measured in the slot, and else not at all."""

import pytest

from modelswap_operator.api.estimates import staging
from modelswap_operator.api.modelversion import Revision

NEW = "sha256:" + "c" * 64


def entry(revision: int, rate: int, *, digest: str = "sha256:" + "a" * 64) -> Revision:
    return Revision(revision=revision, version=f"1.{revision}", digest=digest, staging_bytes_per_second=rate)


def test_it_is_the_rate_of_the_last_rollout_that_measured_one() -> None:
    found = staging([entry(9, 0), entry(7, 50_000_000), entry(5, 1)], digest=NEW, bytes_to_fetch=1_200_000_000)
    assert found is not None
    assert found.seconds == 24
    assert found.basis == "1200.0 MB to read at 50.0 MB/s, as the slowest pod did for 1.7 (revision 7)"


def test_part_of_a_second_is_a_second() -> None:
    found = staging([entry(7, 1000)], digest=NEW, bytes_to_fetch=1)
    assert found is not None
    assert found.seconds == 1


@pytest.mark.parametrize(
    ("history", "size"),
    [([], 10), ([entry(7, 0)], 10), ([entry(7, 10)], 0), ([entry(7, 10, digest=NEW)], 10)],
    ids=["no history", "nothing measured", "nothing to read", "only its own"],
)
def test_nothing_is_made_up(history: list[Revision], size: int) -> None:
    assert staging(history, digest=NEW, bytes_to_fetch=size) is None
