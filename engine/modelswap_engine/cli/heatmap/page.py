"""The picture as a page: one file, nothing loaded from elsewhere, no script; tables that a screen reader can read."""

from collections.abc import Iterator
from html import escape

from modelswap_engine.checkpoint.grid import Count, Kind, Row
from modelswap_engine.cli.heatmap.picture import (
    FOREIGN_LEGEND,
    LEGEND,
    TICKS,
    UNCHANGED_LEGEND,
    Picture,
    clipped,
    colour,
    facts,
    light_text,
    percent,
)
from modelswap_engine.cli.render import size

_STYLE = """
:root { color-scheme: light; }
body { font: 14px/1.4 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 2rem; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; }
p { margin: .2rem 0 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 2px; margin: 0 0 1.5rem; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th { font-weight: 400; text-align: right; padding: 0 .5rem 0 0; white-space: nowrap; }
thead th { vertical-align: bottom; text-align: left; padding: 0; }
thead th[scope=colgroup] { border-bottom: 1px solid #8a8a8a; font-weight: 600; }
thead th[scope=col] span { display: inline-block; writing-mode: vertical-rl; transform: rotate(180deg); }
tbody th[scope=rowgroup] { text-align: left; font-weight: 600; padding-top: .5rem; }
td { min-width: 2.6rem; height: 1.25rem; text-align: center; font-size: 11px; font-variant-numeric: tabular-nums; }
td.sum { text-align: right; padding-left: .8rem; white-space: nowrap; font-size: 12px; }
.foreign { outline: 2px solid #d95f02; outline-offset: -2px; }
.legend td { min-width: 2.6rem; }
.legend td.words { padding: 0 1rem 0 .3rem; font-size: 12px; text-align: left; }
""".strip()


def page(picture: Picture) -> str:
    """Return the page."""
    return "\n".join(_lines(picture))


def _lines(picture: Picture) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    # Names come from files of others; whatever slips through as markup must load and run nothing.
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(picture.title)}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{escape(picture.title)}</h1><p>{escape(picture.summary)}</p>"
    yield from _legend()
    if picture.rows:
        yield from _layers(picture)
    if picture.outside:
        yield from _outside(picture)
    yield "</body></html>\n"


def _legend() -> Iterator[str]:
    yield f'<table class="legend"><caption>{LEGEND}</caption><tbody><tr>'
    yield _cell(Count(tensors=1), text="0")
    yield f'<td class="words">{UNCHANGED_LEGEND}</td>'
    for share in TICKS[1:]:
        parts = round(share * 100)
        yield _cell(Count(tensors=1, changed=1, nbytes=100, changed_bytes=parts), text=f"{parts}")
    yield '<td class="words"></td>'
    yield '<td class="foreign"></td>'
    yield f'<td class="words">{FOREIGN_LEGEND}</td></tr></tbody></table>'


def _layers(picture: Picture) -> Iterator[str]:
    columns = picture.columns
    yield '<div class="scroll"><table><caption>Layers (down) and kinds of tensor (across)</caption><thead><tr><td></td>'
    families = list(dict.fromkeys(kind.family for kind in columns))
    for family in families:
        width = sum(kind.family == family for kind in columns)
        yield f'<th scope="colgroup" colspan="{width}">{family}</th>'
    yield "<td></td></tr><tr><td></td>"
    for kind in columns:
        yield f'<th scope="col" title="{escape(kind.name)}"><span>{_label(kind)}</span></th>'
    yield '<th scope="col"><span>changed in the layer</span></th></tr></thead><tbody>'
    stack = None
    for row in picture.rows:
        if row.stack != stack:
            stack = row.stack
            label = escape(clipped(stack, 80))
            yield f'<tr><th scope="rowgroup" colspan="{len(columns) + 2}">{label}</th></tr>'
        yield _row(picture, row, columns)
    yield "</tbody></table></div>"


def _row(picture: Picture, row: Row, columns: tuple[Kind, ...]) -> str:
    cells = []
    for kind in columns:
        count = picture.grid.cells.get((row, kind))
        where = f"layer {row.layer}, {kind.name}"
        cells.append(_cell(count, where=where) if count is not None else "<td></td>")
    whole = picture.grid.row(row)
    summed = f'<td class="sum" title="{escape(facts(whole))}">{size(whole.changed_bytes)}</td>'
    return f'<tr><th scope="row">{row.layer}</th>{"".join(cells)}{summed}</tr>'


def _outside(picture: Picture) -> Iterator[str]:
    yield "<table><caption>Outside layers</caption><tbody>"
    for kind, count in picture.outside:
        yield f'<tr>{_cell(count, where=kind.name)}<th scope="row">{_label(kind)}</th>'
        yield f'<td class="sum">{size(count.changed_bytes)}</td></tr>'
    yield "</tbody></table>"


def _cell(count: Count, *, text: str = "", where: str = "") -> str:
    red, green, blue = colour(count)
    ink = "#fff" if light_text(count) else "#1b1b1b"
    title = f' title="{escape(f"{where}: {facts(count)}")}"' if where else ""
    mark = ' class="foreign"' if count.foreign else ""
    style = f"background:rgb({red},{green},{blue});color:{ink}"
    return f'<td{mark}{title} style="{style}">{escape(text or percent(count))}</td>'


def _label(kind: Kind) -> str:
    return escape(clipped(kind.name, 60))
