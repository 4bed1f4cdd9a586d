"""A version's side files: what is read from them, and what a hostile one gets."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from modelswap_engine.checkpoint.siderules import EMBEDDED, Rule, Verdict
from modelswap_engine.http.chat_template import ChatTemplate
from modelswap_engine.http.resources import VersionResources
from modelswap_engine.http.text_model import load_text_model
from modelswap_engine.protocol.errors import BadRequest, InvalidCheckpoint, NotReady, UnsupportedFormat
from modelswap_engine.protocol.messages import VersionRef


def applied(rules: tuple[Rule, ...]) -> bool:
    return any(rule.verdict is Verdict.APPLIED for rule in rules)


USER = [{"role": "user", "content": "hi"}]


def write_side_files(directory: Path, **files: Any) -> Path:
    """Write a byte-level tokenizer, and JSON or text files named by ``name`` or ``name__suffix``."""
    directory.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.enable_truncation(4)  # a file may say so; prompts must not be cut silently
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        stem, _, suffix = name.partition("__")
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{stem}.{suffix or 'json'}").write_text(text)
    return directory


def test_what_is_read(tmp_path: Path) -> None:
    text = load_text_model(
        write_side_files(
            tmp_path,
            config={"max_position_embeddings": 77, "eos_token_id": 9},
            generation_config={"eos_token_id": [0, 5], "do_sample": True, "temperature": 0.6, "top_k": 20},
            tokenizer_config={
                "eos_token": {"content": "<|end|>"},
                "chat_template": "{{ messages[0].content }}{{ eos_token }}",
            },
        )
    )
    assert text.context_length == 77
    assert text.eos == (0, 5)
    assert (text.defaults.temperature, text.defaults.top_k, text.defaults.top_p) == (0.6, 20, None)
    assert text.decode(text.encode("Grüße 🙂")) == "Grüße 🙂"
    assert text.encode_chat(USER) == (*text.encode("hi"), 0)


def test_where_the_template_and_the_special_tokens_come_from(tmp_path: Path) -> None:
    config = {"chat_template": "config", "bos_token": "<c>"}
    files: dict[str, Any] = {"tokenizer_config": config, "special_tokens_map": {"bos_token": "<m>", "sep_token": "<s>"}}
    files["chat_template"] = {"chat_template": "json {{ bos_token }}{{ sep_token }}"}
    text = load_text_model(write_side_files(tmp_path, **files))
    assert text.decode(text.encode_chat(USER)) == "json <c><s>"
    text = load_text_model(write_side_files(tmp_path, chat_template__jinja="jinja"))
    assert text.decode(text.encode_chat(USER)) == "jinja"


# A change of these files and keys is reported as applied, so it must change what a request gets.
@pytest.mark.parametrize("name", [name for name, rules in EMBEDDED.items() if applied(rules)])
def test_every_file_that_is_said_to_be_applied_is_read(tmp_path: Path, name: str) -> None:
    write_side_files(tmp_path)
    load_text_model(tmp_path)
    (tmp_path / name).write_bytes(b"\xff{")
    with pytest.raises(InvalidCheckpoint, match=name):
        load_text_model(tmp_path)


def test_fallbacks(tmp_path: Path) -> None:
    text = load_text_model(
        write_side_files(
            tmp_path,
            config={"text_config": {"max_position_embeddings": 33}, "eos_token_id": None},
            generation_config={"do_sample": False, "temperature": 0.6},
            tokenizer_config={"eos_token": "<|end|>"},
        )
    )
    assert text.context_length == 33
    assert text.eos == (0,)
    assert text.defaults.temperature is None
    with pytest.raises(BadRequest, match="no chat template"):
        text.encode_chat(USER)


def test_the_template_file_wins(tmp_path: Path) -> None:
    directory = write_side_files(tmp_path, tokenizer_config={"chat_template": "old"}, chat_template__jinja="new")
    text = load_text_model(directory)
    assert text.encode_chat(USER) == text.encode("new")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b'{"a": 1}'], ids=lambda c: repr(c[:8]))
def test_malformed_files_name_themselves(tmp_path: Path, name: str, content: bytes) -> None:
    directory = write_side_files(tmp_path)
    (directory / name).write_bytes(content)
    if content == b'{"a": 1}' and name != "tokenizer.json":
        load_text_model(directory)
        return
    with pytest.raises(InvalidCheckpoint, match=name):
        load_text_model(directory)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"tokenizer\.json"):
        load_text_model(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 'a' * 100000000 }}",
        "{{ 100000000 * 'a' }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('only users') }}",
        "{{ undefined_thing.attribute }}",
    ],
)
def test_hostile_templates_cost_one_bad_request(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, special_tokens={}).render(USER)
    assert "root:" not in caught.value.message


def test_templates_as_they_are_written_for_transformers_work() -> None:
    source = (
        "{%- for m in messages %}\n    {%- if loop.first %}{{ bos_token }}{% endif -%}\n"
        "{% generation %}{{ m.role }}:{{ m['content'] | trim }}{% endgeneration %}\n"
        "{%- if loop.index > 5 %}{% break %}{% endif %}{%- endfor %}"
        "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}{% if add_generation_prompt %}>{% endif %}"
    )
    out = ChatTemplate(source, special_tokens={"bos_token": "<s>"}).render([{"role": "user", "content": " x "}])
    assert out == '<s>user:x{"a": "<é>"}4>'


def test_a_template_that_does_not_compile_is_found_before_the_swap() -> None:
    with pytest.raises(InvalidCheckpoint, match="does not compile"):
        ChatTemplate("{% if %}", special_tokens={})


async def test_resources_keep_labels_and_forget_models(tmp_path: Path) -> None:
    resources = VersionResources()
    with pytest.raises(NotReady):
        resources.of("sha256:a")
    await resources.prepare("sha256:a", write_side_files(tmp_path / "a"))
    await resources.prepare("sha256:b", write_side_files(tmp_path / "b"))
    resources.activate(VersionRef(version="1.0", digest="sha256:a"))
    resources.activate(VersionRef(version="1.1", digest="sha256:b"))
    resources.discard("sha256:a")
    resources.discard("sha256:unknown")
    assert resources.label("sha256:a") == "1.0"
    assert resources.label("sha256:never") == ""
    assert resources.of("sha256:b").encode("x")
    with pytest.raises(NotReady):
        resources.of("sha256:a")
