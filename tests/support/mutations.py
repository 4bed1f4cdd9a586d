"""Ways in which the bytes of a file can be damaged, for tests of whoever reads it."""

from hypothesis import strategies as st


def edited(file: bytes) -> st.SearchStrategy[bytes]:
    """Some bytes of it are others."""

    def edit(edits: list[tuple[int, int]]) -> bytes:
        damaged = bytearray(file)
        for position, value in edits:
            damaged[position] = value
        return bytes(damaged)

    place = st.tuples(st.integers(0, len(file) - 1), st.integers(0, 255))
    return st.lists(place, min_size=1, max_size=4).map(edit)


def spliced(file: bytes) -> st.SearchStrategy[bytes]:
    """A piece of it is missing, said twice, or another."""
    ends = st.integers(0, len(file))
    return st.builds(lambda start, end, insert: file[:start] + insert + file[end:], ends, ends, st.binary(max_size=9))
