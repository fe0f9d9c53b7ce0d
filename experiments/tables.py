"""Tables and progress in the terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

PLAIN_WIDTH = 120  # columns where the output is no terminal


def number(value: Any, digits: int = 3) -> str:
    """A figure for a table; a dash where there is none."""
    if value is None or value == "":
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print to stdout, wide enough for a file or a pipe too; nameless columns get no header."""
    table = Table(show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print(title, markup=False, highlight=False)
    console.print(table)


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
