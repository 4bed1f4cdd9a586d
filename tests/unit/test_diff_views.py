"""What a fine-tune changed, by layer, group and kind, as tables, JSON and pictures."""

import io
import json
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from modelswap_engine.checkpoint.groups import usual_groups
from modelswap_engine.checkpoint.places import Place, place
from modelswap_engine.cli import diff
from modelswap_engine.protocol.errors import BadRequest, SourceUnreadable
from tests.support.checkpoints import Tensor, write_checkpoint

app = typer.Typer()
diff.register(app)

BASE = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    *(
        f"model.layers.{layer}.{kind}"
        for layer in (0, 1, 10)
        for kind in (
            *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
            *(f"mlp.experts.{expert}.{part}_proj.weight" for expert in (0, 1) for part in ("gate", "up", "down")),
            "input_layernorm.weight",
        )
    ),
)
CHANGED = (
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.10.mlp.experts.1.up_proj.weight",
    "model.layers.10.input_layernorm.weight",
)


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def tensors(names: Iterable[str], *, changed: Iterable[str] = ()) -> dict[str, Tensor]:
    return {name: ("U8", (4,), bytes(3) + bytes([name in changed])) for name in names}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    old = write_checkpoint(tmp_path / "m-1.0", tensors(BASE))
    return old, write_checkpoint(tmp_path / "m-1.1", tensors(BASE, changed=CHANGED))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.layers.3.self_attn.q_proj.weight", ("model.layers", 3, "self_attn.q_proj", "weight")),
        ("transformer.h.11.attn.c_attn.bias", ("transformer.h", 11, "attn.c_attn", "bias")),
        ("model.layers.7.mlp.experts.12.w1.weight", ("model.layers", 7, "mlp.experts.w1", "weight")),
        ("model.layers.7.mlp.experts.gate_up_proj", ("model.layers", 7, "mlp.experts.gate_up_proj", "")),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", ("model.layers", 0, "mlp.up_proj", "weight_scale_inv")),
        ("0.weight", ("", 0, "weight", "")),
        ("lm_head.weight", ("", -1, "lm_head", "weight")),
        ("weight", ("", -1, "weight", "")),
        ("blocks.4", ("blocks", 4, "(unnamed)", "")),
        (f"a.{'9' * 5000}.b", ("", -1, f"a.{'9' * 5000}.b", "")),
        ("a.٣.b", ("", -1, "a.٣.b", "")),
    ],
)
def test_the_first_number_of_a_name_is_its_layer(name: str, where: tuple[str, int, str, str]) -> None:
    assert place(name) == Place(*where)


def test_groups_are_what_engines_usually_fuse() -> None:
    layer = "model.layers.0"
    found = usual_groups(name for name in BASE if name.startswith(f"{layer}."))
    assert {group.removeprefix(f"{layer}."): len(names) for group, names in found.items()} == {
        "self_attn.qkv_proj": 3,
        "self_attn.o_proj": 1,
        "mlp.experts.gate_up_proj": 4,
        "mlp.experts.down_proj": 2,
        "input_layernorm": 1,
    }
    quantised = ("l.0.up_proj.weight", "l.0.up_proj.weight_scale", "l.0.gate_proj.weight", "l.0.up_proj.bias")
    assert sorted(map(len, usual_groups(quantised).values())) == [1, 3]
    assert len(usual_groups(("seq.0.net.0.weight", "seq.0.net.2.weight"))) == 2, "only experts are numbered away"


def test_by_layer(folders: tuple[Path, Path]) -> None:
    lines = [line.split(maxsplit=10) for line in run(*folders, "--by", "layer").stdout.splitlines()]
    assert lines[1:3] == [
        ["1", "of", "11", "4", "B", "44", "B", "9.1", "%", "model.layers.0", "self_attn.v_proj"],
        ["2", "of", "11", "8", "B", "44", "B", "18.2", "%", "model.layers.10", "mlp.experts.up_proj, input_layernorm"],
    ]
    assert len(lines) == 4, "layer 1 is the same"


def test_by_group_shows_what_would_be_staged(folders: tuple[Path, Path]) -> None:
    lines = run(*folders, "--by", "group").stdout.splitlines()
    assert [line.split() for line in lines[1:-1]] == [
        ["1", "of", "3", "12", "B", "model.layers.0.self_attn.qkv_proj"],
        ["1", "of", "1", "4", "B", "model.layers.10.input_layernorm"],
        ["1", "of", "4", "16", "B", "model.layers.10.mlp.experts.gate_up_proj"],
    ]
    assert lines[-1] == "3 of 35 tensors differ, in 3 groups of 32 B; 12 B of 140 B would travel"


def test_json_has_layers_kinds_and_groups(folders: tuple[Path, Path]) -> None:
    found = json.loads(run(*folders, "-o", "json").stdout)
    assert [layer["number"] for layer in found["layers"]] == [None, 0, 1, 10]
    last = found["layers"][-1]
    assert (last["stack"], last["tensors"], last["changedTensors"], last["changedBytes"]) == ("model.layers", 11, 2, 8)
    kinds = {kind["kind"]: kind for kind in last["kinds"]}
    assert kinds["mlp.experts.up_proj"] == {
        "kind": "mlp.experts.up_proj",
        "family": "mlp",
        "tensors": 2,
        "changedTensors": 1,
        "bytes": 8,
        "changedBytes": 4,
    }
    assert [kind["family"] for kind in last["kinds"]] == ["attention"] * 4 + ["mlp"] * 3 + ["norms"]
    assert [kind["kind"][-6:-5] for kind in last["kinds"]][:4] == list("qkvo")
    assert sum(layer["bytes"] for layer in found["layers"]) == found["totalBytes"] == 140
    assert (found["groupBytes"], len(found["groups"])) == (32, 3)


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attrs}
        self.titles += [value or "" for name, value in attrs if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_sound_file_that_loads_and_runs_nothing(folders: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "d.html"
    assert run(*folders, "--picture", file).exit_code == 0
    text = file.read_text()
    page = _Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "What changes from m-1.0 to m-1.1" in text
    assert "layer 10, mlp.experts.up_proj: 1 of 2 tensors, 4 B of 8 B changed" in page.titles, (
        "each cell says what it is, for who sees no colours"
    )
    assert {"caption", "th"} <= set(page.tags)


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    name = "model.layers.0.<img src=x onerror=alert(1)>\"'"
    old, new = (write_checkpoint(tmp_path / n, {name: ("U8", (1,), n.encode())}) for n in "ab")
    assert run(old, new, "--picture", tmp_path / "d.html").exit_code == 0
    assert "img" not in _Page((tmp_path / "d.html").read_text()).tags


def test_the_picture_has_the_colours_of_its_legend_and_more_for_what_changed(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    def picture(old: Path, new: Path) -> dict[tuple[int, ...], int]:
        file = tmp_path / "d.png"
        result = run(old, new, "--picture", file)
        assert result.exit_code == 0, result.exception
        with Image.open(io.BytesIO(file.read_bytes())) as image:
            colours = image.convert("RGB").getcolors(1 << 20)
            assert colours is not None
            return {colour: count for count, colour in colours if isinstance(colour, tuple)}

    most, foreign = (8, 48, 107), (217, 95, 2)
    same, different = picture(folders[0], folders[0]), picture(*folders)
    assert different[most] > 5 * same[most], "two whole cells beside the legend's end"
    shorter = write_checkpoint(tmp_path / "shorter", tensors(BASE[:-1], changed=CHANGED))
    assert picture(folders[0], shorter)[foreign] > 1.5 * different[foreign]


@pytest.mark.parametrize("layers", [126, 300])
def test_deep_models_and_many_experts_fit(tmp_path: Path, layers: int) -> None:
    names = [f"m.layers.{i}.mlp.experts.{e}.w1.weight" for i in range(layers) for e in range(3)]
    old = write_checkpoint(tmp_path / "a", tensors(names))
    new = write_checkpoint(tmp_path / "b", tensors(names, changed=names[:5]))
    assert run(old, new, "--picture", tmp_path / "d.png").exit_code == 0
    with Image.open(tmp_path / "d.png") as image:
        assert image.height / 2 > 14 * layers, "a row stays as high as its label"


def test_a_picture_that_cannot_be_made(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(*folders, "--picture", tmp_path / "d.jpeg")
    assert isinstance(result.exception, BadRequest)
    assert ".html" in result.exception.advice
    assert isinstance(run(*folders, "--picture", tmp_path / "no" / "d.html").exception, SourceUnreadable)
    names = [f"m.{i}.w" for i in range(1001)]
    endless = write_checkpoint(tmp_path / "endless", tensors(names))
    assert isinstance(run(endless, endless, "--picture", tmp_path / "d.html").exception, BadRequest)
    monkeypatch.delitem(sys.modules, "modelswap_engine.cli.heatmap.png", raising=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = run(*folders, "--picture", tmp_path / "d.png")
    assert isinstance(result.exception, BadRequest)
    assert result.exception.advice == "pip install 'modelswap[pictures]'"
    assert not list(tmp_path.glob("d.*"))
