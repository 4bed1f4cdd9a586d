"""What survives the process, also when its last moment was in the middle of a write."""

import errno
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelswap_engine.protocol.errors import Unavailable
from modelswap_engine.protocol.messages import SwapStatus, VersionRef
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.swap.fence import Accepted
from modelswap_engine.swap.journal import MAX_LINES, Journal
from modelswap_engine.swap.records import KEPT_OUTCOMES, Intent, JournalState, Outcome, Served, Template, fold

A = VersionRef(version="1", uri="file:///a", digest="sha256:a")
B = VersionRef(version="2", uri="file:///b", digest="sha256:b")


def unsynced(_):
    pass


def outcome(operation_id, state=SwapState.SERVING):
    return Outcome(status=SwapStatus(operation_id=operation_id, state=state, target=B))


RECORDS = [
    Template(uri="file:///a"),
    Served(version=A),
    Accepted(owner_uid="me", epoch=1, revision=3, operation_id="op", target=B),
    Intent(operation_id="op", source=A, target=B),
    outcome("op"),
    Served(version=B),
]


def folded(records):
    state = JournalState()
    for record in records:
        state = fold(state, record)
    return state


def test_what_was_written_is_read_again(tmp_path):
    journal = Journal.open(tmp_path / "state" / "journal")
    journal.append(*RECORDS[:4])
    assert journal.state.intent == RECORDS[3]
    journal.close()
    again = Journal.open(tmp_path / "state" / "journal")
    assert again.state == folded(RECORDS[:4])
    again.append(*RECORDS[4:])
    assert again.state.intent is None
    assert again.state.served == B
    assert again.state.outcome("op").state is SwapState.SERVING
    again.close()


def test_a_write_is_on_the_disk_when_it_returns(tmp_path):
    synced = []
    journal = Journal.open(tmp_path / "journal", sync=lambda file: synced.append(os.fstat(file).st_size))
    journal.append(RECORDS[0])
    assert synced == [os.stat(tmp_path / "journal").st_size]
    journal.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_journal_torn_at_any_byte_keeps_every_whole_record(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal.open(path, sync=unsynced)
    ends = [0]
    for record in RECORDS:
        journal.append(record)
        ends.append(path.stat().st_size)
    journal.close()
    cut = data.draw(st.integers(0, ends[-1]))
    os.truncate(path, cut)
    again = Journal.open(path, sync=unsynced)
    whole = sum(end <= cut for end in ends) - 1
    assert again.state == folded(RECORDS[:whole])
    again.append(RECORDS[0])  # what is written next is not swallowed by the torn line
    again.close()
    last = Journal.open(path, sync=unsynced)
    assert last.state == folded([*RECORDS[:whole], RECORDS[0]])
    last.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_byte_never_becomes_another_record(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal.open(path, sync=unsynced)
    journal.append(*RECORDS)
    journal.close()
    content = bytearray(path.read_bytes())
    lines = bytes(content).split(b"\n")[:-1]
    place = data.draw(st.integers(0, len(content) - 1))
    flip = data.draw(st.integers(1, 255))
    if 10 in (content[place], content[place] ^ flip):
        return  # it joins or splits lines: the torn line's test
    content[place] ^= flip
    path.write_bytes(content)
    hit = bytes(content[:place]).count(b"\n")
    again = Journal.open(path, sync=unsynced)
    kept = [record for number, record in enumerate(RECORDS) if number != hit]
    assert again.state == folded(kept)
    assert again.damaged == 1
    assert len(lines) == len(RECORDS)
    again.close()
    assert Journal.open(path, sync=unsynced).damaged == 0  # it was rewritten without the damage


def test_a_long_journal_is_rewritten_with_the_same_meaning(tmp_path):
    path = tmp_path / "journal"
    journal = Journal.open(path, sync=unsynced)
    for number in range(MAX_LINES + 10):
        journal.append(outcome(f"op-{number}"))
    journal.append(*RECORDS)
    before = journal.state
    journal.close()
    assert len(path.read_bytes().splitlines()) < 200
    again = Journal.open(path, sync=unsynced)
    assert again.state == before
    assert len(again.state.outcomes) == KEPT_OUTCOMES
    assert again.state.outcome("op") is not None
    again.close()


@given(st.lists(st.sampled_from(RECORDS), max_size=12))
def test_the_shortest_list_of_records_means_the_same(records):
    state = folded(records)
    assert folded(state.records()) == state


def test_a_disk_that_is_full_is_a_typed_error_and_leaves_no_half_line(tmp_path):
    full = False

    def sync(_):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal.open(tmp_path / "journal", sync=sync)
    journal.append(RECORDS[0])
    full = True
    with pytest.raises(Unavailable, match="No space left"):
        journal.append(RECORDS[1])
    assert journal.state.served is None
    full = False
    journal.append(RECORDS[2])
    journal.close()
    again = Journal.open(tmp_path / "journal", sync=unsynced)
    assert again.state == folded([RECORDS[0], RECORDS[2]])
    assert again.damaged == 0
    again.close()


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="journal"):
        Journal.open(tmp_path / "file" / "journal")


def test_what_is_served_decides_whatever_was_in_doubt():
    assert folded([RECORDS[3], Served(version=A)]).intent is None


def test_an_outcome_closes_only_its_own_intent():
    state = folded([RECORDS[3], outcome("another")])
    assert state.intent is not None


def test_after_a_rewrite_records_go_to_the_new_file_even_when_the_folder_cannot_be_synced(tmp_path):
    path, broken = tmp_path / "journal", False

    def sync(file):
        if broken and stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EIO, "Input/output error")

    journal = Journal.open(path, sync=sync)
    for number in range(MAX_LINES):
        journal.append(outcome(f"op-{number}"))
    broken = True
    journal.append(RECORDS[0])  # rewritten here
    with pytest.raises(Unavailable):  # a power failure could still bring the old file back
        journal.append(RECORDS[1])
    broken = False
    journal.append(RECORDS[2])
    expected = journal.state
    journal.close()
    again = Journal.open(path, sync=unsynced)
    assert again.state == expected
    assert expected.accepted is not None or expected.served is not None or expected.template
    again.close()
