"""Writes the picture of a difference to a file, whose name says in which form; the form's package is imported then."""

from pathlib import Path
from typing import Final

from modelswap_engine.cli.files import write_whole
from modelswap_engine.cli.heatmap.picture import Picture
from modelswap_engine.cli.host_options import needs
from modelswap_engine.protocol.errors import BadRequest

_MAX_ROWS: Final = 1000
_MAX_COLUMNS: Final = 100


def write_picture(picture: Picture, path: Path) -> None:
    """Draw into a file: ``.png`` or ``.html``.

    Raises:
        BadRequest: another form, a package that is missing, or more layers than a picture can show.
        SourceUnreadable: the file cannot be written.
    """
    if len(picture.rows) > _MAX_ROWS or len(picture.columns) > _MAX_COLUMNS or len(picture.outside) > _MAX_ROWS:
        raise BadRequest(
            f"a picture shows at most {_MAX_ROWS} layers and {_MAX_COLUMNS} kinds of tensor, "
            f"here are {len(picture.rows)} and {len(picture.columns)}",
            advice="look at: modelswap diff A B --by layer",
        )
    form = path.suffix.lower()
    if form == ".html":
        from modelswap_engine.cli.heatmap.page import page

        write_whole(path, page(picture).encode())
    elif form == ".png":
        try:
            from modelswap_engine.cli.heatmap.png import png
        except ModuleNotFoundError as error:
            raise needs("diff --picture FILE.png", error, extra="pictures") from None
        write_whole(path, png(picture))
    else:
        raise BadRequest(
            f"{path}: neither .png nor .html, so the form of the picture is not known",
            advice="name a file that ends with .png or .html",
        )
