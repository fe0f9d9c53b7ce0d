"""Finished runs read back from disk: run folders, the jobs of sweeps, offline W&B runs."""

import csv
import glob
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from specdec.checks import flatten
from specdec.errors import DataError, did_you_mean
from specdec.experiments.jobs import STATUS, read_status
from specdec.experiments.naming import short_paths, spelled

TABLE, SUMMARY, WANDB_TABLE = "per_prompt.csv", "summary.json", "per_prompt"


class PromptRow(NamedTuple):
    """One output of a run, of `per_prompt.csv`."""

    key: tuple[str, int, str, int]  # prompt id, turn, category, sample
    text_sha256: str
    committed: float  # tokens without the prefill's
    rounds: float  # the expected ones, of a replayed text
    accepted: tuple[float, ...]  # by draft position
    drafted: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    name: str
    config: Mapping[str, Any]  # plain and nested
    summary: Mapping[str, Any]
    rows: tuple[PromptRow, ...]

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The configuration by dotted keys."""
        return flatten(self.config)

    @cached_property
    def choices(self) -> Mapping[str, str]:
        """The names that were chosen for groups; none in old runs."""
        return self.summary.get("choices") or {}

    def setting(self, key: str) -> Any:
        """A value of the configuration, or the name that was chosen for a group."""
        return self.flat.get(key, self.choices.get(key))


class Found(NamedTuple):
    """The runs below some paths, and what was left out there, a line each."""

    runs: list[Run]
    notes: list[str]


def find_runs(entries: Iterable[str]) -> Found:
    """Read every run that the entries name, in their order; a run named twice is there twice.

    Args:
        entries: paths or globs of run folders, sweep folders, offline W&B runs.

    Raises:
        DataError: an entry names nothing, or a run that cannot be read.
    """
    runs: list[Run] = []
    notes: list[str] = []
    for entry in entries:
        path = Path(entry).expanduser()
        if path.exists():
            found = _read(path)
        else:
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            # `latest-run` is a link to one of the others
            fit = (p for p in matches if p.name != "latest-run")
            found = _read_all([p for p in fit if p.is_dir() or p.suffix == ".wandb"], entry)
        runs += found.runs
        notes += found.notes
    names = short_paths([run.path for run in runs])
    return Found([replace(run, name=name) for run, name in zip(runs, names, strict=True)], notes)


def _read_all(paths: Sequence[Path], where: Any) -> Found:
    """Those of several paths that are finished runs; the others are noted."""
    runs, notes = [], []
    for path in paths:
        try:
            found = _read(path)
        except DataError as error:
            notes.append(f"left out: {error}")
        else:
            runs += found.runs
            notes += found.notes
    if not runs:
        why = f" ({'; '.join(notes)})" if notes else "; give a path or a glob"
        raise DataError(f"runs: {where} names no finished run{why}")
    return Found(runs, notes)


def _read(path: Path) -> Found:
    if path.suffix == ".wandb":
        return Found([_wandb_run(path)], [])
    if (path / TABLE).exists():
        return Found([_run_folder(path)], [])
    _check_done(path)  # a job that failed may have written no table
    own = sorted(path.glob("*.wandb"))
    if own:
        return Found([_wandb_run(own[0])], [])
    jobs = {p.parent for name in (TABLE, STATUS) for p in path.rglob(name)} - {path}
    if jobs:
        return _read_all(sorted(jobs, key=lambda job: (_num(job), job)), path)
    files = sorted(p for p in path.glob("**/*.wandb") if "latest-run" not in p.parts)
    if not files:
        raise DataError(f"{path} holds no {TABLE}, no jobs of a sweep and no W&B run")
    return _read_all(files, path)


def _num(job: Path) -> int:
    return (read_status(job) or {}).get("num") or 0


def _run_folder(path: Path) -> Run:
    _check_done(path)
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        with (path / TABLE).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        raise DataError(f"the run {path} cannot be read: {error}") from error
    parsed = _rows(rows, path / TABLE)
    return Run(path, path.name, summary.get("config") or {}, summary, parsed)


def _check_done(path: Path) -> None:
    status = read_status(path)
    if status is not None and status["status"] != "done":
        reason = f": {status['error']}" if status["error"] else ""
        raise DataError(f"the run {path} is {status['status']}, not done{reason}")


def _wandb_run(file: Path) -> Run:
    from specdec.experiments.wandb_files import read_table, read_wandb

    run = read_wandb(file)
    if run.exit_code != 0:
        ended = "never ended" if run.exit_code is None else f"failed with {run.exit_code}"
        raise DataError(f"the W&B run {file} {ended}")
    rows = _rows(read_table(file, run, WANDB_TABLE), file)
    total = run.summary.get("num_outputs")
    if total is not None and total != len(rows):
        raise DataError(
            f"the W&B run {file} kept {len(rows)} of {total} rows; compare its run folder instead"
        )
    return Run(file.parent, run.run_id, run.config, run.summary, rows)


def _rows(table: Sequence[Mapping[str, Any]], where: Path) -> tuple[PromptRow, ...]:
    if not table:
        raise DataError(f"{where} has no rows")
    positions = range(1, 1 + sum(name.startswith("drafted_") for name in table[0]))
    try:
        rows = tuple(
            PromptRow(
                (str(row["prompt_id"]), int(row["turn"]), str(row["category"]), int(row["sample"])),
                str(row["text_sha256"]),
                max(0.0, float(row["num_tokens"]) - 1),
                float(row["expected_rounds"] or row["rounds"]),
                tuple(float(row[f"accepted_{j}"]) for j in positions),
                tuple(float(row[f"drafted_{j}"]) for j in positions),
            )
            for row in table
        )
    except KeyError as error:
        raise DataError(f"{where} has no column {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} has a cell that is no number: {error}") from error
    if len({row.key for row in rows}) != len(rows):
        raise DataError(f"{where} has two rows of one prompt, turn, category and sample")
    return rows


def select(runs: Sequence[Run], wanted: Mapping[str, Any]) -> list[Run]:
    """The runs whose configuration has these values.

    Args:
        wanted: a value or a list of values for each key, dotted or nested; a group's key
            (`propose`) is compared with the choice.

    Raises:
        DataError: a key that no run has, or no run is left.
    """
    chosen = list(runs)
    for key, values in flatten(wanted).items():
        known = {name for run in runs for name in run.flat}
        known |= {name for run in runs for name in run.choices}
        if key not in known:
            raise DataError(f"filter: no run has the key {key}{did_you_mean(key, known)}")
        allowed = {spelled(v) for v in (values if isinstance(values, list) else [values])}
        there = sorted({spelled(run.setting(key)) for run in chosen})
        chosen = [run for run in chosen if spelled(run.setting(key)) in allowed]
        if not chosen:
            raise DataError(f"filter: no run has {key}={values}; there is {', '.join(there)}")
    return chosen
