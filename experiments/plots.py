"""Plots as PNG files. matplotlib is imported when one is drawn; no global state of it is used."""

import logging
import warnings
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from specdec.metrics import Output, by_prompt, count_rounds

MAX_LEGEND = 20  # entries that leave room for the lines
MAX_TICKS = 12
MAX_TEXT = 80  # characters of a line of a legend


def _figure(width: float, height: float):
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it reports its font cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box is drawn instead
        figure.savefig(part, format="png", dpi=120)
    part.replace(path)


def _text(label: str) -> str:
    """A label as it is written: dollars do not begin a formula."""
    return label.replace("$", r"\$")


def plot_acceptance(outputs: Sequence[Output], summary: dict[str, Any], path: Path) -> None:
    """Acceptance by position, by category, and over prompts."""
    figure = _figure(13, 3.8)
    by_position, by_category, over_prompts = figure.subplots(1, 3)

    joint = [v or 0.0 for v in summary["per_position_joint"]]
    conditional = [v or 0.0 for v in summary["per_position_conditional"]]
    positions = list(range(1, len(joint) + 1))
    by_position.bar([p - 0.2 for p in positions], conditional, 0.4, label="all before it kept")
    by_position.bar([p + 0.2 for p in positions], joint, 0.4, label="all drafts")
    by_position.set(xlabel="draft position", ylabel="share kept", ylim=(0, 1), xticks=positions)
    if positions:
        by_position.legend(frameon=False)

    rounds: dict[str, list] = {}
    for output in outputs:
        rounds.setdefault(output.category, []).extend(output.rounds)
    counts = {category: count_rounds(r) for category, r in rounds.items()}
    lengths = {category: c.committed / c.rounds for category, c in counts.items() if c.rounds}
    by_category.barh([_text(name) for name in lengths], list(lengths.values()))
    by_category.invert_yaxis()
    by_category.set(xlabel="acceptance length")

    prompts = [c.committed / c.rounds for c in by_prompt(outputs).values() if c.rounds]
    over_prompts.hist(prompts, bins=20)
    over_prompts.set(xlabel="acceptance length of a prompt", ylabel="prompts")
    if summary["acceptance_length"] is not None:
        over_prompts.axvline(summary["acceptance_length"], color="black", linestyle="--")
    _save(figure, path)


def plot_sweep(rows: Sequence[dict[str, Any]], keys: Sequence[str], path: Path) -> None:
    """Acceptance length with its interval over the first swept key that is a number, one line for
    each combination of the others; a point a job where no key is a number."""
    done = [row for row in rows if row.get("acceptance_length") is not None]
    x_key = next((k for k in keys if all(_is_number(row.get(k)) for row in done)), None)
    others = [key for key in keys if key != x_key]
    labels = _swept(done, others)
    if x_key is None:
        figure = _figure(7, 1.6 + 0.35 * len(done))
        axes = figure.subplots()
        y = [row["acceptance_length"] for row in done]
        axes.errorbar(y, list(range(len(done))), xerr=_gaps(done), fmt="o", capsize=3)
        named = [label or str(row["job"]) for label, row in zip(labels, done, strict=True)]
        axes.set_yticks(list(range(len(done))), list(map(_clipped, named)))
        axes.set(xlabel="acceptance length", ylim=(max(len(done), 1) - 0.5, -0.5))
        return _save(figure, path)
    series: dict[str, list[dict[str, Any]]] = {}
    for label, row in zip(labels, done, strict=True):
        series.setdefault(label, []).append(row)
    figure = _figure(7, 4.2 + _room(series))
    axes = figure.subplots()
    ticks = sorted({float(row[x_key]) for row in done})
    nearest = min((b - a for a, b in pairwise(ticks)), default=1.0)
    for index, (label, members) in enumerate(series.items()):
        members.sort(key=lambda row: float(row[x_key]))
        x = [float(row[x_key]) + nearest * _aside(index, len(series)) for row in members]
        y = [row["acceptance_length"] for row in members]
        label = _clipped(label) or None
        axes.errorbar(x, y, yerr=_gaps(members), capsize=3, label=label, **_style(index))
    axes.set(xlabel=x_key, ylabel="acceptance length")
    if len(ticks) <= MAX_TICKS:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    _legend(axes, list(series))
    _save(figure, path)


def _aside(index: int, count: int) -> float:
    """How far one of so many lines is moved so that none hides another, of a step between ticks."""
    return (index - (count - 1) / 2) * min(0.02, 0.4 / count)


def _swept(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[str]:
    """What tells each row's settings from the others'."""
    from specdec.experiments.launching import readable
    from specdec.experiments.naming import path_ends

    columns = []
    for key in keys:
        values = path_ends([str(row.get(key, "")) for row in rows])
        columns.append(["=".join(readable(key, value)) for value in values])
    return [", ".join(column[index] for column in columns) for index in range(len(rows))]


def _gaps(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Below and above each acceptance length."""
    low = [_gap(r["acceptance_length"], r["acceptance_length_ci95_low"]) for r in rows]
    high = [_gap(r["acceptance_length_ci95_high"], r["acceptance_length"]) for r in rows]
    return [low, high]


def _style(index: int) -> dict[str, Any]:
    """Of one line among many: no two of the first forty look the same."""
    colours = 10
    return {
        "color": f"C{index % colours}",
        "marker": "os^D"[index // colours % 4],
        "linestyle": ("-", "--", ":", "-.")[index // colours % 4],
        "markersize": 4,
    }


def _legend(axes: Any, labels: Sequence[str]) -> None:
    """Below the lines, where there are not too many."""
    if any(labels) and len(labels) <= MAX_LEGEND:
        axes.legend(
            frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(-0.05, -0.16)
        )


def _room(entries: Collection[Any]) -> float:
    """Inches that a legend takes."""
    return 0.2 * len(entries) if len(entries) <= MAX_LEGEND else 0.0


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (TypeError, ValueError):
        return False
    return True


def _gap(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else max(0.0, high - low)


def plot_demo(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Acceptance length with its interval, and speedup over plain decoding, a bar a row."""
    figure = _figure(10, 3.6)
    lengths, speedups = figure.subplots(1, 2, sharey=True)
    labels = [f"{row['drafts']}, temperature {row['temperature']}" for row in rows]
    y = [row["acceptance_length"] or 0.0 for row in rows]
    lengths.barh(labels, y, xerr=_gaps(rows), capsize=3)
    lengths.invert_yaxis()
    lengths.set(xlabel="acceptance length")
    speedups.barh(labels, [row["speedup"] for row in rows], color="tab:orange")
    speedups.axvline(1, color="black", linestyle="--", linewidth=1)
    speedups.set(xlabel="speedup over plain decoding")
    figure.suptitle(title, fontsize="small")
    _save(figure, path)


def plot_compare(rows: Sequence[Any], naming: Any, path: Path) -> None:
    """Acceptance by draft position, a line a run, and acceptance length with its interval over K,
    a line for each combination of the other settings that differ.

    Args:
        rows: each with label, length, low, high and `joint` (share kept at each position).
        naming: their `naming.Naming`.
    """
    from specdec.experiments.naming import short_lines, told_by

    others = [key for key in naming.keys if key != "propose.num_draft_tokens"]
    lines, _ = short_lines(others, {key: naming.values[key] for key in others})
    series: dict[str, list[Any]] = {}
    labels: dict[str, str] = {}
    for index, row in enumerate(rows):
        settings = told_by(others, naming.values, index)
        if any(len(other.joint) == len(row.joint) for other in series.get(settings, ())):
            settings = labels[row.label] = row.label  # the same settings twice
        else:
            labels.setdefault(settings, lines[index] if others else "")
        series.setdefault(settings, []).append(row)
    figure = _figure(12, 4.4 + max(_room(rows), _room(series)))
    by_position, by_k = figure.subplots(1, 2)
    for index, row in enumerate(rows):
        positions = [j for j, share in enumerate(row.joint, 1) if share is not None]
        shares = [row.joint[j - 1] for j in positions]
        by_position.plot(positions, shares, label=_clipped(row.label), **_style(index))
    longest = max((len(row.joint) for row in rows), default=0)
    by_position.set(xlabel="draft position", ylabel="share of the drafts kept", ylim=(0, 1))
    by_position.set_xticks(range(1, longest + 1))

    for index, (settings, members) in enumerate(series.items()):
        label = labels[settings]
        done = sorted((r for r in members if r.length is not None), key=lambda r: len(r.joint))
        y = [r.length for r in done]
        gaps = [[_gap(r.length, r.low) for r in done], [_gap(r.high, r.length) for r in done]]
        x = [len(r.joint) + _aside(index, len(series)) for r in done]
        by_k.errorbar(x, y, yerr=gaps, capsize=3, label=_clipped(label) or None, **_style(index))
    by_k.set(xlabel="drafts a round, K", ylabel="acceptance length")
    by_k.set_xticks(sorted({len(row.joint) for row in rows}))
    _legend(by_position, [row.label for row in rows])
    _legend(by_k, list(labels.values()))
    _save(figure, path)


def _clipped(label: str) -> str:
    """A label that leaves the lines their room."""
    return _text(label if len(label) <= MAX_TEXT else f"{label[: MAX_TEXT - 3]}...")


def plot_speed(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The parts of a step stacked, its time without stamps beside them, and the floor."""
    figure = _figure(8, 4.2)
    axes = figure.subplots()
    names = ("target", "verification", "postprocess", "drafting", "rest")
    at = list(range(len(rows)))
    bottom = [0.0] * len(rows)
    for name in names:
        heights = [row.get(f"{name}_ms") or 0.0 for row in rows]
        axes.bar(at, heights, 0.5, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.plot(at, [row["step_ms"] for row in rows], "kD", label="step")
    if all(row.get("floor_ms") for row in rows):
        axes.plot(at, [row["floor_ms"] for row in rows], "k_", markersize=24, label="floor")
    axes.set_xticks(at, [str(row["batch"]) for row in rows])
    axes.set(xlabel="requests", ylabel="ms a step", ylim=(0, None))
    axes.legend(frameon=False)
    _save(figure, path)
