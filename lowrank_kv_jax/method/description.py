"""A table of the parts of something, as text and for a notebook."""

import dataclasses
import html
from collections.abc import Sequence

COLUMNS = ("part", "shape", "dtype", "kind", "layers", "slots used", "KiB")
NUMBERS = ("slots used", "KiB")


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` found: `print` shows it as text, a notebook as a table.

    Attributes:
        title: what it is.
        lines: a line for each part, in the order of `COLUMNS`.
        notes: what stands below.
    """

    title: str
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        table = [COLUMNS, *self.lines]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        shown = [
            "  ".join(cell.rjust(width) if name in NUMBERS else cell.ljust(width)
                      for cell, width, name in zip(line, widths, COLUMNS, strict=True)).rstrip()
            for line in table
        ]
        return "\n".join((self.title, *shown, *self.notes))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(
                f"<{tag} style='text-align: {'right' if name in NUMBERS else 'left'}'>{html.escape(cell)}</{tag}>"
                for cell, name in zip(cells, COLUMNS, strict=True)) + "</tr>"

        notes = "".join(f"<br>{html.escape(note)}" for note in self.notes)
        lines = "".join(row(line, "td") for line in self.lines)
        return f"<b>{html.escape(self.title)}</b><table>{row(COLUMNS, 'th')}{lines}</table>{notes.removeprefix('<br>')}"
