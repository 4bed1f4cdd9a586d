"""Changes in a YAML text that leave everything else as it was written, comments above all.

Pure: the text, which document of it, and what that document must say afterwards. It knows nothing of what they mean.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from modelswap_operator.cli.views import as_yaml


@dataclass(frozen=True, kw_only=True)
class Edit:
    """The text from start to end gives way to another."""

    start: int
    end: int
    text: str


def spliced(text: str, document: int, new: Any) -> str:
    """Return the text with one of its documents changed; where that cannot be spliced in, all are written anew."""
    node = list(yaml.compose_all(text, Loader=yaml.SafeLoader))[document]
    done = _applied(text, sorted(_edits(text, node, new), key=lambda edit: (edit.start, edit.end)))
    wanted = list(yaml.safe_load_all(text))
    wanted[document] = new
    with contextlib.suppress(yaml.YAMLError):
        if list(yaml.safe_load_all(done)) == wanted:
            return done
    return "---\n".join(as_yaml(thing) for thing in wanted if thing is not None)


def _applied(text: str, edits: list[Edit]) -> str:
    parts, at = [], 0
    for edit in edits:
        parts += [text[at : edit.start], edit.text]
        at = max(at, edit.end)
    return "".join([*parts, text[at:]])


def _edits(text: str, node: yaml.Node, new: Any) -> Iterator[Edit]:
    old = _value(node)
    if old == new:
        return
    if isinstance(node, yaml.MappingNode) and isinstance(new, dict) and not node.flow_style and node.value:
        yield from _in_mapping(text, node, old, new)
    elif isinstance(node, yaml.SequenceNode) and isinstance(new, list) and not node.flow_style and _grown(old, new):
        for item, wanted in zip(node.value, new, strict=False):
            yield from _edits(text, item, wanted)
        yield from _added(text, node, new[len(old) :])
    else:
        yield Edit(start=node.start_mark.index, end=_gone(text, node), text=_inline(new, node.start_mark.column))


def _in_mapping(text: str, node: yaml.MappingNode, old: dict[Any, Any], new: dict[Any, Any]) -> Iterator[Edit]:
    for index, (key, value) in enumerate(node.value):
        name = _value(key)
        if name not in new:
            end = _line_end(text, _end(value))
            start = key.start_mark.index if index == 0 else _line_start(text, key.start_mark.index)
            # The first key may stand behind a dash: the next one takes its place there.
            end = node.value[1][0].start_mark.index if index == 0 and len(node.value) > 1 else end
            yield Edit(start=start, end=end, text="")
        elif _block(value) and _kind(new[name]) is type(value) and new[name]:
            yield from _edits(text, value, new[name])
        elif old[name] != new[name]:
            between = _between(new[name], key.start_mark.column)
            yield Edit(start=key.end_mark.index, end=_gone(text, value), text=f":{between}")
    yield from _added(text, node, {name: value for name, value in new.items() if name not in old})


def _added(text: str, node: yaml.CollectionNode, more: Any) -> Iterator[Edit]:
    if more:
        at = _line_end(text, _end(node))
        broken = "" if at == 0 or text[at - 1] == "\n" else "\n"
        yield Edit(start=at, end=at, text=broken + _indented(as_yaml(more), node.start_mark.column))


def _grown(old: list[Any], new: list[Any]) -> bool:
    """Say whether the first items are the same ones, changed or not; others are better written anew."""
    return len(old) <= len(new) and all(
        a == b or _named(a) == _named(b) is not None for a, b in zip(old, new, strict=False)
    )


def _named(item: Any) -> Any:
    return item.get("name") if isinstance(item, dict) else None


def _between(value: Any, column: int) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + _indented(as_yaml(value), column + 2).rstrip("\n")
    return " " + _inline(value, column)


def _inline(value: Any, column: int) -> str:
    if isinstance(value, dict | list) and value:
        return _indented(as_yaml(value), column).strip()
    return str(as_yaml([value])).removeprefix("- ").rstrip("\n")


def _indented(text: str, column: int) -> str:
    return "".join(" " * column + line for line in text.splitlines(keepends=True))


def _block(node: yaml.Node) -> bool:
    return isinstance(node, yaml.CollectionNode) and not node.flow_style and bool(node.value)


def _kind(value: Any) -> type[yaml.Node]:
    if isinstance(value, dict):
        return yaml.MappingNode
    return yaml.SequenceNode if isinstance(value, list) else yaml.ScalarNode


def _value(node: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_document(node)


def _end(node: yaml.Node) -> int:
    """Return where a node's own text ends; the parser's mark of a block stands behind the comments that follow it."""
    while _block(node):
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)


def _gone(text: str, node: yaml.Node) -> int:
    """Return where what is written anew ends: what is said behind a list's last line is said of its old items."""
    if isinstance(node, yaml.ScalarNode):
        return _end(node)
    at = _line_end(text, _end(node))
    return at - 1 if text[at - 1] == "\n" else at


def _line_start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _line_end(text: str, at: int) -> int:
    """Return the beginning of the next line; a place at a beginning is one itself, as after a block scalar."""
    if at and text[at - 1] == "\n":
        return at
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1
