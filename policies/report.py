"""Tables for terminals and notebooks."""

import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table as RichTable
from rich.text import Text


def format_bytes(count: int | float) -> str:
    """`count` bytes in binary units with three significant digits: `1.50 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    raise AssertionError


def _split(path: str) -> tuple[str, str]:
    """A path before and after its last index: `stack.segments.0` and `attention.query`."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit() and i < len(parts) - 1), default=-1)
    return ".".join(parts[: last + 1]), ".".join(parts[last + 1 :])


class Table:
    """A small table that prints itself: plain text for `str`, HTML in a notebook, rich in a console.

    With `paths=True` the first column holds dotted paths, and rows under one index get a heading of their own.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        *,
        title: str = "",
        footer: str = "",
        paths: bool = False,
    ):
        self.columns = tuple(columns)
        self.rows = [tuple(str(cell) for cell in row) for row in rows]
        self.title = title
        self.footer = footer
        self.paths = paths

    def _shown(self) -> list[tuple[str, ...]]:
        """The rows, under headings where paths share one; what belongs under none is set apart."""
        split = [("", row[0]) if " " in row[0] or not self.paths else _split(row[0]) for row in self.rows]
        if not any(group for group, _ in split):
            return self.rows
        shown: list[tuple[str, ...]] = []
        heading = ""
        for (group, name), (_, *rest) in zip(split, self.rows, strict=True):
            if group != heading or not shown:
                heading = group
                shown.append((group or "elsewhere", *[""] * len(rest)))
            shown.append((f"  {name}", *rest))
        return shown

    def __rich__(self) -> RichTable | Group:
        table = RichTable(title=self.title or None, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
        for i, column in enumerate(self.columns):
            numeric = bool(self.rows) and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in self.rows)
            numeric &= not (self.paths and i == 0)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=i > 0)
        for row in self._shown():
            # Paths hold brackets now and then: text, not markup.
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        # Beside a narrow table a caption would be as narrow.
        return Group(table, Text(self.footer, style="dim italic")) if self.footer else table

    def __str__(self) -> str:
        # Wide enough for any path: text that is piped or logged must not lose columns to a narrow terminal.
        out = io.StringIO()
        Console(file=out, width=200, color_system=None, legacy_windows=False, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(c)}</th>" for c in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self._shown()
        )
        title = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        footer = f"<p>{html.escape(self.footer)}</p>" if self.footer else ""
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}"
