"""Swaps in the real SGLang through its HTTP routes: each way in which it goes wrong is prevented, or survived."""

import asyncio
import dataclasses
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from modelswap_engine.backends.external.plain.backend import PlainBackend
from modelswap_engine.backends.external.restart import RestartWish
from modelswap_engine.backends.external.settings import ExternalSettings
from modelswap_engine.backends.port import RequestPolicy, Stage, StageRetained
from modelswap_engine.backends.sglang.answers import Done, Loads
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.exchange import LINK
from modelswap_engine.backends.sglang.plain import plain_sglang
from modelswap_engine.protocol.errors import WorkerLost
from modelswap_engine.protocol.messages import CheckRequest, VersionRef
from modelswap_engine.protocol.policy import Checks, PromptCheck
from modelswap_engine.protocol.states import SwapState
from modelswap_engine.sources.file import FileSource
from modelswap_engine.sources.registry import Sources
from modelswap_engine.swap.clock import SystemClock
from modelswap_engine.swap.coordinator import Coordinator
from modelswap_engine.swap.gate import Gate
from modelswap_engine.swap.journal import Journal
from modelswap_engine.swap.settings import SwapSettings
from tests.conformance.direct import Nobody
from tests.support import models as edits
from tests.support.orders import accepted, digest_of, hashes_of, load_order, ranges, refused, stage_order
from tests.support.sglang import Asked, Client, Sglang
from tests.support.swapping import POD, last, request

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

LONG = "A prompt that fills several pages of the cache: " + "the quick brown fox jumps over the lazy dog. " * 3
SETTINGS = ExternalSettings(reach=600, call=30, load=60, hash=60, watch=3600)


@dataclasses.dataclass(frozen=True)
class Models:
    """Versions of one model (``old`` emits lower-case letters only, ``new`` upper-case ones), and another model."""

    old: Path
    new: Path
    full: Path
    other: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("sglang-models")
    pair = edits.disjoint_pair(root, dtype="bfloat16")
    names = [name for name in edits.tensor_names(pair.old) if name != "lm_head.weight"]
    return Models(
        old=pair.old,
        new=pair.new,
        full=edits.write_variant(pair.old, root / "full", names, seed=7),
        other=edits.tiny_llama(root / "other", hidden=32, dtype="bfloat16"),
    )


@dataclasses.dataclass(frozen=True)
class Bench:
    """A server, a client at its own port, and the backend under test."""

    server: Sglang
    client: Client
    backend: PlainBackend
    wish: RestartWish
    folder: Path
    models: Models
    asking: asyncio.Lock
    """Held while the backend asks for a token, as it does in the background after each swap."""

    async def load(self, model: Path) -> None:
        accepted(await self.backend.load(load_order(model)))

    def order(self, old: Path, new: Path, operation: str) -> Stage:
        return stage_order(old, new, operation_id=operation, groups=self.backend.layout().groups)

    async def staged(self, old: Path, new: Path, operation: str) -> str:
        accepted(await self.backend.stage(self.order(old, new, operation)))
        accepted(await self.backend.prepare(operation))
        return operation

    async def commit(self, operation: str, policy: RequestPolicy = RequestPolicy.NONE_RUNNING) -> None:
        accepted(await self.backend.pause(operation, timeout=20, policy=policy))
        accepted(await self.backend.commit(operation, policy))
        accepted(await self.backend.verify(operation, strict=True))
        accepted(await self.backend.resume(operation))

    async def swap(self, old: Path, new: Path, operation: str) -> None:
        await self.staged(old, new, operation)
        await self.commit(operation)
        accepted(await self.backend.release(operation, previous=False))

    async def holds(self, model: Path) -> bool:
        hashes = await self.backend.hashes("*")
        assert hashes.unverifiable == ()
        return hashes.tensors == hashes_of(model)

    def another(self, settings: ExternalSettings = SETTINGS, client: SglangClient | None = None) -> PlainBackend:
        """Return the backend of a sidecar that was started anew beside the same engine."""
        return assembled(client or SglangClient(self.server.url), self.folder, self.wish, settings)

    @asynccontextmanager
    async def by(self, client: SglangClient) -> AsyncIterator["Bench"]:
        """Have the backend of another sidecar, which speaks through a client of its own; the old version is live."""
        backend = self.another(client=client)
        accepted(await backend.load(load_order(self.models.old)))
        yield dataclasses.replace(self, backend=backend)
        await backend.stop()


class Asking(SglangClient):
    """Holds a lock while it asks for a token."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asking = asyncio.Lock()

    async def generates(self, *, seconds: float) -> bool:
        async with self.asking:
            return await super().generates(seconds=seconds)


def assembled(
    client: SglangClient, folder: Path, wish: RestartWish, settings: ExternalSettings = SETTINGS
) -> PlainBackend:
    return plain_sglang(client, folder=folder, requests=Nobody(), restart=wish, settings=settings)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    server = Sglang(tmp_path_factory.mktemp("sglang"), variables={"SGLANG_HEALTH_CHECK_TIMEOUT": "8"})
    try:
        server.start(models.old)
        yield server.wait_ready()
    finally:
        server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(server: Sglang, models: Models, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder, wish = tmp_path_factory.mktemp("shared"), RestartWish()
    client, routes = Client(server.url), Asking(server.url)
    backend = assembled(routes, folder, wish)
    await backend.start()
    yield Bench(
        server=server,
        client=client,
        backend=backend,
        wish=wish,
        folder=folder,
        models=models,
        asking=routes.asking,
    )
    await backend.stop()
    await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def bench(shared: Bench) -> Bench:
    """Return the shared server, holding the old version, wherever the last test left it."""
    await shared.load(shared.models.old)
    assert not shared.wish.wanted
    return shared


async def test_an_engine_that_was_started_on_the_version_is_only_looked_at(bench: Bench) -> None:
    (rank,) = bench.backend.ranks()
    assert (rank.alive, rank.digest) == (True, digest_of(bench.models.old))
    assert await bench.holds(bench.models.old)
    assert (await bench.client.get("/model_info"))["weight_version"] == digest_of(bench.models.old)


async def test_after_a_swap_answers_are_those_of_the_new_version(bench: Bench) -> None:
    old = (await bench.client.ask(LONG)).tokens  # and so its prefix is in the cache
    await bench.swap(bench.models.old, bench.models.new, "swap")
    answer = await bench.client.ask(LONG)
    assert max(old) < edits.HALF <= min(answer.tokens)
    assert answer.versions == [digest_of(bench.models.new)]
    assert await bench.holds(bench.models.new)
    assert bench.backend.ranks()[0].digest == digest_of(bench.models.new)


async def test_the_retained_version_comes_back_from_our_own_folder(bench: Bench) -> None:
    before, checksum = (await bench.client.ask(LONG)).tokens, await bench.client.checksum()
    await bench.swap(bench.models.old, bench.models.new, "there")
    old = bench.models.old
    order = StageRetained(operation_id="back", digest=digest_of(old), directory=str(old))
    assert accepted(await bench.backend.stage(order)).fetched_bytes == 0
    accepted(await bench.backend.prepare("back"))
    await bench.commit("back")
    assert (await bench.client.ask(LONG)).tokens == before
    assert await bench.client.checksum() == checksum
    assert await bench.holds(old)


async def test_every_tensor_can_change(bench: Bench) -> None:
    await bench.swap(bench.models.old, bench.models.full, "full")
    assert await bench.holds(bench.models.full)
    await bench.swap(bench.models.full, bench.models.old, "again")
    assert await bench.holds(bench.models.old)


async def test_the_name_of_the_model_stays_the_same(bench: Bench) -> None:
    await bench.swap(bench.models.old, bench.models.new, "first")
    first = await bench.client.get("/v1/models")
    await bench.swap(bench.models.new, bench.models.old, "second")
    second = await bench.client.get("/v1/models")
    assert (
        [item["id"] for item in first["data"]] == [item["id"] for item in second["data"]] == [str(bench.folder / LINK)]
    )


async def test_a_rollback_puts_the_very_bytes_back(bench: Bench) -> None:
    before, checksum = (await bench.client.ask(LONG)).tokens, await bench.client.checksum()
    operation = await bench.staged(bench.models.old, bench.models.new, "undone")
    policy = RequestPolicy.NONE_RUNNING
    accepted(await bench.backend.pause(operation, timeout=20, policy=policy))
    accepted(await bench.backend.commit(operation, policy))
    assert await bench.client.checksum() != checksum
    accepted(await bench.backend.rollback(operation))
    assert accepted(await bench.backend.verify(operation, strict=False)).digest == digest_of(bench.models.old)
    accepted(await bench.backend.resume(operation))
    accepted(await bench.backend.release(operation, previous=True))
    assert await bench.client.checksum() == checksum
    assert (await bench.client.ask(LONG)).tokens == before


# What ends the server, or is taken without a word, is refused before it is touched.


def _shape(folder: Path) -> Path:
    return edits.edit_tensor(folder, "lm_head.weight", lambda tensor: tensor[:, :32])


def _nan(folder: Path) -> Path:
    return edits.edit_tensor(folder, "lm_head.weight", lambda tensor: tensor * float("nan"))


def _dtype(folder: Path) -> Path:
    return edits.edit_tensor(folder, "lm_head.weight", lambda tensor: tensor.float())


def _foreign(folder: Path) -> Path:
    return _rename(folder, "lm_head.weight", "base_model.lora_A.weight")


def _rename(folder: Path, old: str, new: str) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / edits.WEIGHTS)
    tensors[new] = tensors.pop(old)
    save_file(tensors, folder / edits.WEIGHTS, {"format": "pt"})
    return folder


BAD = {
    "a smaller input side": (_shape, "IncompatibleModel"),
    "not a number": (_nan, "ChecksFailed"),
    "another dtype": (_dtype, "IncompatibleModel"),
    "foreign tensors": (_foreign, "IncompatibleModel"),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_does_not_fit_never_reaches_the_engine(case: str, bench: Bench, tmp_path: Path) -> None:
    edit, code = BAD[case]
    bad = edit(shutil.copytree(bench.models.new, tmp_path / "bad"))
    assert refused(await bench.backend.stage(bench.order(bench.models.old, bad, "bad"))) == code
    assert await bench.holds(bench.models.old)


async def test_a_file_that_is_cut_short_never_reaches_the_engine(bench: Bench, tmp_path: Path) -> None:
    bad = shutil.copytree(bench.models.new, tmp_path / "bad")
    order = bench.order(bench.models.old, bad, "cut")
    file = bad / edits.WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    assert refused(await bench.backend.stage(order)) == "SourceChanged"
    file.write_bytes(b"garbage")
    assert refused(await bench.backend.stage(order)) == "SourceChanged"
    assert await bench.holds(bench.models.old)


async def test_a_tensor_that_is_missing_never_reaches_the_engine(bench: Bench) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    part = tuple(item for item in ranges(bench.models.full) if item.name == name)
    full = bench.models.full
    order = Stage(operation_id="part", digest=digest_of(full), directory=str(full), tensors=part)
    assert refused(await bench.backend.stage(order)) == "IncompatibleModel"
    nothing = Stage(operation_id="none", digest=digest_of(full), directory=str(full), tensors=())
    assert refused(await bench.backend.stage(nothing)) == "UnsupportedChange"
    assert await bench.holds(bench.models.old)


async def test_the_users_folder_may_go_once_a_version_is_staged(bench: Bench, tmp_path: Path) -> None:
    copy = shutil.copytree(bench.models.new, tmp_path / "copy")
    operation = await bench.staged(bench.models.old, copy, "gone")
    shutil.rmtree(copy)
    await bench.commit(operation)
    assert await bench.holds(bench.models.new)


# What SGLang answers is not believed.


async def test_another_model_never_reaches_the_engine(bench: Bench) -> None:
    other = bench.another()
    with pytest.raises(WorkerLost, match="another model"):
        await other.load(load_order(bench.models.other))
    assert bench.wish.wanted
    bench.wish.seen("another start")
    await other.stop()
    assert (await bench.client.ask(LONG)).tokens


async def test_weights_that_somebody_else_changed_are_found_and_put_right(bench: Bench) -> None:
    full = str(bench.models.full)
    assert (await bench.client.post("/update_weights_from_disk", {"model_path": full}))["success"]
    hashes = await bench.backend.hashes("*")
    assert hashes.tensors.keys() == {"lm_head.weight"}
    assert {name for item in hashes.runtime for name in item.sources} == hashes_of(bench.models.old).keys() - {
        "lm_head.weight"
    }
    assert refused(await bench.backend.verify("look", strict=True)) == "DigestMismatch"
    await bench.load(bench.models.old)
    assert await bench.holds(bench.models.old)


async def test_a_failed_answer_is_looked_into_weights_new_cache_old(bench: Bench) -> None:
    """SGLang answers 400 although the weights have changed, and holds a cache of the old ones."""
    operation = await bench.staged(bench.models.old, bench.models.new, "frozen")
    accepted(await bench.backend.pause(operation, timeout=20, policy=RequestPolicy.NONE_RUNNING))
    async with bench.client.held(LONG):  # which keeps a cache
        with pytest.raises(WorkerLost, match="flush"):
            await bench.backend.commit(operation, RequestPolicy.NONE_RUNNING)
        assert bench.wish.wanted
        assert bench.backend.ranks()[0].digest == ""
    bench.wish.seen("another start")


class Emptied(SglangClient):
    """Takes the tensors away, once, from the folder that SGLang is about to load, and puts them back."""

    armed = False

    async def update_from_disk(self, path: str, version: str, *, seconds: float) -> Done:
        if not self.armed:
            return await super().update_from_disk(path, version, seconds=seconds)
        self.armed = False
        file = Path(path).resolve() / edits.WEIGHTS
        file.rename(file.with_suffix(".away"))
        try:
            return await super().update_from_disk(path, version, seconds=seconds)
        finally:
            file.with_suffix(".away").rename(file)


async def test_a_failed_answer_with_nothing_changed_is_one_that_can_be_undone(bench: Bench) -> None:
    client = Emptied(bench.server.url)
    backend = bench.another(client=client)
    accepted(await backend.load(load_order(bench.models.old)))
    order = bench.order(bench.models.old, bench.models.new, "empty")
    accepted(await backend.stage(order))
    accepted(await backend.prepare("empty"))
    accepted(await backend.pause("empty", timeout=20, policy=RequestPolicy.NONE_RUNNING))
    client.armed = True
    assert refused(await backend.commit("empty", RequestPolicy.NONE_RUNNING)) == "BadRequest"
    accepted(await backend.rollback("empty"))
    assert accepted(await backend.verify("empty", strict=False)).digest == digest_of(bench.models.old)
    accepted(await backend.resume("empty"))
    await backend.stop()
    assert await bench.holds(bench.models.old)


async def test_a_folder_that_was_written_to_is_not_loaded(bench: Bench) -> None:
    operation = await bench.staged(bench.models.old, bench.models.new, "written")
    accepted(await bench.backend.pause(operation, timeout=20, policy=RequestPolicy.NONE_RUNNING))
    for file in bench.folder.glob(f"exchanges/*/{edits.WEIGHTS}"):
        file.write_bytes(file.read_bytes())
    assert refused(await bench.backend.commit(operation, RequestPolicy.NONE_RUNNING)) == "SourceChanged"
    accepted(await bench.backend.rollback(operation))
    accepted(await bench.backend.resume(operation))
    assert await bench.holds(bench.models.old)


# Requests.


class Looking(SglangClient):
    """Says when it has looked twice whether requests are left: it found some, then."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.looks = 0
        self.twice = asyncio.Event()

    async def loads(self, *, seconds: float) -> Loads:
        self.looks += 1
        if self.looks == 2:
            self.twice.set()
        return await super().loads(seconds=seconds)


async def test_a_drain_waits_for_requests_that_nobody_here_knows_of(bench: Bench) -> None:
    looking = Looking(bench.server.url)
    async with bench.by(looking) as other:
        operation = await other.staged(bench.models.old, bench.models.new, "drain")
        async with bench.client.held(LONG) as answer:
            swapping = asyncio.create_task(other.commit(operation))
            looked = asyncio.create_task(looking.twice.wait())
            await asyncio.wait({looked, swapping}, return_when=asyncio.FIRST_COMPLETED)
            assert not swapping.done()
            await bench.client.go_on()
            asked = (await answer.whole())[-1]
            await swapping
        assert (asked.finish, asked.versions) == ("length", [digest_of(bench.models.old)])
        assert await other.holds(bench.models.new)


async def test_a_drain_whose_time_is_over_leaves_the_engine_running(bench: Bench) -> None:
    operation = await bench.staged(bench.models.old, bench.models.new, "late")
    async with bench.client.held(LONG) as answer:
        replies = await bench.backend.pause(operation, timeout=0.2, policy=RequestPolicy.NONE_RUNNING)
        assert refused(replies) == "DrainTimeout"
        await bench.client.go_on()
        accepted(await bench.backend.resume(operation))
        assert (await answer.whole())[-1].finish == "length"
    assert await bench.holds(bench.models.old)


class Aborting(SglangClient):
    """Has the engine, which a test stopped, go on once it was told to end all requests."""

    async def abort_all(self, *, seconds: float) -> None:
        await super().abort_all(seconds=seconds)
        await self.resume(seconds=seconds)


async def test_aborted_requests_end_and_say_so(bench: Bench) -> None:
    async with bench.by(Aborting(bench.server.url)) as other:
        operation = await other.staged(bench.models.old, bench.models.new, "abort")
        async with bench.client.held(LONG) as answer:
            await other.commit(operation, RequestPolicy.ABORT)
            assert (await answer.whole())[-1].finish == "abort"
        assert await other.holds(bench.models.new)


async def test_a_label_can_change_without_ending_requests(bench: Bench) -> None:
    client = SglangClient(bench.server.url)
    async with bench.client.held(LONG) as answer:
        await client.set_version("label", seconds=60)
        await bench.client.go_on()
        assert (await answer.whole())[-1].finish == "length"
    await client.close()


async def test_modes_that_would_leave_a_stale_cache_or_mix_answers_are_refused(bench: Bench) -> None:
    refused_modes = bench.backend.capabilities().refused_modes
    assert set(refused_modes) == {"Freeze", "Overlap", "Recompute"}
    operation = await bench.staged(bench.models.old, bench.models.new, "freeze")
    for policy in (RequestPolicy.FREEZE, RequestPolicy.RECOMPUTE):
        assert refused(await bench.backend.pause(operation, timeout=5, policy=policy)) == "UnsupportedChange"
    assert await bench.holds(bench.models.old)


class Beside(SglangClient):
    """Has some ask around the one door before, while and after SGLang loads a folder, without a break."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answers: list[Asked] = []
        self._answered = asyncio.Condition()

    async def update_from_disk(self, path: str, version: str, *, seconds: float) -> Done:
        askers = [asyncio.create_task(self._somebody()) for _ in range(3)]
        await self._one_by({(await self.model_info(seconds=seconds)).weight_version})
        done = await super().update_from_disk(path, version, seconds=seconds)
        await self._one_by({version})
        for asker in askers:
            asker.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
        return done

    async def _one_by(self, versions: set[str]) -> None:
        async with self._answered:
            await self._answered.wait_for(lambda: any(set(answer.versions) == versions for answer in self.answers))

    async def _somebody(self) -> None:
        client = Client(self._url)
        try:
            while True:
                answer = await client.ask(LONG, tokens=40)
                async with self._answered:
                    self.answers.append(answer)
                    self._answered.notify_all()
        finally:
            await client.close()


async def test_requests_that_come_while_the_folder_is_loaded_are_answered_by_one_version_each(bench: Bench) -> None:
    client = Beside(bench.server.url)
    backend = bench.another(client=client)
    accepted(await backend.load(load_order(bench.models.old)))
    accepted(await backend.stage(bench.order(bench.models.old, bench.models.new, "beside")))
    accepted(await backend.prepare("beside"))
    accepted(await backend.pause("beside", timeout=20, policy=RequestPolicy.NONE_RUNNING))
    accepted(await backend.commit("beside", RequestPolicy.NONE_RUNNING))
    accepted(await backend.verify("beside", strict=True))
    accepted(await backend.resume("beside"))
    for answer in client.answers:
        assert len(answer.versions) == 1
        assert {token < edits.HALF for token in answer.tokens} == {answer.versions == [digest_of(bench.models.old)]}
    assert (await backend.hashes("*")).tensors == hashes_of(bench.models.new)
    await backend.stop()


async def test_a_pause_that_somebody_left_and_asked_for_its_health_ends_ready(bench: Bench) -> None:
    """A health probe during a long pause makes SGLang hold itself for unhealthy until it has generated again."""
    client = SglangClient(bench.server.url)
    async with bench.asking:  # who asks for a token while it is paused takes it for dead
        await bench.client.post("/pause_generation", {"mode": "retract"})
        assert not await client.generates(seconds=60)
        await bench.client.post("/continue_generation", {})
        assert not await client.ready(seconds=60)
        await bench.client.post("/pause_generation", {"mode": "retract"})
    await bench.load(bench.models.old)
    assert await client.ready(seconds=60)
    await client.close()
    assert (await bench.client.ask(LONG)).tokens


# The whole transaction.


@asynccontextmanager
async def _coordinated(bench: Bench, folder: Path, roots: list[Path]) -> AsyncIterator[Coordinator]:
    """Have a coordinator drive the backend, with real sources and a real journal."""
    clock = SystemClock()
    coordinator = Coordinator(
        backend=bench.another(),
        sources=Sources({"file": FileSource(roots=roots, cache=None)}),
        journal=Journal.open(folder / "journal"),
        gate=Gate(clock=clock, max_queue=4),
        clock=clock,
        settings=SwapSettings(state_dir=folder, pod_uid=POD, propagation_seconds=0),
    )
    await coordinator.start(VersionRef(version="1.0", uri=bench.models.old.as_uri()), None)
    yield coordinator
    await coordinator.stop()


async def test_a_swap_goes_its_whole_way_and_a_bad_version_leaves_it_there(bench: Bench, tmp_path: Path) -> None:
    bad = _nan(shutil.copytree(bench.models.old, tmp_path / "bad"))
    roots = [bench.models.old, bench.models.new, tmp_path]
    async with _coordinated(bench, tmp_path / "state", roots) as coordinator:
        good = VersionRef(version="1.1", uri=bench.models.new.as_uri())
        await coordinator.swap(request(good, "good"))
        status = await last(coordinator, "good")
        assert (status.state, status.commit_method) == (SwapState.SERVING, "disk"), status.error
        await coordinator.swap(request(VersionRef(version="1.2", uri=bad.as_uri()), "bad", revision=2))
        status = await last(coordinator, "bad")
        assert status.state is SwapState.ABORTED
        assert status.error is not None
        assert status.error.code == "ChecksFailed"
        state = coordinator.state()
        assert state.live is not None
        assert (state.ready, state.live.version) == (True, "1.1")
        assert (await bench.client.ask(LONG)).versions == [state.live.digest]
        check = await coordinator.check(CheckRequest())
        assert check.ok
        assert check.checked == len(hashes_of(bench.models.new))


async def test_a_version_that_fails_a_prompt_goes_the_way_back(bench: Bench, tmp_path: Path) -> None:
    bad = edits.overflowing(bench.models.old, tmp_path / "bad")
    checks = Checks(prompts=[PromptCheck(prompt="hello", max_logprob_delta=1000.0)])
    await bench.load(bench.models.old)
    wanted = (await bench.client.ask(LONG)).tokens
    roots = [bench.models.old, bench.models.new, tmp_path]
    async with _coordinated(bench, tmp_path / "state", roots) as coordinator:
        await coordinator.swap(request(VersionRef(version="1.2", uri=bad.as_uri()), "bad", checks=checks))
        status = await last(coordinator, "bad")
        assert status.error is not None
        assert (status.state, status.error.code) == (SwapState.ROLLED_BACK, "ChecksFailed"), status.error
        assert (await bench.client.ask(LONG)).tokens == wanted
        assert (await coordinator.check(CheckRequest())).ok
        good = VersionRef(version="1.1", uri=bench.models.new.as_uri())
        await coordinator.swap(request(good, "good", revision=2, checks=checks))
        status = await last(coordinator, "good")
        assert status.state is SwapState.SERVING, status.error
        assert not bench.wish.wanted


# Restarts.


async def test_a_sidecar_that_starts_later_finds_what_is_live(bench: Bench) -> None:
    await bench.swap(bench.models.old, bench.models.new, "before")
    checksum = await bench.client.checksum()
    later = bench.another()
    accepted(await later.load(load_order(bench.models.new)))
    assert later.ranks()[0].digest == digest_of(bench.models.new)
    assert await bench.client.checksum() == checksum
    accepted(await later.load(load_order(bench.models.full)))
    assert (await later.hashes("*")).tensors == hashes_of(bench.models.full)
    await later.stop()


async def test_a_sidecar_that_died_in_a_pause_is_followed_by_one_that_ends_it(bench: Bench) -> None:
    operation = await bench.staged(bench.models.old, bench.models.new, "died")
    accepted(await bench.backend.pause(operation, timeout=20, policy=RequestPolicy.NONE_RUNNING))
    accepted(await bench.backend.commit(operation, RequestPolicy.NONE_RUNNING))
    later = bench.another()
    accepted(await later.load(load_order(bench.models.old)))
    assert (await later.hashes("*")).tensors == hashes_of(bench.models.old)
    await later.stop()
    assert (await bench.client.ask(LONG)).tokens


async def test_no_folder_is_left_that_nothing_leads_to(bench: Bench) -> None:
    for number in range(2):
        await bench.swap(bench.models.old, bench.models.new, f"to-{number}")
        await bench.swap(bench.models.new, bench.models.old, f"from-{number}")
    assert len(list((bench.folder / "exchanges").iterdir())) == 2  # where the link leads, and the way back


async def _until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.02)


@pytest.mark.full  # in each run one is killed in test_sglang_pod
async def test_a_killed_engine_is_noticed_and_a_fresh_one_answers_as_the_swapped_one_did(bench: Bench) -> None:
    """The last test of the shared server: it is another start afterwards."""
    backend = bench.another(dataclasses.replace(SETTINGS, watch=0.2))
    await backend.start()
    accepted(await backend.load(load_order(bench.models.full)))
    boot_id, swapped = backend.ranks()[0].boot_id, [(await bench.client.ask(text)).tokens for text in (LONG, "short")]
    bench.server.kill()
    async with asyncio.timeout(60):
        await _until(lambda: not backend.ranks()[0].alive)
    bench.server.start(bench.models.full)
    accepted(await backend.load(load_order(bench.models.full)))  # it waits until the engine is up
    assert [(await bench.client.ask(text)).tokens for text in (LONG, "short")] == swapped
    assert (await backend.hashes("*")).tensors == hashes_of(bench.models.full)
    assert backend.ranks()[0].boot_id != boot_id
    await backend.stop()
