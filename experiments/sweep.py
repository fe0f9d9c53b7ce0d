"""A sweep's combined table and plot, rebuilt from its run folders.

    python experiments/sweep.py dir=multirun/2026-01-31/12-00-00

Jobs call `rebuild` as they end, so the table is there also when a sweep fails or is killed.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.errors import DataError
from specdec.experiments.jobs import STATUS, hydra_script, read_status
from specdec.experiments.locks import held, is_alive

TABLE, PLOT = "sweep.csv", "sweep.png"
LOCK = ".sweep.lock"  # of the table alone: a job's folder has its own
NUMBERS = (
    "num_draft_tokens",
    "acceptance_length",
    "acceptance_length_ci95",
    "mean_acceptance_length",
    "acceptance_rate",
    "per_position_conditional",
    "per_position_joint",
    "num_verify_rounds",
    "num_drafted",
    "num_accepted",
    "num_output_tokens",
    "bytes_per_round",
    "repeated_8gram_share",
    "tokens_per_second",
    "baseline_tokens_per_second",
    "speedup",
    "speedup_ci95",
    "output_sha256",
)


def rebuild(folder: Path) -> list[dict[str, Any]]:
    """Read every job below `folder` and write `sweep.csv` and `sweep.png` there.

    Returns:
        The rows: job, status, one column an override, acceptance numbers, error.
    """
    with held(folder / LOCK):  # the last to end has seen every job
        rows = read_jobs(folder)
        names = dict.fromkeys(name for row in rows for name in row)
        columns = sorted(names, key=_column_order)
        part = folder / (TABLE + ".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        part.replace(folder / TABLE)
        from specdec.experiments.plots import plot_sweep

        plot_sweep(rows, varied_keys(rows), folder / PLOT)
    return rows


def _column_order(name: str) -> tuple[int, int]:
    """Job, status, overrides, numbers by position, and the long error text last."""
    head, _, position = name.rpartition("_")
    if position.isdigit() and head in NUMBERS:
        return 2 + NUMBERS.index(head), int(position)
    stem = name.removesuffix("_low").removesuffix("_high")
    if stem in NUMBERS:
        return 2 + NUMBERS.index(stem), 0
    return {"job": 0, "status": 0, "seconds": 98, "error": 99}.get(name, 1), 0


def read_jobs(folder: Path) -> list[dict[str, Any]]:
    """One row for each job that has a status, in the order of the sweep that last named them."""
    jobs = [path.parent for path in folder.rglob(STATUS)]
    found = [(status, job) for job in jobs if (status := read_status(job)) is not None]
    found.sort(key=lambda item: (item[0]["num"] or 0, item[0]["started"], item[0]["job"]))
    return [_row(status, job) for status, job in found]


def _row(status: dict[str, Any], job: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"job": status["job"], "status": status["status"]}
    if status["status"] == "running" and not is_alive(status["process"]):
        row["status"] = "killed"
    for override in status["overrides"]:
        key, _, value = override.partition("=")
        name = key.lstrip("+~")
        if name.partition(".")[0] not in ("launcher", "hydra"):  # maybe of a run that skipped it
            row[name] = value
    path = job / "summary.json"
    if status["status"] == "done" and path.exists():
        summary = json.loads(path.read_text(encoding="utf-8"))
        for name in NUMBERS:
            row.update(_cells(name, summary.get(name)))
    row["seconds"] = status["seconds"]
    row["error"] = status["error"] or ""
    return row


def _cells(name: str, value: Any) -> dict[str, Any]:
    if name.endswith("_ci95"):
        low, high = value or (None, None)
        return {f"{name}_low": low, f"{name}_high": high}
    if isinstance(value, list):
        return {f"{name}_{j}": v for j, v in enumerate(value, 1)}
    return {name: value}


def varied_keys(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Override columns, in their order, that do not have one value throughout."""
    overrides = {name: None for row in rows for name in row if _is_override(name, row)}
    return [name for name in overrides if len({row.get(name) for row in rows}) > 1]


def _is_override(name: str, row: dict[str, Any]) -> bool:
    fixed = ("job", "status", "seconds", "error")
    return isinstance(row[name], str) and name not in fixed and not name.endswith("sha256")


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The swept values, or where there are none the jobs' folders, beside the main numbers."""
    from specdec.experiments.naming import short_names
    from specdec.experiments.tables import print_table

    keys = varied_keys(rows)
    groups = [key.removesuffix("._target_") for key in keys]
    numbers = ("acceptance_length", "acceptance_rate", "tokens_per_second", "speedup")
    shown = [n for n in numbers if any(row.get(n) is not None for row in rows)]
    print_table(
        "sweep",
        [
            *(short_names(groups) if keys else ["job"]),
            "status",
            *(n.replace("_", " ") for n in shown),
        ],
        [
            [*(row.get(k, "") for k in keys or ["job"]), row["status"]]
            + [_figure(row, n) for n in shown]
            for row in rows
        ],
    )


def _figure(row: dict[str, Any], name: str) -> str:
    """A number, with its interval where it has one."""
    from specdec.experiments.tables import interval, number

    low, high = (row.get(f"{name}_ci95_{end}") for end in ("low", "high"))
    figure = number(row.get(name), 1 if name == "tokens_per_second" else 3)
    return figure if low is None or high is None else f"{figure} {interval(low, high)}"


@hydra_script("sweep", record=False)
def main(cfg: DictConfig, _: Path) -> None:
    folder = Path(cfg.dir)
    if not folder.is_dir():
        raise DataError(f"dir={folder} is no folder; give a sweep's hydra.sweep.dir")
    if not any(folder.rglob(STATUS)):
        raise DataError(f"dir={folder} holds no job with a {STATUS}")
    print_rows(rebuild(folder))
    print(f"table: {folder / TABLE}")


if __name__ == "__main__":
    main()
