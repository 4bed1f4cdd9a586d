"""The main job on one machine: the whole engine process changes its weights under load and nobody notices."""

import asyncio
import hashlib
import json
import shutil
import struct
from pathlib import Path

import openai
import pytest

from demo.answers import Answer
from modelswap_engine.protocol.engine_state import EngineState
from modelswap_engine.protocol.messages import CheckRequest, CheckResult
from modelswap_engine.protocol.policy import TrafficMode
from modelswap_engine.protocol.states import SwapState
from tests.e2e_local.conftest import Serve
from tests.support.clients import asking, honest, load_on, makers
from tests.support.serve import Served

pytestmark = pytest.mark.model

LONG = 600


def file_hashes(directory: Path) -> dict[str, str]:
    """Hash every tensor of a checkpoint's one file, without any code of ours."""
    data = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    start = 8 + length
    return {
        name: hashlib.sha256(data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]).hexdigest()
        for name, entry in header.items()
        if name != "__metadata__"
    }


def live_hashes(served: Served) -> dict[str, str]:
    result = served.control.post("/check", CheckRequest(), CheckResult)
    assert result.ok, result.mismatched
    return {name: digest.removeprefix("sha256:") for name, digest in result.tensors.items()}


async def swap(served: Served, source: Path, version: str, *options: str) -> None:
    done = await asyncio.to_thread(served.command, "swap", "--source", source.as_uri(), "--version", version, *options)
    assert done.code == 0, done.out + done.err


async def test_drain_under_load_then_recompute_back(served: Served, pair: Path) -> None:
    before = served.state()
    async with load_on(served.data_url, streams=4, max_tokens=48) as load:
        await load.served_more(6)
        await swap(served, pair / "v2", "1.1")
        await load.served_more(6)
        # Drain: no answer shows two versions, and both versions were seen
        assert load.summary().mixed == 0
        assert set().union(*map(makers, load.answers)) == {"1.0", "1.1"}
        caught = await recomputed(served, pair)
        await load.served_more(6)
    assert load.summary().failed == 0, load.summary().lines()
    # Recompute: an answer that was caught goes on with the new weights, and says so token by token.
    assert [span.version for span in caught.spans] == ["1.1", "1.0"]
    turn = caught.spans[0].tokens
    assert (caught.failure, turn + caught.spans[1].tokens, len(caught.text)) == ("", LONG, LONG)
    assert caught.text[:turn].isupper()
    assert caught.text[turn:].islower()
    for answer in load.answers:
        assert honest(answer), answer
    # The same processes, now exactly the old bytes again, by the file's own hashes.
    after = served.state()
    assert (after.boot_id, after.ranks[0].pid, after.restarts) == (before.boot_id, before.ranks[0].pid, 0)
    assert live_hashes(served) == file_hashes(pair / "v1")


async def recomputed(served: Served, pair: Path) -> Answer:
    """Return an answer in whose middle a Recompute swap to 1.0 happened."""
    with served.slowly():
        begun = asyncio.Event()
        answering = asking(served.data_url, tokens=LONG, begun=begun)
        await begun.wait()
        await asyncio.to_thread(served.begin, pair / "v1", "1.0", operation="back", mode=TrafficMode.RECOMPUTE)
        status = await asyncio.to_thread(served.ended, "back")
    assert status.state is SwapState.SERVING, status.error
    assert status.recomputed_requests >= 1
    return await answering


async def test_the_live_bytes_are_the_files_and_rollback_reads_nothing(served: Served, pair: Path) -> None:
    await swap(served, pair / "v2", "1.1")
    assert live_hashes(served) == file_hashes(pair / "v2")
    done = served.command("rollback", "-o", "json")
    assert done.code == 0, done.err
    status = json.loads(done.out)
    assert (status["state"], status["bytesFetched"]) == ("Serving", 0)
    assert status["commitWindowMicroseconds"] > 0
    assert live_hashes(served) == file_hashes(pair / "v1")


async def test_a_version_is_tried_with_prompts_before_it_answers(served: Served, pair: Path) -> None:
    asked = ("swap", "--source", str(pair / "v2"), "--version", "1.1", "-o", "json", "--check-prompt", "hello")
    done = await asyncio.to_thread(served.command, *asked, "--max-logprob-delta", "0.5")
    assert done.code == 1, done.out
    status = json.loads(done.out)
    assert (status["state"], status["error"]["code"], status["pauseSeconds"]) == ("Aborted", "ChecksFailed", None)
    assert live_hashes(served) == file_hashes(pair / "v1")
    done = await asyncio.to_thread(served.command, *asked, "--max-logprob-delta", "1000")
    assert done.code == 0, done.out + done.err
    assert live_hashes(served) == file_hashes(pair / "v2")


def spoil(pair: Path, folder: Path) -> dict[str, tuple[Path, list[str], str]]:
    """Return bad versions: folder, more options, and the reason that must be given."""
    from tests.support import models

    def copy(name: str) -> Path:
        return Path(shutil.copytree(pair / "v2", folder / name))

    def pinned(directory: Path) -> list[str]:
        from modelswap_engine.checkpoint.build import build_manifest

        return ["--digest", build_manifest(directory).digest]

    # Other content than any that is retained: what is in memory under a pin needs no source.
    flipped = models.write_variant(pair / "v2", folder / "flipped", ["lm_head.weight"], seed=7)
    pin = pinned(flipped)
    models.flip_byte(flipped, "lm_head.weight", position=5)
    shape = copy("shape")
    models.edit_tensor(shape, "model.norm.weight", lambda tensor: tensor[:-1].contiguous())
    truncated = copy("truncated")
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    pickle = folder / "pickle"
    pickle.mkdir()
    (pickle / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    tokenizer = copy("tokenizer")
    (tokenizer / "tokenizer.json").write_text("{}")
    outside = Path("/etc")
    return {
        "a flipped byte behind a pin": (flipped, pin, "DigestMismatch"),
        "another shape": (shape, [], "IncompatibleModel"),
        "truncated": (truncated, [], "InvalidCheckpoint"),
        "pickle": (pickle, [], "UnsupportedFormat"),
        "broken tokenizer": (tokenizer, [], "InvalidCheckpoint"),
        "nothing there": (folder / "missing", [], "SourceNotFound"),
        "outside the roots": (outside, [], "SourceNotAllowed"),
    }


async def test_bad_versions_are_refused_before_anything_is_touched(served: Served, pair: Path, tmp_path: Path) -> None:
    bad = spoil(pair, tmp_path)
    worker = served.worker_pid()
    async with load_on(served.data_url, streams=2, max_tokens=24) as load:
        for name, (folder, options, reason) in bad.items():
            done = await asyncio.to_thread(
                served.command, "swap", "--source", folder.as_uri(), "--version", name, "-o", "json", *options
            )
            assert done.code == 1, (name, done.out, done.err)
            status = json.loads(done.out)
            assert status["error"]["code"] == reason, (name, status["error"])
            assert status["state"] == "Aborted"
            assert status["pauseSeconds"] in (None, 0), name
            assert "Traceback" not in done.out + done.err
        await load.served_more(2)
    assert load.summary().clean, load.summary().lines()
    assert set().union(*map(makers, load.answers)) == {"1.0"}
    state = served.state()
    assert state.live is not None
    assert (state.live.version, state.ready, state.restarts, state.ranks[0].pid) == ("1.0", True, 0, worker)
    assert live_hashes(served) == file_hashes(pair / "v1")
    # And the next good one is welcome.
    await swap(served, pair / "v2", "1.1")


async def test_sigterm_serves_whoever_comes_until_nobody_is_left(serve: Serve) -> None:
    served = serve()
    with served.slowly():
        first = asking(served.data_url, tokens=400)
        while served.state().gate.in_flight == 0:
            await asyncio.sleep(0.02)
        served.terminate()
        while served.probe("/readyz") == 200:
            await asyncio.sleep(0.02)
        assert served.probe("/livez") == 200
        late = await asking(served.data_url, tokens=4)
        assert (late.failure, len(late.text)) == ("", 4)
    answer = await first
    assert (answer.failure, len(answer.text)) == ("", 400)
    assert await asyncio.to_thread(served.wait) == 0


async def test_a_client_that_goes_away_ends_its_generation(served: Served) -> None:
    api = openai.AsyncOpenAI(base_url=f"{served.data_url}/v1", api_key="unused", max_retries=0)
    with served.slowly():  # 1900 tokens would take minutes
        async with api as client:
            stream = await client.completions.create(
                model="tiny", prompt="a", max_tokens=1900, stream=True, temperature=0, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            assert served.state().gate.in_flight == 1
            await stream.close()
            while served.state().gate.in_flight:
                await asyncio.sleep(0.02)


async def test_the_command_line_shows_the_state(served: Served, pair: Path) -> None:
    shown = await asyncio.to_thread(served.command, "state")
    assert shown.code == 0
    assert "1.0" in shown.out
    assert "open, 0 queued" in shown.out
    assert "0 inside" in shown.out
    plan = await asyncio.to_thread(served.command, "plan", "--source", str(pair / "v2"))
    assert plan.code == 0, plan.err
    assert " of 30 change" in plan.out
    paused = await asyncio.to_thread(served.command, "pause", "--seconds", "30", "-o", "json")
    assert json.loads(paused.out)["gate"]["open"] is False
    resumed = await asyncio.to_thread(served.command, "resume", "-o", "json")
    assert json.loads(resumed.out)["gate"]["open"] is True
    assert served.control.get("/state", EngineState).gate.open
