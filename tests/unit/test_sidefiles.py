"""Side files: what counts for the digest, and what a change means for the embedded engine."""

import json
from typing import Any

import pytest

from modelswap_engine.checkpoint.canonical import SIDE_FILES, VOLATILE_KEYS, architecture_of, side_file
from modelswap_engine.checkpoint.sidefiles import compare_side_files, refusals
from modelswap_engine.checkpoint.siderules import EMBEDDED, Verdict
from modelswap_engine.protocol.errors import IncompatibleModel, UnsupportedChange

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "eos_token_id": 2,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rms_norm_eps": 1e-05, "dtype": "bfloat16",
    "transformers_version": "5.24.0",
}  # fmt: skip


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def canonical(name: str, data: bytes) -> str:
    return side_file(name, data).canonical_sha256


@pytest.mark.parametrize(
    "other",
    [
        CONFIG | {"transformers_version": "6.0.0"},
        CONFIG | {"_name_or_path": "somewhere/else", "_commit_hash": "abc"},
        dict(reversed(CONFIG.items())),
        CONFIG | {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {key: value for key, value in CONFIG.items() if key != "dtype"} | {"torch_dtype": "bfloat16"},
        CONFIG | {"torch_dtype": "bfloat16"},
    ],
    ids=["transformers_version", "path", "order", "integral float", "old dtype name", "both dtype names"],
)
def test_what_every_save_changes_does_not_count(other: dict[str, Any]) -> None:
    assert canonical("config.json", text(other)) == canonical("config.json", text(CONFIG))
    assert compare_side_files({"config.json": text(CONFIG)}, {"config.json": text(other)}) == ()


@pytest.mark.parametrize(
    "other",
    [
        CONFIG | {"rms_norm_eps": 1e-06},
        CONFIG | {"torch_dtype": "float32"},
        CONFIG | {"eos_token_id": None},
        CONFIG | {"eos_token_id": [2]},
        CONFIG | {"hidden_size": True},
        CONFIG | {"new_key": 0},
    ],
)
def test_everything_else_counts(other: dict[str, Any]) -> None:
    assert canonical("config.json", text(other)) != canonical("config.json", text(CONFIG))
    assert compare_side_files({"config.json": text(CONFIG)}, {"config.json": text(other)})


def test_volatile_keys_are_dropped_inside_nested_configurations_but_not_inside_a_vocabulary() -> None:
    nested = {"text_config": {"hidden_size": 1, "transformers_version": "1"}}
    assert canonical("config.json", text(nested)) == canonical("config.json", text({"text_config": {"hidden_size": 1}}))
    assert canonical("tokenizer.json", text({"transformers_version": 7})) != canonical("tokenizer.json", text({}))


def test_numbers_that_json_readers_disagree_on_keep_their_meaning() -> None:
    assert canonical("config.json", b'{"n": 9007199254740993}') != canonical("config.json", b'{"n": 9007199254740992}')
    assert canonical("config.json", b'{"n": true}') != canonical("config.json", b'{"n": 1}')
    assert canonical("config.json", b'{"limit": [0.0, Infinity]}') == canonical(
        "config.json", b'{"limit":[0,Infinity]}'
    )


def test_files_that_are_not_json_count_by_their_bytes() -> None:
    assert canonical("merges.txt", b"a b\n") != canonical("merges.txt", b"a b")
    entry = side_file("chat_template.jinja", b"{{ x }}")
    assert (entry.size, entry.canonical_sha256) == (7, entry.sha256)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, "LlamaForCausalLM"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"architectures": [], "model_type": "gpt2"}, "gpt2"),
        ({"architectures": [3]}, ""),
        ({}, ""),
    ],
)
def test_architecture(config: dict[str, Any], expected: str) -> None:
    assert architecture_of({"config.json": text(config)}) == expected


def test_no_config_no_architecture() -> None:
    assert architecture_of({}) == ""


def judged(file: str, key: str, old: Any = 1, new: Any = 2) -> Verdict:
    (change,) = compare_side_files({file: text({key: old})}, {file: text({key: new})})
    assert (change.file, change.key) == (file, key)
    return change.verdict


@pytest.mark.parametrize(
    ("file", "key", "verdict"),
    [
        ("config.json", "eos_token_id", Verdict.APPLIED),
        ("config.json", "initializer_range", Verdict.IGNORED),
        ("config.json", "attention_dropout", Verdict.IGNORED),
        ("config.json", "rope_theta", Verdict.REFUSED),
        ("config.json", "rms_norm_eps", Verdict.REFUSED),
        ("config.json", "max_position_embeddings", Verdict.REFUSED),
        ("config.json", "never_heard_of", Verdict.REFUSED),
        ("generation_config.json", "temperature", Verdict.APPLIED),
        ("generation_config.json", "repetition_penalty", Verdict.REFUSED),
        ("tokenizer_config.json", "chat_template", Verdict.APPLIED),
        ("generation_config.json", "max_length", Verdict.REFUSED),
        ("generation_config.json", "pad_token_id", Verdict.IGNORED),
        ("config.json", "bos_token_id", Verdict.IGNORED),
        ("tokenizer_config.json", "eos_token", Verdict.APPLIED),
        ("tokenizer_config.json", "add_bos_token", Verdict.REFUSED),
        ("tokenizer_config.json", "model_max_length", Verdict.IGNORED),
        ("tokenizer_config.json", "tokenizer_class", Verdict.IGNORED),
        ("vocab.json", "", Verdict.IGNORED),
        ("added_tokens.json", "", Verdict.IGNORED),
        ("special_tokens_map.json", "", Verdict.APPLIED),
        ("chat_template.json", "", Verdict.APPLIED),
        ("preprocessor_config.json", "", Verdict.REFUSED),
        ("tokenizer.json", "", Verdict.APPLIED),
    ],
)
def test_verdicts_of_the_embedded_engine(file: str, key: str, verdict: Verdict) -> None:
    if key:
        assert judged(file, key) is verdict
        return
    (change,) = compare_side_files({file: text({"a": 1})}, {file: text({"a": 2})})
    assert (change.key, change.verdict) == ("", verdict)


def test_every_side_file_has_rules_that_end_with_a_catch_all() -> None:
    assert EMBEDDED.keys() == SIDE_FILES
    assert all(rules[-1].keys == ("*",) for rules in EMBEDDED.values())
    assert VOLATILE_KEYS.keys() <= SIDE_FILES


def test_nested_keys_are_named_by_their_path() -> None:
    changed = CONFIG | {"rope_parameters": {"rope_theta": 5.5, "rope_type": "default"}}
    (change,) = compare_side_files({"config.json": text(CONFIG)}, {"config.json": text(changed)})
    assert change.key == "rope_parameters.rope_theta"
    (error,) = refusals([change], continues_requests=False)
    assert isinstance(error, UnsupportedChange)
    assert "rope_parameters.rope_theta" in error.message
    assert "cold restart" in error.advice


@pytest.mark.parametrize(
    "key", ["hidden_size", "architectures", "num_hidden_layers", "vocab_size", "quantization_config"]
)
def test_another_model_is_incompatible(key: str) -> None:
    changes = compare_side_files({"config.json": text({key: 1})}, {"config.json": text({key: 2})})
    (error,) = refusals(changes, continues_requests=False)
    assert isinstance(error, IncompatibleModel)
    assert error.details == {"file": "config.json", "key": key}


def test_a_file_that_appears_or_disappears_is_a_change() -> None:
    for live, target in (({}, {"chat_template.jinja": b"x"}), ({"chat_template.jinja": b"x"}, {})):
        (change,) = compare_side_files(live, target)
        assert (change.file, change.verdict, change.interrupts) == ("chat_template.jinja", Verdict.APPLIED, True)
    assert {c.key for c in compare_side_files({}, {"generation_config.json": text({"top_k": 1, "top_p": 1})})} == {
        "top_k",
        "top_p",
    }


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
    ],
)
def test_tokenizer_template_and_eos_stop_modes_that_continue_requests(file: str, key: str) -> None:
    changes = compare_side_files({file: text({key: 1})}, {file: text({key: 2})})
    assert refusals(changes, continues_requests=False) == ()
    (error,) = refusals(changes, continues_requests=True)
    assert isinstance(error, UnsupportedChange)
    assert "Drain" in error.advice


def test_sampling_defaults_do_not_stop_any_mode() -> None:
    changes = compare_side_files(
        {"generation_config.json": text({"temperature": 1})}, {"generation_config.json": text({"temperature": 0.5})}
    )
    assert changes
    assert refusals(changes, continues_requests=True) == ()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("name", sorted(SIDE_FILES))
def test_servers_of_others_take_no_change_of_a_side_file_live(kind: str, name: str) -> None:
    changes = compare_side_files({name: b'{"x": 1}'}, {name: b'{"x": 2}'}, kind=kind)

    assert [change.verdict for change in changes] == [Verdict.REFUSED]
    assert "only when it starts" in refusals(changes, continues_requests=False)[0].message


@pytest.mark.parametrize("key", ["initializer_range", "use_cache"])
def test_servers_of_others_do_not_mind_what_inference_does_not_read(key: str) -> None:
    changes = compare_side_files({"config.json": b"{}"}, {"config.json": text({key: 0.1})}, kind="vllm")

    assert refusals(changes, continues_requests=True) == ()
