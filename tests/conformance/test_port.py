"""What every backend promises to the coordinator (docs/backends.md), asked of each over its real engine.

A test is a promise. One that a backend does not keep is in its list of exceptions, under the test's name.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from modelswap_engine.backends.port import PromptTrial, RequestPolicy, Stage
from modelswap_engine.protocol.policy import TrafficMode
from tests.conformance.candidates import Candidate
from tests.conformance.case import NOBODY, PROMPTS, SECONDS, Case, digest_of, letters
from tests.support.orders import hashes_of, ranges

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG_ANSWER = 300
ATTEMPTS = 10


async def test_exceptions_are_of_promises(offered: Candidate) -> None:
    promises = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert offered.exceptions.keys() <= promises
    assert all(offered.exceptions.values())


# Loading.


async def test_a_load_is_proved_by_every_rank(case: Case) -> None:
    old = case.versions.old
    assert case.proven() == {digest_of(old)}
    assert all(rank.alive and rank.boot_id for rank in case.backend.ranks())
    assert await case.holds(old)
    assert letters(await case.answers()) == "old"


async def test_a_load_replaces_whatever_was_there(case: Case) -> None:
    operation = await case.staged(case.versions.new)
    await case.pause(operation)
    await case.load(case.versions.full)
    assert await case.failed(case.backend.prepare(operation), operation)
    assert await case.holds(case.versions.full)
    assert case.proven() == {digest_of(case.versions.full)}
    assert await case.answers()  # the pause is gone, too


async def test_a_load_of_damaged_files_proves_nothing_and_the_next_one_does(case: Case, tmp_path: Path) -> None:
    from tests.support import models

    bad = shutil.copytree(case.versions.new, tmp_path / "bad")
    order = case.load_order(bad)
    models.flip_byte(bad, "lm_head.weight", position=100)
    assert await case.failed(case.backend.load(order)) == "ManifestMismatch"
    assert digest_of(case.versions.new) not in case.proven()
    await case.load(case.versions.old)
    assert letters(await case.answers()) == "old"


async def test_the_layout_names_each_tensor_once(case: Case) -> None:
    layout = case.backend.layout()
    names = [name for group in layout.groups for name in group]
    assert len(names) == len(set(names))
    assert set(names) <= set(hashes_of(case.versions.old))
    assert layout.architecture == "LlamaForCausalLM"


async def test_every_traffic_mode_is_offered_or_refused_with_a_reason(case: Case) -> None:
    found = case.backend.capabilities()
    assert {*found.traffic_modes, *found.refused_modes} == {mode.value for mode in TrafficMode}
    assert not {mode.value for mode in found.traffic_modes} & set(found.refused_modes)
    assert all(found.refused_modes.values())
    assert TrafficMode.DRAIN in found.traffic_modes


# Staging.


async def test_what_is_staged_is_not_seen(case: Case) -> None:
    before = await case.answers()
    order = case.order(case.versions.new, case.operation())
    reply = case.agreed(await case.backend.stage(order), order.operation_id)
    assert reply.digest == order.digest
    assert reply.staged_bytes > 0
    assert reply.fetched_bytes == sum(item.nbytes for item in order.tensors)
    assert await case.answers() == before
    assert await case.holds(case.versions.old)
    assert case.proven() == {digest_of(case.versions.old)}


async def test_requests_run_while_a_version_is_staged(case: Case) -> None:
    undisturbed = await case.subject.answer(PROMPTS[-1], tokens=100)
    running = asyncio.ensure_future(case.subject.answer(PROMPTS[-1], tokens=100))
    await case.staged(case.versions.full)
    assert await running == undisturbed


async def test_memory_counts_what_is_staged_until_it_is_released(case: Case) -> None:
    operation = await case.staged(case.versions.full)
    assert (await case.backend.memory()).staged_bytes > 0
    await case.release(operation)
    assert (await case.backend.memory()).staged_bytes == 0


async def test_a_version_that_is_staged_needs_its_files_no_more(case: Case, tmp_path: Path) -> None:
    copy = shutil.copytree(case.versions.new, tmp_path / "copy")
    operation = await case.staged(copy)
    shutil.rmtree(copy)
    await case.exchange(operation)
    assert await case.holds(case.versions.new)


Damage = Callable[[Path, Stage], Stage]
TENSOR = "model.layers.2.mlp.down_proj.weight"


def edited(how: str) -> Damage:
    def damage(folder: Path, order: Stage) -> Stage:
        from tests.support import models

        change = {
            "shape": lambda tensor: tensor[:, :-8],
            "dtype": lambda tensor: tensor.double(),
            "nan": lambda tensor: tensor * float("nan"),
        }[how]
        models.edit_tensor(folder, TENSOR, change)
        by_name = {item.name: item for item in ranges(folder)}
        return replace(order, digest=digest_of(folder), tensors=tuple(by_name[item.name] for item in order.tensors))

    return damage


def cut_short(folder: Path, order: Stage) -> Stage:
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 5000)
    return order


def flipped(folder: Path, order: Stage) -> Stage:
    from tests.support import models

    models.flip_byte(folder, TENSOR, position=100)
    return order


def garbage(folder: Path, order: Stage) -> Stage:
    (folder / "model.safetensors").write_bytes(b"garbage")
    return order


def gone(folder: Path, order: Stage) -> Stage:
    (folder / "model.safetensors").unlink()
    return order


def foreign(folder: Path, order: Stage) -> Stage:
    return replace(order, tensors=(*order.tensors, replace(order.tensors[0], name="model.layers.9.new.weight")))


SHORT = {"InvalidCheckpoint", "SourceChanged", "SourceUnreadable", "ManifestMismatch"}
BAD: dict[str, tuple[Damage, set[str]]] = {
    "other shape": (edited("shape"), {"IncompatibleModel"}),
    "other dtype": (edited("dtype"), {"IncompatibleModel"}),
    "not a number": (edited("nan"), {"ChecksFailed"}),
    "cut short": (cut_short, SHORT),
    "garbage": (garbage, SHORT),
    "flipped bit": (flipped, {"ManifestMismatch"}),
    "no file": (gone, {"SourceUnreadable"}),
    "foreign tensor": (foreign, {"IncompatibleModel"}),
}


@pytest.mark.parametrize("kind", BAD)
async def test_what_cannot_be_served_is_refused_while_staging(case: Case, tmp_path: Path, kind: str) -> None:
    damage, codes = BAD[kind]
    before = await case.answers()
    folder = shutil.copytree(case.versions.full, tmp_path / "bad")
    order = damage(folder, case.order(folder, case.operation()))
    assert await case.failed(case.backend.stage(order), order.operation_id) in codes
    assert await case.failed(case.backend.prepare(order.operation_id), order.operation_id)
    assert await case.holds(case.versions.old)
    assert await case.answers() == before
    await case.swap(case.versions.new)  # and nothing of it is in the way


async def test_a_part_of_a_fusion_group_is_refused(case: Case) -> None:
    operation = case.operation()
    order = case.order(case.versions.full, operation)
    fused = [group for group in case.backend.layout().groups if len(group) > 1]
    for group in fused[:1]:
        part = replace(order, tensors=tuple(item for item in order.tensors if item.name not in group[1:]))
        assert await case.failed(case.backend.stage(part), operation) == "IncompatibleModel"
    if not fused:  # then each tensor may change alone
        case.agreed(await case.backend.stage(replace(order, tensors=order.tensors[:1])), operation)
    assert await case.holds(case.versions.old)


# Out of order.


async def test_nothing_is_prepared_or_committed_that_was_not_staged(case: Case) -> None:
    staged, other = await case.staged(case.versions.new), case.operation()
    assert await case.failed(case.backend.prepare(other), other)
    await case.pause(staged)
    assert await case.failed(case.backend.commit(other, NOBODY), other)
    await case.resume(staged)
    assert await case.holds(case.versions.old)


async def test_nothing_is_committed_that_was_not_prepared_or_was_released(case: Case) -> None:
    operation = case.operation()
    case.agreed(await case.backend.stage(case.order(case.versions.new, operation)), operation)
    await case.pause(operation)
    assert await case.failed(case.backend.commit(operation, NOBODY), operation)
    await case.undo(operation)
    case.agreed(await case.backend.prepare(operation), operation)
    await case.release(operation)
    assert await case.failed(case.backend.prepare(operation), operation)
    await case.pause(operation)
    assert await case.failed(case.backend.commit(operation, NOBODY), operation)
    await case.undo(operation)
    assert await case.holds(case.versions.old)


async def test_a_commit_needs_a_pause(case: Case) -> None:
    operation = await case.staged(case.versions.new)
    assert await case.failed(case.backend.commit(operation, NOBODY), operation)
    assert await case.holds(case.versions.old)
    await case.exchange(operation)
    assert letters(await case.answers()) == "new"


async def test_calls_without_anything_to_do_do_nothing(case: Case) -> None:
    operation = case.operation()
    await case.release(operation)
    await case.resume(operation)
    assert await case.verify(operation) == digest_of(case.versions.old)
    assert letters(await case.answers()) == "old"


async def test_a_second_instance_is_brought_up_or_refused(case: Case) -> None:
    operation = case.operation()
    case.agreed(await case.backend.stage(case.order(case.versions.new, operation)), operation)
    code = await case.failed(case.backend.prepare(operation, overlap=True), operation)
    offered = TrafficMode.OVERLAP in case.backend.capabilities().traffic_modes
    assert code == ("" if offered else "UnsupportedChange")
    await case.release(operation)
    assert letters(await case.answers()) == "old"


# Prompts.


async def test_a_version_that_fails_a_prompt_answers_nobody(case: Case) -> None:
    operation, trials = await staged_to_try(case, allowed=0.5)
    if not case.backend.capabilities().tries_live:
        assert await case.failed(case.backend.try_out(operation, trials), operation) == "ChecksFailed"
    else:
        await committed_to_try(case, operation, trials)
        assert await case.failed(case.backend.try_out(operation, trials), operation) == "ChecksFailed"
        await case.undo(operation)
    await case.release(operation)
    assert await case.holds(case.versions.old)
    assert letters(await case.answers()) == "old"


async def test_a_version_that_passes_its_prompts_is_served(case: Case) -> None:
    operation, trials = await staged_to_try(case, allowed=1e6)
    if not case.backend.capabilities().tries_live:
        case.agreed(await case.backend.try_out(operation, trials), operation)
        await case.exchange(operation)
    else:
        await committed_to_try(case, operation, trials)
        case.agreed(await case.backend.try_out(operation, trials), operation)
        await case.resume(operation)
    await case.release(operation)
    assert await case.holds(case.versions.new)
    assert letters(await case.answers()) == "new"


async def staged_to_try(case: Case, *, allowed: float) -> tuple[str, list[PromptTrial]]:
    """Stage a version that never says what the live one says; return the operation, and a prompt to compare them by."""
    operation = case.operation()
    case.agreed(await case.backend.stage(case.order(case.versions.new, operation)), operation)
    return operation, [PromptTrial(prompt=tuple(b"abc"), text="abc", max_logprob_delta=allowed)]


async def committed_to_try(case: Case, operation: str, trials: Sequence[PromptTrial]) -> None:
    """Have the live version answer, then commit, before an engine that computes with nothing else."""
    case.agreed(await case.backend.try_out(operation, trials), operation)
    case.agreed(await case.backend.prepare(operation), operation)
    await case.commit(operation)
    assert await case.verify(operation) == digest_of(case.versions.new)


# The pause.


async def test_a_second_pause_is_nothing_to_do_and_one_resume_ends_both(case: Case) -> None:
    operation = await case.staged(case.versions.new)
    await case.pause(operation)
    await case.pause(operation)
    await case.resume(operation)
    assert letters(await case.answers()) == "old"


async def test_weights_are_not_exchanged_under_a_request_that_nobody_expects(case: Case) -> None:
    """An answer may have ended before it is looked for; then nothing was asked, and another one is begun."""
    undisturbed = await case.subject.answer(PROMPTS[0], tokens=LONG_ANSWER)
    codes = []
    while not any(codes):
        assert len(codes) < ATTEMPTS, "weights were exchanged each time, or each answer had ended before"
        operation = await case.staged(case.versions.new)
        running = asyncio.ensure_future(case.subject.answer(PROMPTS[0], tokens=LONG_ANSWER))
        await has_begun(case, running)
        codes.append(await not_exchanged(case, operation))
        assert await running == undisturbed
    assert codes[-1] in {"Busy", "DrainTimeout"}
    assert await case.holds(case.versions.old)


async def not_exchanged(case: Case, operation: str) -> str:
    """Try to exchange what is staged; return why it was not, "" if it was, and has been undone."""
    code = await case.failed(case.backend.pause(operation, timeout=0.2, policy=NOBODY), operation)
    if code:
        await case.resume(operation)
    else:  # it stands between two steps of a request; then the commit sees it
        code = await case.failed(case.backend.commit(operation, NOBODY), operation)
        await case.undo(operation)
    await case.release(operation)
    return code


async def has_begun(case: Case, running: "asyncio.Future[list[int]]") -> None:
    """Wait until a request is in the engine, or over: then a cache cannot be emptied, or the backend counts it."""
    async with asyncio.timeout(SECONDS):
        while not (running.done() or await case.subject.busy()):
            await asyncio.sleep(0.01)  # the engine says it in no other way


async def test_a_policy_that_is_not_offered_is_refused(case: Case) -> None:
    refused = set(case.backend.capabilities().refused_modes) & {policy.value for policy in RequestPolicy}
    for policy in sorted(refused - {RequestPolicy.OVERLAP.value}):
        operation = await case.staged(case.versions.new)
        assert await case.failed(
            case.backend.pause(operation, timeout=SECONDS, policy=RequestPolicy(policy)), operation
        )
        await case.resume(operation)
    assert letters(await case.answers()) == "old"


# The exchange.


async def test_a_swap_gives_the_answers_of_a_fresh_load(case: Case) -> None:
    old = await case.answers()
    await case.load(case.versions.full)
    fresh = await case.answers()
    await case.load(case.versions.old)
    assert await case.answers() == old  # whose prefixes are cached now
    operation = await case.staged(case.versions.full)
    reply = await case.commit(operation)
    assert reply.method
    assert reply.commit_microseconds > 0
    assert case.proven() == {""}, "proved before it was verified"
    assert await case.verify(operation) == digest_of(case.versions.full)
    assert case.proven() == {digest_of(case.versions.full)}
    await case.resume(operation)
    await case.release(operation)
    assert await case.answers() == fresh != old
    assert await case.holds(case.versions.full)


async def test_a_swap_can_be_verified_without_hashing_all(case: Case) -> None:
    operation = await case.staged(case.versions.new)
    await case.commit(operation)
    assert await case.verify(operation, strict=False) == digest_of(case.versions.new)
    await case.resume(operation)
    assert letters(await case.answers()) == "new"


async def test_a_rollback_is_exact(case: Case) -> None:
    before = await case.answers()
    operation = await case.staged(case.versions.full)
    await case.commit(operation)
    await case.undo(operation)
    await case.release(operation)
    assert await case.holds(case.versions.old)
    assert await case.answers() == before
    assert case.proven() == {digest_of(case.versions.old)}


async def test_a_rollback_of_what_was_not_committed_changes_nothing(case: Case) -> None:
    operation = await case.staged(case.versions.new)
    await case.pause(operation)
    await case.undo(operation)
    assert letters(await case.answers()) == "old"


async def test_the_retained_version_comes_back_without_reading(case: Case) -> None:
    before, old = await case.answers(), case.versions.old
    await case.swap(case.versions.full)
    order = case.back(old)
    assert case.agreed(await case.backend.stage(order), order.operation_id).fetched_bytes == 0
    await case.exchange(order.operation_id)
    await case.release(order.operation_id, previous=True)
    assert await case.holds(old)
    assert await case.answers() == before


async def test_what_is_not_retained_cannot_be_staged_again(case: Case) -> None:
    old = case.versions.old
    operation = await case.staged(case.versions.new)
    await case.exchange(operation)
    await case.release(operation, previous=True)
    order = case.back(old)
    assert await case.failed(case.backend.stage(order), order.operation_id) == "NotFound"
    assert letters(await case.answers()) == "new"


async def test_versions_follow_each_other(case: Case) -> None:
    old, new, full = case.versions.old, case.versions.new, case.versions.full
    for live, wanted in ((old, new), (new, full), (full, new), (new, old)):
        await case.swap(wanted, old=live)
        assert await case.holds(wanted)
    assert letters(await case.answers()) == "old"


# Hashes.


async def test_hashes_name_every_tensor_or_say_that_it_cannot_be_seen(case: Case) -> None:
    wanted = hashes_of(case.versions.old)
    for pattern, prefix in (("*", ""), ("model.layers.1.*", "model.layers.1.")):
        found = await case.backend.hashes(pattern)
        names = {name for name in wanted if name.startswith(prefix)}
        assert set(found.tensors) | set(found.unverifiable) == names
        assert not set(found.tensors) & set(found.unverifiable)
        assert all(wanted[name] == sha256 for name, sha256 in found.tensors.items())


async def test_every_tensor_can_be_seen_at_rest(case: Case) -> None:
    assert (await case.backend.hashes("*")).unverifiable == ()


# Losses: the engine is another one afterwards, so they come last.


async def lost_after(case: Case, steps: int) -> str:
    """Kill the engine once so many steps of a swap are done; return the operation."""
    operation = case.operation()
    order = case.order(case.versions.new, operation)
    done = [
        lambda: case.backend.stage(order),
        lambda: case.backend.prepare(operation),
        lambda: case.backend.pause(operation, timeout=SECONDS, policy=NOBODY),
        lambda: case.backend.commit(operation, NOBODY),
        lambda: case.backend.verify(operation, strict=True),
    ]
    for step in done[:steps]:
        case.agreed(await step(), operation)
    await case.subject.kill()
    return operation


@pytest.mark.parametrize("steps", [pytest.param(n, marks=() if n == 4 else pytest.mark.full) for n in range(1, 6)])
async def test_a_killed_engine_is_lost_until_a_load_brings_it_back(case: Case, steps: int) -> None:
    boots = {rank.boot_id for rank in case.backend.ranks()}
    operation = await lost_after(case, steps)
    try:
        assert await case.failed(case.backend.verify(operation, strict=True)) == "WorkerLost"  # nobody is there to ask
        await case.until_lost()
        assert case.proven() == {""}
        assert (
            await case.failed(case.backend.verify(operation, strict=False)) == "WorkerLost"
        )  # whatever it said before
        assert await case.failed(case.backend.prepare(operation)) == "WorkerLost"
        assert list(await case.backend.settle(operation, digest_of(case.versions.old))) == []
    finally:
        await case.subject.revive()
    await case.load(case.versions.old)
    assert not boots & {rank.boot_id for rank in case.backend.ranks()}
    assert await case.failed(case.backend.prepare(operation), operation) == "NotFound"
    await case.swap(case.versions.new)
    assert letters(await case.answers()) == "new"
