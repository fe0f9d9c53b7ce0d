"""What to call runs that are compared: their folders' names where these are words, else the
settings that tell them apart."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specdec.experiments.jobs import read_status

if TYPE_CHECKING:
    from specdec.experiments.runs import Run

NONE = "null"
MAX_WORD, MAX_LABEL = 20, 60  # characters of names and of lists of settings
USUAL = 2 / 3  # share of the runs that have a value which long labels leave out
CHOICES = ("model", "target", "draft", "data")  # groups whose names say more than their settings
PRESET = ("target", "draft", "propose")  # what a choice of model chooses
BRIEF = {"propose.num_draft_tokens": "K"}
PARTS_OF_A_RUN = ("head", "last")  # folders that their parent names


class Naming(NamedTuple):
    """Names of runs, and the settings that differ among them."""

    labels: list[str]  # of each run, no two the same
    keys: list[str]
    values: dict[str, list[str]]  # key -> of each run; empty where a run has no such setting
    unnamed: list[str]  # keys that the labels do not tell


def name_runs(runs: Sequence["Run"]) -> Naming:
    keys = varied(runs)
    values = {key: shown(runs, key) for key in keys}
    names = [run.name for run in runs]
    if not keys or all(map(_is_word, names)):
        return Naming(names, keys, values, keys)
    lines, kept = short_lines(keys, values)
    told = [line or name for line, name in zip(lines, names, strict=True)]
    again = [told[:index].count(label) for index, label in enumerate(told)]
    labels = [
        f"{label} ({count + 1})" if count else label
        for label, count in zip(told, again, strict=True)
    ]
    return Naming(labels, keys, values, [key for key in keys if key not in kept])


def short_lines(
    keys: Sequence[str], values: dict[str, list[str]]
) -> tuple[list[str], Sequence[str]]:
    """Each run's settings as a line, and the keys told in them: all where the lines are short, else
    no more than tell the runs apart; of lines that are still long no values that most runs have."""
    count = len(next(iter(values.values()), []))
    if not keys:
        return [""] * count, keys
    kept = _enough(keys, values)
    lines = [told_by(kept, values, index) for index in range(count)]
    if max(map(len, lines)) > MAX_LABEL:
        rare = {key: _without_usual(values[key]) for key in kept}
        lines = [told_by(kept, rare, index) or line for index, line in enumerate(lines)]
    return lines, kept


def told_by(keys: Sequence[str], values: dict[str, list[str]], index: int) -> str:
    """The settings of one run as one line."""
    pairs = zip(brief_names(keys), keys, strict=True)
    return ", ".join(f"{name}={values[key][index]}" for name, key in pairs if values[key][index])


def _enough(keys: Sequence[str], values: dict[str, list[str]]) -> list[str]:
    """All keys where labels of them are short; else without the last ones that tell no two runs
    apart that the others do not."""
    count = len(values[keys[0]])

    def lines(some: Sequence[str]) -> list[str]:
        return [told_by(some, values, index) for index in range(count)]

    kept = list(keys)
    for key in reversed(keys):
        if max(map(len, lines(kept))) <= MAX_LABEL:
            break
        fewer = [other for other in kept if other != key]
        if fewer and len(set(lines(fewer))) == len(set(lines(kept))):
            kept = fewer
    return kept


def _without_usual(values: Sequence[str]) -> list[str]:
    """Values of a key, empty where it is what most runs have."""
    usual = max(set(values), key=values.count)
    most = values.count(usual) > USUAL * len(values)
    return ["" if most and value == usual else value for value in values]


def _is_word(name: str) -> bool:
    """Whether a name was given by hand: no date or number, no hash that a sweep ended it with."""
    made = re.fullmatch(r"[\d/_-]+|.*_[0-9a-f]{6}", name)
    return len(name) <= MAX_WORD and not made


def varied(runs: Sequence["Run"]) -> list[str]:
    """Settings that differ among the runs that have them; a stage's function counts as its group.

    A choice of model, target, draft or data stands for the settings that it decides, but for those
    that a run's command names; a setting that follows another of the same name for that one.
    """
    choices = [group for group in CHOICES if _differ(_choice(runs, group))]
    explicit = {key for run in runs for key in _overridden(run)}
    found: dict[str, list[str | None]] = {}
    for group in choices:
        if not _decided(runs, group, _choice(runs, group), choices):
            found[group] = _choice(runs, group)
    for key in dict.fromkeys(key for run in runs for key in run.flat):
        values = [spelled(run.flat[key]) if key in run.flat else None for run in runs]
        if key.startswith("logger.") or not _differ(
            [value for value in values if value is not None]
        ):
            continue
        name = key.removesuffix("._target_")
        if key not in explicit and name not in explicit and _decided(runs, name, values, choices):
            continue
        end = name.rpartition(".")[2]
        if not any(other.rpartition(".")[2] == end and found[other] == values for other in found):
            found[name] = values
    return list(found)


def _choice(runs: Sequence["Run"], group: str) -> list[str | None]:
    return [run.choices.get(group) for run in runs]


def _differ(values: Sequence[str | None]) -> bool:
    return None not in values and len(set(values)) > 1


def _overridden(run: "Run") -> set[str]:
    status = read_status(run.path) or {}
    return {override.partition("=")[0].lstrip("+") for override in status.get("overrides") or ()}


def _decided(
    runs: Sequence["Run"], key: str, values: Sequence[str | None], choices: Sequence[str]
) -> bool:
    """Whether a choice above a key has one value of it for each of its own."""
    group = key.partition(".")[0]
    for choice in choices:
        above = group in PRESET if choice == "model" else group == choice
        if above and choice != key:
            pairs = set(zip(_choice(runs, choice), values, strict=True))
            if len(pairs) == len({chosen for chosen, _ in pairs}):
                return True
    return False


def brief_names(keys: Sequence[str]) -> list[str]:
    """Short names, of paths with their group, and the field's letters for what has one."""
    names = short_names(keys, {key: 2 for key in keys if key.endswith(".path")})
    return [BRIEF.get(key, name) for key, name in zip(keys, names, strict=True)]


def short_names(keys: Sequence[str], least: Mapping[str, int] | None = None) -> list[str]:
    """The last part of each key, or as many as tell it from the others.

    Args:
        least: parts of a key that there are to be, 1 where it is not named.
    """
    names = []
    for key in keys:
        parts = key.split(".")
        first = (least or {}).get(key, 1)
        ends = [".".join(parts[-n:]) for n in range(first, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        free = (end for end in ends if not any(other.endswith(f".{end}") for other in others))
        names.append(next(free, key))
    return names


def shown(runs: Sequence["Run"], key: str) -> list[str]:
    """A key's value in each run, empty where there is none: of a group the name of its function,
    of paths the ends that tell them apart."""
    values = []
    for run in runs:
        target = run.flat.get(f"{key}._target_")
        if target is not None:
            values.append(str(target).rpartition(".")[2])
        else:
            known = key in run.flat or key in run.choices
            values.append(spelled(run.setting(key)) if known else "")
    return path_ends(values) if key.endswith("path") else values


def path_ends(values: Sequence[str]) -> list[str]:
    """Values of a setting, the paths among them by the ends that tell them apart."""
    paths = sorted({value for value in values if "/" in value})
    ends = dict(zip(paths, short_paths([Path(path) for path in paths]), strict=True))
    for path, end in ends.items():
        if end in PARTS_OF_A_RUN:
            ends[path] = "/".join(Path(path).parts[-2:])
    return [ends.get(value, value) for value in values]


def spelled(value: object) -> str:
    """One spelling for equal values."""
    if value is None:
        return NONE
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def short_paths(paths: Sequence[Path]) -> list[str]:
    """The end of each path that tells it from the others; equal ones get a number."""
    full = [path.resolve() for path in paths]
    names = []
    for index, path in enumerate(full):
        others = [other for other in full if other != path]
        for length in range(1, len(path.parts) + 1):
            end = path.parts[-length:]
            if not any(other.parts[-length:] == end for other in others):
                break
        name = "/".join(end)
        before = full[:index].count(path)
        names.append(f"{name} ({before + 1})" if before else name)
    return names
