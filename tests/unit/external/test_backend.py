"""The sidecar's half of external engines under the real coordinator: what is proven, what comes back, what is lost."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.port import RequestPolicy
from modelswap_engine.protocol.engine_state import MemoryState
from modelswap_engine.protocol.errors import Internal, ManifestMismatch
from modelswap_engine.protocol.policy import Loading, Traffic, TrafficMode, VerifyMode
from modelswap_engine.protocol.states import SwapState
from tests.support.external_world import ExternalWorld
from tests.support.fake_control import Broken


def steps(world: ExternalWorld) -> list[str]:
    """What the engine itself was asked, without the collective calls and the questions whether it lives."""
    return [call for call in world.control.calls if call not in ("call_all", "facts")]


async def test_what_the_engine_holds_is_proven_before_it_serves(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        state = world.coordinator.state()

    assert state.live == world.one
    assert state.ready
    assert [rank.digest for rank in state.ranks] == [world.one.digest] * 2
    assert state.capabilities.kind == "vllm"
    assert state.capabilities.traffic_modes == [TrafficMode.DRAIN, TrafficMode.ABORT]


async def test_a_drained_swap_needs_no_pause_and_forgets_what_was_cached_after_the_commit(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.control.calls.clear()
        status = await world.swap(world.two)

        assert status.state is SwapState.SERVING, status.error
        assert world.holds(world.two)
        assert world.coordinator.live == world.two
        assert world.control.weight_version == world.two.digest
        assert steps(world) == ["flush", "flush", "set_version"]
        assert world.ranks[0].calls[-6:] == ["memory", "stage", "prepare", "commit", "release", "memory"]
        assert (await world.swap(world.one, "op-2")).state is SwapState.SERVING
        assert world.holds(world.one)


async def test_what_does_not_fit_the_engines_container_is_refused_before_anything_is_staged(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.ranks[1].memory = MemoryState(limit_bytes=100, available_bytes=2)  # both are charged to one container
        status = await world.swap(world.two)

        assert status.error is not None
        assert status.error.code == "InsufficientMemory"
        assert world.coordinator.state().memory.limit_bytes == 100
        assert "stage" not in world.ranks[0].calls
        assert world.holds(world.one)
        world.ranks[1].memory = MemoryState(limit_bytes=100, available_bytes=50)
        assert (await world.swap(world.two, "op-2")).state is SwapState.SERVING


async def test_requests_that_nobody_waits_for_are_waited_for_before_a_commit(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.control.calls.clear()
        world.control.flushes = [False, False, True]
        status = await world.swap(world.two)

    assert status.state is SwapState.SERVING
    assert steps(world).count("flush") == 4


async def test_abort_ends_the_requests_and_then_waits_for_an_empty_engine(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.control.running = 3
        world.control.calls.clear()
        status = await world.swap(world.two, traffic=Traffic(mode=TrafficMode.ABORT))

        assert status.state is SwapState.SERVING
        assert status.aborted_requests == 3
        assert steps(world) == ["flush", "flush", "set_version"]


@pytest.mark.parametrize("mode", [TrafficMode.RECOMPUTE, TrafficMode.FREEZE, TrafficMode.OVERLAP])
async def test_modes_that_would_mix_versions_are_refused_with_the_reason(tmp_path: Path, mode: TrafficMode) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        status = await world.swap(world.two, traffic=Traffic(mode=mode))

    assert status.state is SwapState.ABORTED
    assert status.error is not None
    assert "is not possible with the vllm engine: " in status.error.message
    assert "commit" not in world.ranks[0].calls


async def test_a_cache_that_was_not_forgotten_undoes_the_commit(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.control.flushes = [True, False, True]
        status = await world.swap(world.two)

        assert status.state is SwapState.ROLLED_BACK
        assert status.error is not None
        assert "did not forget" in status.error.message
        assert world.holds(world.one)
        assert world.coordinator.ready()


async def test_a_question_for_its_health_that_comes_in_between_is_waited_for(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, forget=5.0)
    async with world.running():
        world.control.flushes = [True, False, False, True]
        assert (await world.swap(world.two)).state is SwapState.SERVING
        assert world.holds(world.two)


@pytest.mark.parametrize("step", ["stage", "prepare", "commit", "verify"])
async def test_a_rank_that_fails_brings_the_old_version_back_on_all(tmp_path: Path, step: str) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        for rank in world.ranks:
            rank.whole = step != "verify"
        world.ranks[1].errors[step] = Internal("told to fail")
        status = await world.swap(world.two)

        assert status.state is (SwapState.ABORTED if step in ("stage", "prepare") else SwapState.ROLLED_BACK)
        assert world.holds(world.one)
        assert world.coordinator.live == world.one
        assert world.coordinator.ready()
        assert not world.restart.wanted
        assert (await world.swap(world.two, "op-2")).state is SwapState.SERVING


def labelled(world: ExternalWorld) -> None:
    """Have the engine do all that it can within one exchange, as SGLang does: forget, prove, and name its weights."""

    def label(texts: list[str]) -> list[str]:
        answers = [wire.decode_answer(text) for text in texts]
        if not all(answer.proved and answer.reply.error is None for answer in answers):
            return texts
        world.control.label(answers[0].reply.digest)
        return [wire.encode_answer(replace(answer, named=True)) for answer in answers]

    for rank in world.ranks:
        rank.requests = 0
    world.control.answers = label


async def test_what_an_engine_does_within_the_commit_is_not_asked_of_it_again(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        labelled(world)
        world.control.calls.clear()
        assert (await world.swap(world.two)).state is SwapState.SERVING
        assert steps(world) == ["flush"]
        assert "verify" not in world.ranks[0].calls
        assert world.control.weight_version == world.two.digest
        assert world.holds(world.two)
        proven = await world.backend.verify("op-1", strict=False)  # said once, it counts once
        assert "verify" in world.ranks[0].calls
        assert {reply.digest for reply in proven} == {world.two.digest}


async def test_strict_hashes_although_the_commit_was_proved(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        labelled(world)
        request = replace(world.request(world.two), loading=Loading(verify=VerifyMode.STRICT))
        await world.coordinator.swap(request)
        await world.until(lambda: world.coordinator.operation("op-1").state.terminal)
        assert world.coordinator.operation("op-1").state is SwapState.SERVING
        assert "verify" in world.ranks[0].calls


async def test_requests_of_nobody_are_waited_for_by_a_commit_that_forgets(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, forget=5.0)
    async with world.running():
        labelled(world)
        busy = iter([1, 1, 0])

        def next_one(text: str) -> None:
            if isinstance(wire.decode_call(text).call, wire.CommitCall):
                for rank, requests in zip(world.ranks, [next(busy)] * 2, strict=True):
                    rank.requests = requests

        world.control.lose = next_one
        assert (await world.swap(world.two)).state is SwapState.SERVING
        assert world.ranks[0].calls.count("commit") == 3
        assert world.holds(world.two)


async def test_an_engine_that_does_not_come_to_rest_keeps_its_version(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        labelled(world)
        for rank in world.ranks:
            rank.requests = 1
        status = await world.swap(world.two)
        assert status.state is SwapState.ROLLED_BACK
        assert status.error is not None
        assert status.error.code == "Busy"
        assert world.holds(world.one)
        assert world.coordinator.ready()


async def test_one_rank_that_fails_within_a_whole_commit_brings_label_and_tensors_back(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        labelled(world)
        world.ranks[1].errors["commit"] = Internal("told to fail")
        world.control.calls.clear()
        assert (await world.swap(world.two)).state is SwapState.ROLLED_BACK
        assert steps(world) == ["flush"]
        assert world.holds(world.one)
        assert world.control.weight_version == world.one.digest
        assert (await world.swap(world.two, "op-2")).state is SwapState.SERVING


async def test_what_a_lost_engine_has_proved_is_forgotten(tmp_path: Path) -> None:
    """It ends right after it has answered the commit: what it said then is no proof of the start that follows."""
    world = ExternalWorld(tmp_path, reach=20)
    async with world.running():
        labelled(world)
        label = world.control.answers

        def ends(texts: list[str]) -> list[str]:
            found = label(texts)
            if wire.decode_answer(found[0]).proved:
                world.backend._lost()
                world.boot(world.one)
            return found

        world.control.answers = ends
        status = await world.swap(world.two)
        assert status.state is SwapState.ROLLED_BACK
        await world.until(world.coordinator.ready)
        assert world.holds(world.one)


async def test_one_rank_that_fails_a_long_call_ends_it_on_the_others(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.ranks[0].errors["stage"] = Internal("told to fail")
        world.ranks[1].polls = -1
        status = await world.swap(world.two)

    assert status.state is SwapState.ABORTED
    assert len(world.ranks[1].called_off) == 1


@pytest.mark.parametrize("broken", [Broken.LOST_BEFORE, Broken.LOST_AFTER])
async def test_a_commit_without_an_answer_wants_a_restart_and_the_next_start_serves(
    tmp_path: Path, broken: Broken
) -> None:
    world = ExternalWorld(tmp_path, reach=20)
    async with world.running():
        world.lose_at("commit", broken)
        await world.coordinator.swap(world.request(world.two))
        await world.until(lambda: world.restart.wanted)
        assert not world.coordinator.ready()
        before = len(world.ranks[0].calls)

        world.boot(world.one)
        await world.until(lambda: world.coordinator.operation("op-1").state.terminal)

        assert world.coordinator.operation("op-1").state is SwapState.ROLLED_BACK
        assert world.coordinator.ready()
        assert world.holds(world.one)
        assert not world.restart.wanted
        assert before >= 4


async def test_without_a_restart_it_ends_in_quarantine(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        world.lose_at("commit", Broken.LOST_AFTER)
        status = await world.swap(world.two)

        assert status.state is SwapState.QUARANTINED
        assert world.restart.wanted
        assert "commit" in world.restart.reason
        assert world.coordinator.quarantined
        assert world.coordinator.live is None


async def test_answers_that_belong_to_another_call_are_no_answers(tmp_path: Path) -> None:
    """What vLLM's ranks do after one of them failed: each answer is that to the call before."""
    world = ExternalWorld(tmp_path)
    held = wire.encode_answer(wire.Answer(number=1, reply=world.ranks[1].reply()))

    def shifted(answers: list[str]) -> list[str]:
        nonlocal held
        answers[1], held = held, answers[1]
        return answers

    async with world.running():
        world.control.answers = shifted
        status = await world.swap(world.two)

    assert status.state is SwapState.ABORTED
    assert world.restart.wanted
    assert "answered call" in world.restart.reason
    assert "commit" not in world.ranks[0].calls


async def test_an_engine_that_was_restarted_is_proven_again(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, reach=20)
    async with world.running():
        first = world.coordinator.state().ranks
        world.control.up = False
        await world.until(lambda: not world.coordinator.ready())
        world.boot(world.one)
        await world.until(world.coordinator.ready)

        second = world.coordinator.state().ranks
        assert [rank.digest for rank in second] == [world.one.digest] * 2
        assert {rank.boot_id for rank in first}.isdisjoint({rank.boot_id for rank in second})


@pytest.mark.parametrize("word", ["", "another"], ids=["it ended", "it was started again"])
async def test_the_launchers_word_is_believed_at_once(tmp_path: Path, word: str) -> None:
    world = ExternalWorld(tmp_path)
    world.launcher.start = "first"
    async with world.running():
        first = {rank.boot_id for rank in world.coordinator.state().ranks}
        world.boot(world.one)  # between two looks, so that it was never seen away
        world.launcher.start = word
        await world.until(lambda: first.isdisjoint(rank.boot_id for rank in world.coordinator.state().ranks))
        await world.until(world.coordinator.ready)


async def test_an_engine_that_starts_on_another_version_serves_nobody_and_must_restart(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, reach=20)
    world.boot(world.two)
    async with world.starting():
        await world.until(lambda: world.restart.wanted)
        assert not world.coordinator.ready()

        world.boot(world.one)
        await world.until(world.coordinator.ready)
        assert world.holds(world.one)


async def test_an_engine_that_starts_on_another_version_loads_the_right_one_where_it_can(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, loads_anew=True)
    world.boot(world.two)
    async with world.running():
        assert world.coordinator.ready()
        assert world.holds(world.one)
        assert steps(world) == ["barred", "paused", "flush", "load_full", "flush", "set_version"]
        assert not world.restart.wanted


async def test_an_engine_that_starts_in_the_middle_of_a_swap_waits(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, loads_anew=True)
    async with world.running():
        # First of all what an earlier process of the sidecar said is withdrawn.
        assert world.launcher.told == ["", world.one.digest]
        assert (await world.swap(world.two)).state is SwapState.SERVING
        assert world.launcher.told == ["", world.one.digest, ""]
        world.control.up = False
        await world.until(lambda: not world.coordinator.ready())
        world.boot(world.two)
        await world.until(world.coordinator.ready)

    assert world.launcher.told == ["", world.one.digest, "", world.two.digest]


async def test_what_the_engine_loaded_itself_is_not_believed(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, loads_anew=True)
    world.boot(world.two)
    world.control.on_load = lambda digest: None
    async with world.running():
        assert not world.coordinator.ready()
        assert world.restart.wanted


async def test_nothing_runs_in_an_engine_that_is_looked_at(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    world.control.policy = RequestPolicy.RECOMPUTE  # a pause that somebody left behind
    world.control.running = 2
    world.control.flushes = [False, True]
    async with world.running():
        assert world.coordinator.ready()
        assert world.control.running == 0
        assert steps(world) == ["barred", "paused", "resume", "flush", "flush", "set_version"]


async def test_an_engine_that_does_not_come_to_rest_is_not_believed(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, call=0.05)
    world.control.flushes = [False] * 100_000
    async with world.running():
        assert not world.coordinator.ready()
        assert "still runs requests" in world.coordinator.state().message
        assert "adopt" not in world.ranks[0].calls


async def test_a_model_whose_weights_cannot_be_exchanged_says_why(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    world.ranks[1].refuse("its layers keep packed copies")
    async with world.running():
        state = world.coordinator.state()

    assert not state.ready
    assert "rank 1: its layers keep packed copies" in state.message
    assert not world.restart.wanted


async def test_an_engine_without_our_half_says_so(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    world.control.ranks.clear()
    async with world.running():
        assert "without modelswap's half" in world.coordinator.state().message


async def test_a_swap_that_is_given_up_ends_the_staging_in_the_engine(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        for rank in world.ranks:
            rank.polls = -1
        await world.coordinator.swap(world.request(world.two))
        await world.until(lambda: "stage" in world.ranks[0].calls)
        await world.cancel("op-1")
        await world.until(lambda: world.coordinator.operation("op-1").state.terminal)

        assert world.coordinator.operation("op-1").state is SwapState.ABORTED
        await world.until(lambda: len(world.ranks[0].called_off) == 1)
        assert "release" in world.ranks[0].calls
        assert world.coordinator.ready()


async def test_live_tensors_are_hashed_on_every_rank(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        await world.backend.hashes("*")
        world.ranks[1].live["q"] = b"...."
        found = await world.backend.hashes("q")

    assert "q" not in found.tensors
    assert sorted(found.disagreed["q"]) == [0, 1]


async def test_an_adoption_that_fails_for_another_reason_is_no_mismatch(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path, loads_anew=True)
    world.ranks[1].errors["adopt"] = Internal("no memory map")
    async with world.starting():
        await world.until(world.coordinator.ready)

    assert "load_full" not in world.control.calls
    assert ManifestMismatch.code not in world.coordinator.state().message


async def test_what_ranks_show_only_while_nothing_runs_is_asked_for_when_the_engine_is_empty(tmp_path: Path) -> None:
    world = ExternalWorld(tmp_path)
    async with world.running():
        for rank in world.ranks:
            rank.packed = {"q"}
        assert (await world.backend.hashes("*")).unverifiable == ("q",)
        world.control.flushes = [False]  # a request that nobody waits for is still there
        found = await world.backend.hashes("*", still=True)
    assert (found.unverifiable, "q" in found.tensors) == ((), True)
    assert world.control.flushes == []
