"""Memory for tensors that are read: nobody else's, aligned to large pages, with little waste, and given back."""

import pytest

pytestmark = pytest.mark.model

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "pages"),
    [
        (2 * MIB, 1),
        (2 * MIB + 1, 1),
        (6 * MIB - 256 * 1024, 3),
        (6 * MIB - 512 * 1024, 3),
        (5 * MIB + 256 * 1024, 2),
        (33 * MIB, 17),
        (63 * MIB + 1, 32),
        (100 * MIB, 50),
    ],
)
def test_one_page_more_only_where_little_is_wasted(nbytes: int, pages: int) -> None:
    from modelswap_engine.weights.anonymous import HUGE, large_pages

    assert large_pages(nbytes) == pages
    assert pages * HUGE - nbytes <= nbytes / 10


@pytest.mark.parametrize("nbytes", [0, 1, 5, 2 * MIB - 1, 2 * MIB, 6 * MIB - 1000, 7 * MIB + 3])
def test_every_byte_can_be_used_and_is_nobody_elses(nbytes: int) -> None:
    import torch

    from modelswap_engine.weights.anonymous import HUGE, empty

    one, other = empty(nbytes), empty(nbytes)
    assert (one.dtype, tuple(one.shape), one.untyped_storage().nbytes()) == (torch.uint8, (nbytes,), nbytes)
    one.fill_(7)
    other.fill_(9)
    assert one.eq(7).all()
    assert other.eq(9).all()
    if nbytes >= HUGE:
        assert one.data_ptr() % HUGE == 0


def test_it_is_given_back_with_the_tensor() -> None:
    from modelswap_engine.backends.embedded.memory import resident_bytes
    from modelswap_engine.weights.anonymous import empty

    kept = empty(64 * MIB)
    kept.fill_(1)
    with_it = resident_bytes()
    view = kept[10:].view(-1)
    del kept
    assert resident_bytes() > with_it - 16 * MIB  # a view keeps it
    del view
    assert resident_bytes() < with_it - 48 * MIB
