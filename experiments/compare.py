"""Compare finished runs: paired differences of acceptance length, with intervals.

    python experiments/compare.py 'runs=[multirun/2026-01-31/12-00-00]'
    python experiments/compare.py 'runs=[outputs/a,outputs/b]' 'filter={sampling.temperature:0}'

Runs are run folders, sweep folders or offline W&B runs, by path or glob. The run folder gets
`compare.csv`, `compare.png` and `compare.html`, which holds both.
"""

import base64
import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from specdec.checks import plain
from specdec.errors import ConfigError, DataError
from specdec.experiments.jobs import hydra_script
from specdec.experiments.naming import Naming, brief_names, name_runs

CSV_COLUMNS = (
    *("a", "b", "difference", "ci95_low", "ci95_high", "p_holm", "p", "pairing", "reason"),
    *("label_a", "label_b", "length_a", "length_b", "differing_texts", "num_prompts"),
    *("tokens_per_second_a", "tokens_per_second_b", "speed_ratio", "path_a", "path_b"),
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #ddd; }
th { font-weight: 600; white-space: nowrap; border-bottom-color: #888; }
td.figure { white-space: nowrap; }
img { max-width: 100%; height: auto; margin-top: 1.5rem; }
.note { color: #555; } code { font-size: .9em; overflow-wrap: anywhere; }
"""
READING = (
    "Acceptance length is committed tokens over verify rounds, pooled over all outputs. Intervals "
    "are 95% bootstrap intervals over prompts; for differences both runs' prompts are resampled "
    "together. p is of a randomisation test that swaps the runs' results prompt by prompt, "
    "adjusted by Holm's method over all compared pairs. Unpaired: sampled texts differ, so that a "
    "difference also holds the luck of the two decodes."
)


class RunRow(NamedTuple):
    """A run's pooled numbers."""

    run: Any  # called by its label
    folder: str  # its own name
    length: float | None
    low: float | None
    high: float | None
    rate: float | None
    joint: list[float | None]  # share of the drafts at each position that were kept

    @property
    def label(self) -> str:
        return self.run.name


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]


@hydra_script("compare", record=False)
def main(cfg: DictConfig, folder: Path) -> None:
    from specdec.experiments.pairing import compare_all, in_short_lines
    from specdec.experiments.plots import plot_compare
    from specdec.experiments.runs import find_runs, select
    from specdec.experiments.tables import print_table

    settings = plain(cfg)
    found = find_runs(entries_of(settings["runs"]))
    runs = select(found.runs, filter_of(settings["filter"]))
    if len(runs) < 2:
        raise DataError(f"comparing needs two runs, and {runs[0].path} is the only one here")
    naming = name_runs(runs)
    named = [replace(run, name=label) for run, label in zip(runs, naming.labels, strict=True)]
    pairs = compare_all(named)
    check_any(pairs)
    rows = [pooled(run, before.name) for run, before in zip(named, runs, strict=True)]

    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "compare.csv", pairs, rows)
    plot_compare(rows, naming, folder / "compare.png")
    tables = [runs_table(rows, naming), pairs_table(pairs)]
    notes = [*found.notes, *refusals(pairs)]
    page = html_page(tables, notes, (folder / "compare.png").read_bytes(), rows)
    (folder / "compare.html").write_text(page, encoding="utf-8")
    print_table(*tables[0])
    print_table(*pairs_table([pair for pair in pairs if pair.kind != "refused"]))
    for note in [*found.notes, *in_short_lines(pairs)]:
        print(note)
    print(f"results: {folder}")


def entries_of(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    if not entries or not all(isinstance(entry, str) and entry for entry in entries):
        raise ConfigError(f"runs={value} must be a path or glob, or a list of them")
    return entries


def filter_of(value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"filter={value} must map keys to values, as {{sampling.temperature:0}}")
    return value or {}


def check_any(pairs: Sequence[Any]) -> None:
    """Raises DataError when no two of the runs can be paired."""
    if any(pair.kind != "refused" for pair in pairs):
        return
    more = f" (and so for each of the {len(pairs)} pairs)" if len(pairs) > 1 else ""
    raise DataError(f"{_names(pairs[0])} cannot be paired: {pairs[0].reason}{more}")


def refusals(pairs: Sequence[Any]) -> list[str]:
    refused = [pair for pair in pairs if pair.kind == "refused"]
    return [f"{_names(pair)} are not compared: {pair.reason}" for pair in refused]


def _names(pair: Any) -> str:
    return f"{pair.a.name} and {pair.b.name}"


def pooled(run: Any, folder: str) -> RunRow:
    """The numbers of a run; its interval is its own report's, where it has one."""
    from specdec import metrics
    from specdec.experiments.pairing import by_prompt

    sums = by_prompt(run)
    accepted = [sum(at) for at in zip(*(row.accepted for row in run.rows), strict=True)]
    drafted = [sum(at) for at in zip(*(row.drafted for row in run.rows), strict=True)]
    reported = run.summary.get("acceptance_length_ci95")
    low, high = reported or metrics.bootstrap_interval(sums.committed, sums.rounds)
    return RunRow(
        run,
        folder,
        metrics.ratio(sums.committed.sum(), sums.rounds.sum()),
        low,
        high,
        metrics.ratio(sum(accepted), sum(drafted)),
        [metrics.ratio(a, d) for a, d in zip(accepted, drafted, strict=True)],
    )


def write_csv(path: Path, pairs: Sequence[Any], rows: Sequence[RunRow]) -> None:
    """One line a pair; a refused one has its reason and no numbers."""
    row_of = {id(row.run): row for row in rows}
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS)
        writer.writeheader()
        for pair in pairs:
            row = {
                "difference": pair.difference,
                "ci95_low": pair.low,
                "ci95_high": pair.high,
                "p_holm": pair.p_holm,
                "p": pair.p,
                "pairing": pair.kind,
                "reason": pair.reason,
                "differing_texts": pair.differing_texts,
                "num_prompts": pair.num_prompts,
                "speed_ratio": pair.speed_ratio,
            }
            for side, run in (("a", pair.a), ("b", pair.b)):
                row[side] = row_of[id(run)].folder
                row[f"label_{side}"] = run.name
                row[f"length_{side}"] = row_of[id(run)].length
                row[f"tokens_per_second_{side}"] = run.summary.get("tokens_per_second")
                row[f"path_{side}"] = str(run.path)
            writer.writerow({name: "" if value is None else value for name, value in row.items()})


def runs_table(rows: Sequence[RunRow], naming: Naming) -> Table:
    """The runs' own numbers; the settings that differ where the labels do not name them."""
    from specdec.experiments.tables import number

    told = naming.unnamed
    columns = ["run", *brief_names(told), "acceptance length", "95% interval", "acceptance rate"]
    columns += ["tokens/s", "speedup", "bytes/round", "prompts"]
    body = []
    for index, row in enumerate(rows):
        value = row.run.summary.get
        settings = [naming.values[key][index] or "-" for key in told]
        line = [row.label, *settings, number(row.length)]
        line += [_interval(row.low, row.high), number(row.rate)]
        line += [number(value("tokens_per_second"), 1), number(value("speedup"), 2)]
        line += [number(value("bytes_per_round"), 2), str(len({r.key[0] for r in row.run.rows}))]
        body.append(line)
    kept = [c for c in range(len(columns)) if any(line[c] != "-" for line in body)]
    return Table("runs", [columns[c] for c in kept], [[line[c] for c in kept] for line in body])


def pairs_table(pairs: Sequence[Any]) -> Table:
    from specdec.experiments.tables import number

    columns = ["a", "b", "a - b", "95% interval", "p (Holm)", "pairing", "speed a / b"]
    body = []
    for pair in pairs:
        texts = pair.differing_texts
        share = f", {texts:.1%} of the texts differ" if texts else ""
        line = [pair.a.name, pair.b.name, number(pair.difference)]
        line += [_interval(pair.low, pair.high), number(pair.p_holm, 4)]
        line += [f"{pair.kind}{share}", number(pair.speed_ratio, 2)]
        body.append(line)
    compared = sum(pair.kind != "refused" for pair in pairs)
    title = "differences of acceptance length"
    if compared > 1:
        title += f", p adjusted for {compared} comparisons"
    return Table(title, columns, body)


def _interval(low: float | None, high: float | None) -> str:
    from specdec.experiments.tables import interval

    return "-" if low is None else interval(low, high)


def html_page(
    tables: Sequence[Table], notes: Sequence[str], png: bytes, rows: Sequence[RunRow]
) -> str:
    """One page without any other file: the tables, the notes, the plot, where the runs lie."""
    image = base64.b64encode(png).decode()
    parts = [_html_table(table) for table in tables]
    parts.insert(
        1, f'<img alt="acceptance by position and by K" src="data:image/png;base64,{image}">'
    )
    parts.append(f'<p class="note">{escape(READING)}</p>')
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f"<h2>Left out</h2><ul>{items}</ul>")
    places = "".join(
        f"<li>{escape(row.label)}: <code>{escape(str(row.run.path.resolve()))}</code></li>"
        for row in rows
    )
    parts.append(f"<h2>Where the runs lie</h2><ul>{places}</ul>")
    title = f"Comparison of {len(rows)} runs"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    body = "".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>\n" for row in table.rows)
    return (
        f"<h2>{escape(table.title.capitalize())}</h2>"
        f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'
    )


def _html_cell(text: str) -> str:
    kind = ' class="figure"' if text[:1] in "[-0123456789" else ""
    return f"<td{kind}>{escape(text)}</td>"


if __name__ == "__main__":
    main()
