"""Our half inside a foreign engine, called as the sidecar calls it; the engine has fused, tied and packed weights."""

import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelswap_engine.backends.inprocess import wire
from modelswap_engine.backends.inprocess.agent import AgentSettings
from modelswap_engine.backends.port import Stage, StageRetained
from modelswap_engine.limits import Memory
from modelswap_engine.weights.version import Method
from tests.support.lab_engine import HIDDEN, Lab, LabHost, write
from tests.support.orders import digest_of, hashes_of, ranges


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old", seed=1)


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return write(tmp_path / "new", seed=2)


@pytest.fixture
def lab(old: Path) -> Lab:
    made = Lab(LabHost(old))
    assert made.adopt(old).reply.error is None
    return made


def changed(base: Path, out: Path, **tensors: torch.Tensor) -> Path:
    """Copy a checkpoint with other tensors for some; dots in names are written as two underscores."""
    shutil.copytree(base, out)
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(base / "model.safetensors"), **named}, out / "model.safetensors")
    return out


def error_of(answer: wire.Answer) -> str:
    assert answer.reply.error is not None
    return answer.reply.error.code


def same_as_fresh(lab: Lab, folder: Path) -> bool:
    """Say whether the engine answers bit for bit as one that was started on a version."""
    return torch.equal(lab.host.says(), LabHost(folder).says())


def test_everything_changes_and_comes_back(lab: Lab, old: Path, new: Path) -> None:
    before = lab.host.says()
    steps = list(lab.swap(old, new, "op"))
    assert [step.reply.error for step in steps] == [None] * 4
    assert {step.reply.digest for step in steps} == {digest_of(new)}
    assert same_as_fresh(lab, new)
    assert lab.call(wire.HelloCall()).facts.digest == digest_of(new)  # type: ignore[union-attr]

    lab.call(wire.RollbackCall(operation_id="op"))
    assert torch.equal(lab.host.says(), before)
    verified = lab.outcome(wire.VerifyCall(work="again", operation_id="op", strict=True))
    assert (verified.reply.error, verified.reply.digest) == (None, digest_of(old))
    assert lab.host.wiped == 3  # what was cached by the weights before: once taken over, exchanged, and taken back
    assert lab.host.settled_times == 1


def test_a_model_that_would_take_its_memory_twice_is_refused(old: Path) -> None:
    lab = Lab(LabHost(old, frugal=False))
    assert error_of(lab.adopt(old)) == "IncompatibleModel"
    assert same_as_fresh(lab, old)


def test_where_addresses_are_held_the_values_are_written_there(old: Path, new: Path) -> None:
    lab = Lab(LabHost(old))
    lab.host.method = Method.COPY
    assert lab.adopt(old).reply.error is None
    assert lab.call(wire.HelloCall()).facts.commit_method == "copy"  # type: ignore[union-attr]
    held, before = lab.host.model.norm.data, lab.host.says()
    address = held.data_ptr()
    steps = list(lab.swap(old, new, "op"))
    assert [step.reply.error for step in steps] == [None] * 4
    assert steps[2].reply.method == "copy"
    assert lab.host.model.norm.data_ptr() == address
    assert same_as_fresh(lab, new)

    lab.call(wire.RollbackCall(operation_id="op"))
    verified = lab.outcome(wire.VerifyCall(work="again", operation_id="op", strict=True))
    assert (verified.reply.error, verified.reply.digest) == (None, digest_of(old))
    assert lab.host.model.norm.data_ptr() == address
    assert torch.equal(lab.host.says(), before)


def test_a_packed_layer_changes_with_its_tensors_and_not_before(lab: Lab, old: Path, tmp_path: Path) -> None:
    new = changed(old, tmp_path / "new", layers__0__q__weight=torch.randn(HIDDEN // 3, HIDDEN))
    before = lab.host.says()
    steps = lab.swap(old, new, "op")
    staged, _prepared = next(steps), next(steps)
    assert torch.equal(lab.host.says(), before)
    assert staged.reply.fetched_bytes == sum(
        item.nbytes for item in ranges(new) if item.name.startswith("layers.0.") and ".o." not in item.name
    )
    committed, _verified = next(steps), next(steps)
    assert committed.reply.method == "pointer"
    assert same_as_fresh(lab, new)


def test_half_of_a_fused_weight_is_refused(lab: Lab, new: Path) -> None:
    before = lab.host.says()
    half = tuple(item for item in ranges(new) if item.name == "layers.0.q.weight")
    order = Stage(operation_id="op", digest="d", directory="", tensors=half)
    assert error_of(lab.outcome(wire.StageCall(work="w", order=order))) == "IncompatibleModel"
    assert torch.equal(lab.host.says(), before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_before_anything_is_touched(
    lab: Lab, old: Path, tmp_path: Path, value: float
) -> None:
    before = lab.host.says()
    bad = changed(old, tmp_path / "bad", layers__1__o__weight=torch.full((HIDDEN, HIDDEN), value))
    order = lab.order(old, bad, "op")
    assert error_of(lab.outcome(wire.StageCall(work="w", order=order))) == "ChecksFailed"
    assert error_of(lab.call(wire.CommitCall(operation_id="op"))) == "NotFound"
    assert torch.equal(lab.host.says(), before)


def test_bytes_that_changed_after_the_manifest_are_refused(lab: Lab, old: Path, new: Path) -> None:
    order = lab.order(old, new, "op")
    with (new / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert error_of(lab.outcome(wire.StageCall(work="w", order=order))) == "ManifestMismatch"


def test_the_engine_must_hold_what_it_is_said_to_hold(old: Path, new: Path) -> None:
    lab = Lab(LabHost(old))
    assert error_of(lab.adopt(new)) == "ManifestMismatch"
    assert error_of(lab.call(wire.LayoutCall())) == "NotReady"
    assert lab.adopt(old, work="again").reply.error is None


def test_a_packed_value_that_is_not_what_it_was_made_of_shows(lab: Lab, old: Path) -> None:
    layer = lab.host.model.layers[0]["o"]
    inner = layer.applied
    assert lab.outcome(wire.VerifyCall(work="1", operation_id="", strict=True)).reply.error is None
    weights = inner.__closure__[0].cell_contents
    weights[3, 5] += 1
    assert error_of(lab.outcome(wire.VerifyCall(work="2", operation_id="", strict=True))) == "ManifestMismatch"
    hashes = lab.outcome(wire.HashesCall(work="3", pattern="layers.0.o.*", still=True)).hashes
    assert hashes is not None
    assert hashes.tensors["layers.0.o.weight"] != hashes_of(old)["layers.0.o.weight"]


def test_a_packed_value_that_somebody_else_put_there_shows(lab: Lab) -> None:
    layer = lab.host.model.layers[0]["o"]
    inner = layer.applied
    layer.applied = lambda rows: inner(rows)
    assert error_of(lab.call(wire.VerifyCall(work="1", operation_id="", strict=False))) == "Internal"


def test_a_head_that_is_packed_beside_its_tensor_is_proven_twice(lab: Lab) -> None:
    lab.host.model.head.applied.__closure__[0].cell_contents[0, 0] += 1  # type: ignore[attr-defined]
    assert error_of(lab.outcome(wire.VerifyCall(work="1", operation_id="", strict=True))) == "ManifestMismatch"


def test_hashes_say_what_cannot_be_seen_while_the_engine_computes(lab: Lab, old: Path) -> None:
    moving = lab.outcome(wire.HashesCall(work="1", pattern="*")).hashes
    still = lab.outcome(wire.HashesCall(work="2", pattern="*", still=True)).hashes
    assert moving is not None
    assert still is not None
    assert still.tensors == hashes_of(old)
    assert set(moving.tensors) == {"embed.weight", "norm.weight"}
    assert set(moving.unverifiable) == hashes_of(old).keys() - moving.tensors.keys()


def test_a_tied_head_follows_the_embedding(tmp_path: Path) -> None:
    old, new = (write(tmp_path / name, seed=seed, tied=True) for name, seed in (("old", 1), ("new", 2)))
    lab = Lab(LabHost(old, tied=True))
    assert lab.adopt(old).reply.error is None
    assert [step.reply.error for step in lab.swap(old, new, "op")] == [None] * 4
    assert torch.equal(lab.host.says(), LabHost(new, tied=True).says())
    assert lab.host.model.head.weight is lab.host.model.embed.weight


def test_layers_with_adapters_around_them_are_the_same_layers(old: Path, new: Path) -> None:
    host = LabHost(old)
    host.wrap()
    lab = Lab(host)
    assert lab.adopt(old).reply.error is None
    assert [step.reply.error for step in lab.swap(old, new, "op")] == [None] * 4
    assert same_as_fresh(lab, new)


def test_zeros_with_a_sign_and_tiny_values_are_proven_too(tmp_path: Path) -> None:
    odd = torch.randn(HIDDEN, HIDDEN)
    odd[0, :4] = torch.tensor([-0.0, 0.0, 1e-42, -1e-42])
    old = changed(write(tmp_path / "base", seed=1), tmp_path / "old", layers__0__o__weight=odd)
    new = changed(old, tmp_path / "new", layers__0__o__weight=-odd)
    lab = Lab(LabHost(old))
    assert lab.adopt(old).reply.error is None
    assert [step.reply.error for step in lab.swap(old, new, "op")] == [None] * 4


def test_weights_stored_in_another_precision_are_proven_by_making_them_again(tmp_path: Path) -> None:
    old, new = (write(tmp_path / name, seed=seed) for name, seed in (("old", 1), ("new", 2)))
    lab = Lab(LabHost(old, dtype=torch.bfloat16))
    assert lab.adopt(old).reply.error is None
    assert [step.reply.error for step in lab.swap(old, new, "op")] == [None] * 4
    assert torch.equal(lab.host.says(), LabHost(new, dtype=torch.bfloat16).says())
    other = Lab(LabHost(old, dtype=torch.bfloat16))
    assert error_of(other.adopt(new)) == "ManifestMismatch"


def test_the_version_before_is_there_without_being_read(lab: Lab, old: Path, new: Path) -> None:
    before, digest = lab.host.says(), digest_of(old)
    list(lab.swap(old, new, "there"))
    lab.call(wire.ReleaseCall(operation_id="there", previous=False))
    shutil.rmtree(old)
    order = StageRetained(operation_id="back", digest=digest, directory="")
    assert lab.call(wire.StageRetainedCall(order=order)).reply.fetched_bytes == 0
    for call in (wire.PrepareCall(operation_id="back"), wire.CommitCall(operation_id="back")):
        assert lab.call(call).reply.error is None
    assert lab.outcome(wire.VerifyCall(work="v", operation_id="back", strict=True)).reply.digest == digest
    assert torch.equal(lab.host.says(), before)


def lab_digest(lab: Lab) -> str:
    facts = lab.call(wire.HelloCall()).facts
    assert facts is not None
    return facts.digest


def test_no_second_thing_is_begun_while_one_goes_on(lab: Lab, old: Path, new: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def loading() -> None:
        entered.set()
        assert go_on.wait(20)

    lab.host.loading = loading
    call = wire.StageCall(work="w", order=lab.order(old, new, "op"))
    assert lab.call(call).running
    assert entered.wait(20)
    assert lab.call(call).running  # the same work is begun once
    assert error_of(lab.call(wire.PrepareCall(operation_id="op"))) == "Busy"
    assert error_of(lab.call(wire.StageCall(work="other", order=call.order))) == "Busy"
    lab.call(wire.CancelCall(work="w"))
    go_on.set()
    assert error_of(lab.call(wire.ProgressCall(work="w"))) == "Cancelled"
    lab.host.loading = lambda: None
    assert lab.outcome(wire.StageCall(work="next", order=call.order)).reply.error is None


def test_what_is_not_proven_can_only_be_proven_or_undone(lab: Lab, old: Path, new: Path) -> None:
    steps = lab.swap(old, new, "op")
    committed = [next(steps) for _ in range(3)][-1]
    assert lab.call(wire.CommitCall(operation_id="op")).reply == committed.reply  # asked twice, done once
    assert lab_digest(lab) == ""
    assert error_of(lab.call(wire.StageCall(work="x", order=lab.order(new, old, "next")))) == "Busy"
    assert error_of(lab.call(wire.ReleaseCall(operation_id="op", previous=True))) == "Busy"
    lab.call(wire.RollbackCall(operation_id="op"))
    lab.call(wire.VerifyCall(work="v", operation_id="op", strict=False))
    assert lab_digest(lab) == digest_of(old)


def prepared(lab: Lab, old: Path, new: Path) -> None:
    steps = lab.swap(old, new, "op")
    assert [next(steps).reply.error for _ in range(2)] == [None] * 2


def test_a_whole_commit_forgets_proves_and_names_before_the_engine_makes_a_step(lab: Lab, old: Path, new: Path) -> None:
    lab.host.requests = 0
    prepared(lab, old, new)
    before = f"forget at {float(lab.host.model.norm[0]):.3f}"
    answer = lab.call(wire.CommitCall(operation_id="op", whole=True))
    assert (answer.reply.error, answer.reply.digest) == (None, digest_of(new))
    assert (answer.forgot, answer.proved, answer.named) == (True, True, False)
    assert lab.host.noted == [before, f"called {digest_of(new)}"]
    assert lab_digest(lab) == digest_of(new)  # no other call is needed
    again = lab.call(wire.CommitCall(operation_id="op", whole=True))
    assert (again.reply, again.proved) == (answer.reply, True)  # asked twice, done once

    lab.host.requests = 1  # which keeps nothing from being put back, only from being forgotten
    undone = lab.call(wire.RollbackCall(operation_id="op", whole=True))
    assert (undone.reply.digest, undone.forgot, undone.proved) == (digest_of(old), False, True)
    assert lab.host.noted[-1] == f"called {digest_of(old)}"
    assert same_as_fresh(lab, old)


def test_a_whole_commit_is_refused_while_requests_hold_what_is_cached(lab: Lab, old: Path, new: Path) -> None:
    lab.host.requests = 1
    prepared(lab, old, new)
    assert error_of(lab.call(wire.CommitCall(operation_id="op", whole=True))) == "Busy"
    assert same_as_fresh(lab, old)
    lab.host.requests = 0
    assert lab.call(wire.CommitCall(operation_id="op", whole=True)).proved


def test_where_only_the_engines_routes_can_forget_a_whole_commit_says_so(lab: Lab, old: Path, new: Path) -> None:
    prepared(lab, old, new)
    answer = lab.call(wire.CommitCall(operation_id="op", whole=True))
    assert (answer.reply.error, answer.forgot, answer.proved) == (None, False, True)


def test_a_whole_commit_that_is_not_proved_names_nothing_and_keeps_the_way_back(
    lab: Lab, old: Path, tmp_path: Path
) -> None:
    lab.host.requests = 0
    prepared(lab, old, changed(old, tmp_path / "new", norm__weight=torch.ones(HIDDEN)))
    layer = lab.host.model.layers[0]["o"]
    inner = layer.applied
    layer.applied = lambda rows: inner(rows)  # somebody else's
    assert error_of(lab.call(wire.CommitCall(operation_id="op", whole=True))) == "Internal"
    assert [line for line in lab.host.noted if line.startswith("called")] == []
    assert lab_digest(lab) == ""
    layer.applied = inner
    assert lab.call(wire.RollbackCall(operation_id="op", whole=True)).proved
    assert same_as_fresh(lab, old)


def test_what_cannot_be_forgotten_from_here_is_put_back_all_the_same(
    lab: Lab, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.host.requests = 0
    prepared(lab, old, new)
    assert lab.call(wire.CommitCall(operation_id="op", whole=True)).proved

    def broken() -> None:
        raise TypeError("another version of the engine wants an argument")

    monkeypatch.setattr(lab.host, "forget", broken)
    undone = lab.call(wire.RollbackCall(operation_id="op", whole=True))
    assert (undone.reply.digest, undone.forgot, undone.proved) == (digest_of(old), False, True)
    assert same_as_fresh(lab, old)


def test_ranks_forget_alike_where_one_of_them_does_not_commit(lab: Lab, old: Path, new: Path) -> None:
    lab.host.requests = 0
    lab.outcome(wire.StageCall(work="w", order=lab.order(old, new, "op")))
    assert error_of(lab.call(wire.CommitCall(operation_id="op", whole=True))) == "NotFound"  # not prepared
    assert len(lab.host.noted) == 1
    assert same_as_fresh(lab, old)


def test_staged_tensors_are_dropped_when_nobody_asks_about_them(old: Path, new: Path) -> None:
    lab = Lab(LabHost(old), settings=AgentSettings(lease_seconds=0.2))
    lab.adopt(old)
    assert lab.outcome(wire.StageCall(work="w", order=lab.order(old, new, "op"))).reply.staged_bytes > 0
    left = threading.Event()
    for _ in range(500):
        memory = lab.call(wire.MemoryCall()).memory
        assert memory is not None
        if memory.staged_bytes == 0:
            break
        left.wait(0.01)
    assert memory.staged_bytes == 0
    assert error_of(lab.call(wire.PrepareCall(operation_id="op"))) == "NotFound"


def test_staging_gives_way_to_requests_and_what_needs_a_still_engine_does_not(old: Path, new: Path) -> None:
    asked: list[None] = []

    def busy() -> bool:
        asked.append(None)
        return False

    lab = Lab(LabHost(old), busy=busy)
    lab.adopt(old)
    lab.outcome(wire.HashesCall(work="h", pattern="*", still=True))
    assert not asked
    lab.outcome(wire.StageCall(work="w", order=lab.order(old, new, "op")))
    assert asked


def test_memory_counts_packed_weights(lab: Lab, old: Path, new: Path) -> None:
    before = lab.call(wire.MemoryCall()).memory
    list(lab.swap(old, new, "op"))
    after = lab.call(wire.MemoryCall()).memory
    assert before is not None
    assert after is not None
    assert before.model_bytes > sum(item.nbytes for item in ranges(old)) > 0
    assert after.previous_bytes == after.model_bytes == before.model_bytes


def test_memory_is_bounded_by_the_container_of_the_engine(old: Path) -> None:
    lab = Lab(LabHost(old), bound=lambda: Memory(limit=100, available=7))
    for _ in range(2):  # before a version is known, and after
        memory = lab.call(wire.MemoryCall()).memory
        assert memory is not None
        assert (memory.limit_bytes, memory.available_bytes) == (100, 7)
        lab.adopt(old)


def test_a_model_that_is_refused_says_why(old: Path) -> None:
    host = LabHost(old)
    host.refused = "LabForCausalLM: it was not tried"
    lab = Lab(host)
    facts = lab.call(wire.HelloCall()).facts
    assert facts is not None
    assert facts.refusal == host.refused
    assert error_of(lab.adopt(old)) == "IncompatibleModel"


def test_junk_is_answered(lab: Lab) -> None:
    answer = wire.decode_answer(lab.agent.answer("{"))
    assert (answer.number, error_of(answer)) == (0, "BadRequest")
