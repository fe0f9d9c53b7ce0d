"""Tables and progress in the terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_WIDTH = 120  # columns where the output is no terminal
SHORT, WORD = 12, 20  # characters of a cell, and of a word of one, that are not broken


def number(value: Any, digits: int = 3) -> str:
    """A figure for a table; a dash where there is none."""
    if value is None or value == "":
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def interval(low: Any, high: Any, digits: int = 3) -> str:
    return f"[{number(low, digits)}, {number(high, digits)}]"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print to stdout, wide enough for a file or a pipe too; nameless columns get no header."""
    cells = [[str(cell) for cell in row] for row in rows]
    texts = list(zip(columns, *cells, strict=True))
    whole = [_longest(column) for column in texts]
    least = [
        _longest(
            [
                *title.split(),
                *(cell for cell in column if len(cell) <= SHORT),
                *(word for cell in column for word in cell.split() if len(word) <= WORD),
            ]
        )
        for title, *column in texts
    ]
    lines = 3 * len(columns) + 1  # the table's own and a space on both sides of each
    width = None if sys.stdout.isatty() else max(PLAIN_WIDTH, sum(least) + lines)
    console = Console(width=width)
    widths = _widths(whole, least, console.width - lines)
    table = Table(show_header=any(columns))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, overflow="fold", width=width)
    for row in cells:
        table.add_row(*row)
    console.print(title, markup=False, highlight=False)
    console.print(table)


def _longest(texts: Sequence[str]) -> int:
    return max(map(cell_len, texts), default=1) or 1


def _widths(whole: Sequence[int], least: Sequence[int], room: int) -> Sequence[int | None]:
    """The columns' widths: the widest give way first and none below its least, so that figures and
    short words stay whole; None in a terminal that is too narrow for these."""
    if sum(least) > room:
        return [None] * len(whole)
    widths = list(whole)
    while sum(widths) > room:
        loose = [c for c in range(len(widths)) if widths[c] > least[c]]
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


@contextmanager
def progress(description: str, total: int) -> Iterator[Any]:
    """A bar on stderr, on a terminal only. Yields `advance(text="", amount=1)`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(description, total=total, text="")

        def advance(text: str = "", amount: float = 1) -> None:
            bar.update(task, advance=amount, text=text)

        yield advance


def warm_up(engine: Any) -> None:
    """Capture an engine's graphs behind a bar."""
    with progress("CUDA graphs", engine.runner.num_shapes) as advance:
        engine.runner.warm_up(on_shape=advance)
