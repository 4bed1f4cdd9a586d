"""What a picture of a difference says: its words, figures and colours, so that a PNG and a page show the same.

It knows neither form.
"""

from dataclasses import dataclass
from typing import Final

from modelswap_engine.checkpoint.grid import OUTSIDE, Count, Grid, Kind, Row, total
from modelswap_engine.checkpoint.rules import shown
from modelswap_engine.cli.render import size

Colour = tuple[int, int, int]

UNCHANGED: Final[Colour] = (241, 241, 238)
FOREIGN: Final[Colour] = (217, 95, 2)
_LEAST: Final[Colour] = (190, 218, 240)
_MOST: Final[Colour] = (8, 48, 107)
_DARK: Final = 0.4
LEGEND: Final = (
    "Colour and figure: share of the bytes that lie in changed tensors, in percent. "
    "No box: the layer has no such tensor"
)
FOREIGN_LEGEND: Final = "tensors added, removed, reshaped or of another dtype"
UNCHANGED_LEGEND: Final = "unchanged"
TICKS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn.

    Attributes:
        old: name of the first checkpoint, for people.
        new: name of the second one.
        grid: what differs.
        side_files: which side files differ.
    """

    old: str
    new: str
    grid: Grid
    side_files: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The first line."""
        return f"What changes from {shown(self.old, 60)} to {shown(self.new, 60)}"

    @property
    def summary(self) -> str:
        """The second line."""
        every = total(self.grid.cells.values())
        text = f"{every.changed} of {every.tensors} tensors, {size(every.changed_bytes)} of {size(every.nbytes)}"
        return f"{text}; side files: {shown(', '.join(self.side_files), 120)}" if self.side_files else text

    @property
    def rows(self) -> tuple[Row, ...]:
        """The layers."""
        return tuple(row for row in self.grid.rows if row.layer >= 0)

    @property
    def columns(self) -> tuple[Kind, ...]:
        """The kinds that layers have."""
        return tuple(kind for kind in self.grid.kinds if kind.family != OUTSIDE)

    @property
    def outside(self) -> tuple[tuple[Kind, Count], ...]:
        """What is in no layer."""
        return tuple(found for row in self.grid.rows if row.layer < 0 for found in self.grid.kinds_of(row))


def colour(count: Count) -> Colour:
    """Return the colour of a cell: one of its own for no change, else from light to dark."""
    if not count.changed:
        return UNCHANGED
    return scale(count.share)


def scale(share: float) -> Colour:
    """Return the colour of a share above 0."""
    red, green, blue = (round(low + (high - low) * share) for low, high in zip(_LEAST, _MOST, strict=True))
    return red, green, blue


def light_text(count: Count) -> bool:
    """Say whether text on the colour of a cell must be light."""
    return count.changed > 0 and count.share > _DARK


def percent(count: Count) -> str:
    """Return the share in whole percent; only no change is 0, only all is 100."""
    if not count.changed:
        return "0"
    value = 100 * count.share
    return "<1" if value < 1 else ">99" if 99 < value < 100 else f"{value:.0f}"


def facts(count: Count) -> str:
    """Return what is said of a cell in words."""
    text = f"{count.changed} of {count.tensors} tensors, {size(count.changed_bytes)} of {size(count.nbytes)} changed"
    return f"{text}; {count.foreign} {FOREIGN_LEGEND.removeprefix('tensors ')}" if count.foreign else text


def clipped(text: str, limit: int) -> str:
    """Return a label that fits: the end of a name tells more than its beginning."""
    safe = shown(text, 2000)
    return safe if len(safe) <= limit else f"…{safe[1 - limit :]}"
