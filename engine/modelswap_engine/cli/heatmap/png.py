"""The picture as a PNG, by pillow and its own font: the same on every machine."""

import io
from dataclasses import dataclass
from functools import cache
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from modelswap_engine.checkpoint.grid import Count, Kind, Row
from modelswap_engine.cli.heatmap.picture import (
    FOREIGN,
    FOREIGN_LEGEND,
    LEGEND,
    TICKS,
    UNCHANGED,
    UNCHANGED_LEGEND,
    Colour,
    Picture,
    clipped,
    colour,
    light_text,
    percent,
    scale,
)
from modelswap_engine.cli.render import size

_SCALE: Final = 2
"""Pixels for one unit of the layout, for screens and paper of today."""
_MARGIN: Final = 24
_CELL: Final = 40
_GAP: Final = 1
_MANY: Final = 48
_HIGH, _LOW = 19, 14
"""Height of a row: with few layers, with many."""
_FAMILY_GAP: Final = 10
_SUMS: Final = 90
_SCALE_LEFT, _SCALE_WIDTH = 100, 200
_INK: Final[Colour] = (27, 27, 27)
_GREY: Final[Colour] = (110, 110, 110)
_PAPER: Final[Colour] = (255, 255, 255)
_LABEL_LENGTH: Final = 34
_STACK_HEIGHT: Final = 24


@cache
def _font(height: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=height * _SCALE)


def _width(text: str, height: int) -> int:
    return round(_font(height).getlength(text) / _SCALE + 0.5)


def _line(text: str) -> str:
    """Return a text in what the built-in font can show."""
    return text.replace("…", "...")


@dataclass(frozen=True)
class _Layout:
    """Where things are, in units of the layout."""

    columns: dict[Kind, int]
    left: int
    head: int
    top: int
    row_height: int
    width: int
    height: int


def png(picture: Picture) -> bytes:
    """Return the file."""
    layout = _layout(picture)
    image = Image.new("RGB", (layout.width * _SCALE, layout.height * _SCALE), _PAPER)
    pen = _Pen(image)
    pen.text((_MARGIN, _MARGIN), picture.title, height=18)
    pen.text((_MARGIN, _MARGIN + 27), picture.summary, height=13, ink=_GREY)
    _legend(pen, _MARGIN + 58)
    bottom = layout.top
    if picture.rows:
        _heads(pen, picture, layout)
        bottom = _layers(pen, picture, layout)
    _outside(pen, picture, layout, top=bottom)
    out = io.BytesIO()
    image.save(out, format="PNG", optimize=True)
    return out.getvalue()


class _Pen:
    """Draws in units of the layout."""

    def __init__(self, image: Image.Image) -> None:
        self._image, self._draw = image, ImageDraw.Draw(image)

    def text(self, at: tuple[int, int], text: str, *, height: int = 11, ink: Colour = _INK, anchor: str = "la") -> None:
        self._draw.text((at[0] * _SCALE, at[1] * _SCALE), _line(text), font=_font(height), fill=ink, anchor=anchor)

    def upwards(self, at: tuple[int, int], text: str, *, height: int = 11) -> None:
        """Write from a point at the bottom upwards."""
        line = _line(text)
        high = (height + 5) * _SCALE
        strip = Image.new("RGB", (_width(line, height) * _SCALE + _SCALE, high), _PAPER)
        ImageDraw.Draw(strip).text((0, high // 2), line, font=_font(height), fill=_INK, anchor="lm")
        turned = strip.rotate(90, expand=True)
        self._image.paste(turned, (at[0] * _SCALE - turned.width // 2, at[1] * _SCALE - turned.height))

    def line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        self._draw.line([(x * _SCALE, y * _SCALE) for x, y in (start, end)], fill=_GREY, width=_SCALE)

    def box(self, at: tuple[int, int], extent: tuple[int, int], fill: Colour) -> None:
        x, y = at[0] * _SCALE, at[1] * _SCALE
        self._draw.rectangle((x, y, x + extent[0] * _SCALE - 1, y + extent[1] * _SCALE - 1), fill=fill)

    def frame(self, at: tuple[int, int], extent: tuple[int, int], ink: Colour) -> None:
        x, y = at[0] * _SCALE, at[1] * _SCALE
        corner = (x + extent[0] * _SCALE - 1, y + extent[1] * _SCALE - 1)
        self._draw.rectangle((x, y, *corner), outline=ink, width=2 * _SCALE)

    def cell(self, at: tuple[int, int], count: Count, *, height: int) -> None:
        extent = (_CELL - _GAP, height - _GAP)
        self.box(at, extent, colour(count))
        if count.foreign:
            self.frame(at, extent, FOREIGN)
        if count.changed:
            ink = _PAPER if light_text(count) else _INK
            middle = (at[0] + extent[0] // 2, at[1] + extent[1] // 2)
            self.text(middle, percent(count), height=10 if height > _LOW else 9, ink=ink, anchor="mm")


def _layout(picture: Picture) -> _Layout:
    columns = {}
    left = x = _MARGIN + 56
    family = ""
    for kind in picture.columns:
        x += _FAMILY_GAP if family not in ("", kind.family) else 0
        family = kind.family
        columns[kind] = x
        x += _CELL
    labels = [_width(_line(_label(kind)), 11) for kind in picture.columns]
    head = _MARGIN + 130
    top = head + 30 + max(labels, default=0) if picture.rows else head
    row_height = _HIGH if len(picture.rows) <= _MANY else _LOW
    stacks = len({row.stack for row in picture.rows})
    below = (len(picture.outside) + 2) * (_HIGH + 1) if picture.outside else 0
    legend = _SCALE_LEFT + _SCALE_WIDTH + 40 + _CELL + 8 + _width(FOREIGN_LEGEND, 10)
    words = max(_width(picture.title, 18), _width(picture.summary, 13), _width(LEGEND, 12), legend)
    return _Layout(
        columns=columns,
        left=left,
        head=head,
        top=top,
        row_height=row_height,
        width=max(x + _SUMS, _MARGIN + words) + _MARGIN,
        height=top + stacks * _STACK_HEIGHT + len(picture.rows) * row_height + below + _MARGIN,
    )


def _legend(pen: _Pen, top: int) -> None:
    pen.text((_MARGIN, top), LEGEND, height=12)
    top += 20
    pen.box((_MARGIN, top), (_CELL, 14), UNCHANGED)
    pen.text((_MARGIN, top + 18), UNCHANGED_LEGEND, height=10)
    left, wide = _MARGIN + _SCALE_LEFT, _SCALE_WIDTH
    for step in range(wide):
        pen.box((left + step, top), (1, 14), scale((step + 1) / wide))
    for share in TICKS:
        text = ">0 %" if share == 0 else f"{share:.0%}".replace("%", " %")
        pen.text((left + round(share * wide), top + 18), text, height=10, anchor="ma")
    left += wide + 40
    pen.frame((left, top), (_CELL, 14), FOREIGN)
    pen.text((left + _CELL + 8, top + 7), FOREIGN_LEGEND, height=10, anchor="lm")


def _heads(pen: _Pen, picture: Picture, layout: _Layout) -> None:
    families: dict[str, list[int]] = {}
    for kind, x in layout.columns.items():
        pen.upwards((x + _CELL // 2, layout.top - 4), _label(kind))
        families.setdefault(kind.family, []).append(x)
    for family, xs in families.items():
        pen.text((xs[0], layout.head), family, height=12)
        pen.line((xs[0], layout.head + 18), (xs[-1] + _CELL - _GAP, layout.head + 18))
    pen.text((_sums(layout), layout.top - 4), "changed", height=11, anchor="rd")
    if len({row.stack for row in picture.rows}) == 1:
        pen.text((layout.left - 8, layout.top - 4), "layer", height=11, anchor="rd")


def _layers(pen: _Pen, picture: Picture, layout: _Layout) -> int:
    y, stack = layout.top, None
    small = 11 if layout.row_height > _LOW else 10
    for row in picture.rows:
        if row.stack != stack:
            stack = row.stack
            pen.text((_MARGIN, y + _STACK_HEIGHT - 4), clipped(stack, 60), height=11, ink=_GREY, anchor="ld")
            y += _STACK_HEIGHT
        _row(pen, picture, row, layout, y=y, letters=small)
        y += layout.row_height
    return y


def _row(pen: _Pen, picture: Picture, row: Row, layout: _Layout, *, y: int, letters: int) -> None:
    middle = y + layout.row_height // 2
    pen.text((layout.left - 8, middle), str(row.layer), height=letters, anchor="rm")
    for kind, count in picture.grid.kinds_of(row):
        pen.cell((layout.columns[kind], y), count, height=layout.row_height)
    changed = picture.grid.row(row).changed_bytes
    if changed:
        pen.text((_sums(layout), middle), size(changed), height=letters, anchor="rm")


def _outside(pen: _Pen, picture: Picture, layout: _Layout, *, top: int) -> None:
    if not picture.outside:
        return
    y = top + _HIGH
    pen.text((_MARGIN, y), "outside layers", height=12)
    for kind, count in picture.outside:
        y += _HIGH + 1
        pen.cell((layout.left, y), count, height=_HIGH)
        words = f"{_label(kind)}   {size(count.changed_bytes)} of {size(count.nbytes)}"
        pen.text((layout.left + _CELL + 8, y + _HIGH // 2), words, height=11, anchor="lm")


def _sums(layout: _Layout) -> int:
    return max(layout.columns.values(), default=layout.left) + _CELL + _SUMS - 10


def _label(kind: Kind) -> str:
    return clipped(kind.name, _LABEL_LENGTH)
