"""Which runs may be compared prompt by prompt, and their difference."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from specdec import metrics
from specdec.experiments.runs import Run
from specdec.significance import holm, swap_p_value
from specdec.values import PENALTIES

PARTS = ("prompt_id", "turn", "category", "sample")
REQUESTS = ("sampling.temperature", "sampling.max_tokens", "sampling.ignore_eos")
FILTERS = {"sampling.top_k": 0, "sampling.top_p": 1.0, "sampling.min_p": 0.0}  # where they are off
LINE = 150  # characters of a refusal in short


class Sums(NamedTuple):
    """A run's committed tokens and rounds, one value a prompt, its turns and samples together."""

    committed: np.ndarray
    rounds: np.ndarray
    prompt_ids: tuple[str, ...]  # sorted


class Refusal(NamedTuple):
    """Why two runs may not be compared."""

    reason: str  # one line with the key that differs
    keys: list[str]  # settings that differ and explain it, where there are any


class Pair(NamedTuple):
    """Two runs, and a - b of their acceptance lengths with a 95% interval.

    `kind` is paired; unpaired, where sampled texts differ, so that the difference holds the luck of
    two decodes too; or refused, with the key that forbids the comparison in `reason`.
    """

    a: Run
    b: Run
    kind: str
    reason: str
    difference: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    differing_texts: float | None  # share of the outputs
    num_prompts: int
    speed_ratio: float | None  # a's tokens a second over b's; None on other machines or settings
    keys: Sequence[str] = ()  # settings that explain a refusal


def by_prompt(run: Run) -> Sums:
    totals: dict[str, list[float]] = {}
    for row in run.rows:
        total = totals.setdefault(row.key[0], [0.0, 0.0])
        total[0] += row.committed
        total[1] += row.rounds
    ids = tuple(sorted(totals))
    committed, rounds = np.array([totals[i] for i in ids]).T
    return Sums(committed, rounds, ids)


def compare_all(runs: Sequence[Run]) -> list[Pair]:
    """Every pair of the runs, in order; Holm's adjustment is over all that are compared."""
    sums = [by_prompt(run) for run in runs]
    # Equal numbers of prompts draw the same resamples, so any two of these pair.
    draws = [metrics.resampled_ratios(s.committed, s.rounds) for s in sums]
    pairs = []
    for i, j in combinations(range(len(runs)), 2):
        a, b = runs[i], runs[j]
        refused = refusal(a, b)
        texts = differing_texts(a, b)
        if refused:
            pairs.append(_refused(a, b, refused))
            continue
        lengths = [metrics.ratio(s.committed.sum(), s.rounds.sum()) for s in (sums[i], sums[j])]
        known = lengths[0] is not None and lengths[1] is not None
        low, high = metrics.interval(draws[i] - draws[j]) if known else (None, None)
        pair = Pair(
            a=a,
            b=b,
            kind="unpaired" if texts and temperature(a) > 0 else "paired",
            reason="",
            difference=lengths[0] - lengths[1] if known else None,
            low=low,
            high=high,
            p=swap_p_value(sums[i][:2], sums[j][:2]),
            p_holm=None,
            differing_texts=texts,
            num_prompts=len(sums[i].prompt_ids),
            speed_ratio=speed_ratio(a, b),
        )
        pairs.append(pair)
    adjusted = holm([pair.p for pair in pairs])
    return [pair._replace(p_holm=p) for pair, p in zip(pairs, adjusted, strict=True)]


def _refused(a: Run, b: Run, refused: Refusal) -> Pair:
    nothing = dict.fromkeys(("difference", "low", "high", "p", "p_holm", "differing_texts"))
    reason, keys = refused
    return Pair(a, b, "refused", reason, **nothing, num_prompts=0, speed_ratio=None, keys=keys)


def in_short_lines(pairs: Sequence[Pair]) -> list[str]:
    """Refused pairs, a line of a terminal each; of those that differ in the same settings the first
    and how many more there are."""
    groups: dict[Any, list[Pair]] = {}
    for index, pair in enumerate(pairs):
        if pair.kind == "refused":
            groups.setdefault(tuple(pair.keys) or index, []).append(pair)
    lines = []
    for first, *others in groups.values():
        more = f" (and so for {len(others)} more)" if others else ""
        lines.append(_in_short(first, LINE - len(more)) + more)
    return lines


def _in_short(pair: Pair, length: int) -> str:
    """The first setting that differs, and how many more do; the reason where none does. What is too
    long loses its middle."""
    whole = min(len(_what(pair, 10 * length)), length * 3 // 5)
    names = " and ".join(_both([pair.a.name, pair.b.name], length - whole - len(" and "), share=2))
    return names + _what(pair, length - len(names))


def _what(pair: Pair, length: int) -> str:
    told = " are not compared: "
    if not pair.keys:
        return told + _clipped([pair.reason], length - len(told))[0]
    key, *more = pair.keys
    rest = f", and {len(more)} more" if more else ""
    values = [_shown(run.setting(key)) for run in (pair.a, pair.b)]
    values = _both(values, length - len(f"{told}{key} is  and {rest}"))
    return f"{told}{key} is {' and '.join(values)}{rest}"


def _both(texts: Sequence[str], length: int, share: int = 3) -> Sequence[str]:
    """Two texts that together have so many characters; the longer gives way first."""
    return _clipped(texts, max(length // 2, length - min(map(len, texts))), share)


def _clipped(texts: Sequence[str], length: int, share: int = 3) -> Sequence[str]:
    """Texts of at most so many characters, or as many more as keep them apart; what is too long
    loses its middle.

    Args:
        share: one part in so many of what is left is the beginning.
    """
    for most in range(max(length, 4), max(map(len, texts))):
        start = (most - 3) // share
        short = [t if len(t) <= most else f"{t[:start]}...{t[start + 3 - most :]}" for t in texts]
        if len(set(short)) == len(texts):
            return short
    return texts


def refusal(a: Run, b: Run) -> Refusal | None:
    """Why two runs may not be compared; None if they may."""
    return (
        _other_model(a, b)
        or _other_sampling(a, b)
        or _other_prompts(a, b)
        or (_other_texts(a, b) if must_agree(a, b) else None)
    )


def _other_model(a: Run, b: Run) -> Refusal | None:
    """Another target or another chat template; old runs have only the settings to tell."""
    for name, keys in (
        ("target", ("target.path",)),
        ("template", ("data.chat_template", "data.system_prompt")),
    ):
        settings = [key for key in keys if a.setting(key) != b.setting(key)]
        prints = [run.summary.get(f"{name}_sha256") for run in (a, b)]
        if None in prints:
            if settings:
                return Refusal(_differs(settings[0], a, b), settings)
        elif prints[0] != prints[1]:
            if settings:
                return Refusal(f"{name}: {_differs(settings[0], a, b)}", settings)
            told = f"what {keys[0]}={a.setting(keys[0])} names has changed between the runs"
            return Refusal(f"{name}: {told}", [])
    kept_in = "target.quantize"  # absent from old runs
    if (a.setting(kept_in) or "none") != (b.setting(kept_in) or "none"):
        return Refusal(f"target: {_differs(kept_in, a, b)}", [kept_in])
    return None


def _other_sampling(a: Run, b: Run) -> Refusal | None:
    keys = [key for key in REQUESTS if a.setting(key) != b.setting(key)]
    keys += [f"sampling.{name}" for name in PENALTIES if _penalty(a, name) != _penalty(b, name)]
    if not keys and temperature(a) > 0:
        keys = [key for key, off in FILTERS.items() if _on(a, key, off) != _on(b, key, off)]
    return Refusal(_differs(keys[0], a, b), keys) if keys else None


def _penalty(run: Run, name: str) -> Any:
    """Runs from before there were penalties had none."""
    value = run.setting(f"sampling.{name}")
    return PENALTIES[name].off if value is None else value


def _on(run: Run, key: str, off: float) -> Any:
    """A filter's value, off in all of its spellings (null, 0 or -1 for top_k) being one."""
    value = run.setting(key)
    return off if value is None or (off == 0 and value <= 0) else value


def _other_prompts(a: Run, b: Run) -> Refusal | None:
    settings = _data_keys(a, b)
    told = "".join(f"; {_differs(key, a, b)}" for key in settings)
    keys = [{row.key for row in run.rows} for run in (a, b)]
    if keys[0] != keys[1]:
        for depth, part in enumerate(PARTS, 1):
            parts = [{key[:depth] for key in found} for found in keys]
            lone = sorted(parts[0] ^ parts[1])
            if lone:
                owner = a if lone[0] in parts[0] else b
                prompt = f" of prompt {lone[0][0]!r}" if depth > 1 else ""
                return Refusal(
                    f"{part}: {lone[0][-1]!r}{prompt} is in {owner.name} only "
                    f"({len(keys[0])} and {len(keys[1])} outputs{told})",
                    settings,
                )
    prints = [run.summary.get("prompts_sha256") for run in (a, b)]
    if None not in prints and prints[0] != prints[1]:
        return Refusal(f"prompts: the ids are the same and the texts are not{told}", settings)
    return None


def _data_keys(a: Run, b: Run) -> list[str]:
    """The settings of the data that explain it, where there are any."""
    keys = [key for key in a.flat if key.startswith("data.") and key in b.flat]
    keys += ["sampling.num_samples"]
    return [key for key in keys if a.setting(key) != b.setting(key)]


def must_agree(a: Run, b: Run) -> bool:
    """Whether both decoded greedily in fp32, where every lossless rule gives the same text."""
    dtypes = {run.summary.get("dtype") or run.setting("dtype") for run in (a, b)}
    return temperature(a) == 0 and dtypes == {"float32"}


def _other_texts(a: Run, b: Run) -> Refusal | None:
    texts = {row.key: row.text_sha256 for row in b.rows}
    for row in a.rows:
        if texts[row.key] != row.text_sha256:
            prompt, turn, _, sample = row.key
            share = differing_texts(a, b)
            return Refusal(
                f"text_sha256: the greedy texts of prompt {prompt!r}, turn {turn}, sample {sample} "
                f"differ between {a.name} and {b.name}, as {share:.1%} of them do",
                [],
            )
    return None


def differing_texts(a: Run, b: Run) -> float | None:
    """Share of the outputs whose texts differ, of those that both runs have."""
    texts = {row.key: row.text_sha256 for row in b.rows}
    both = [row for row in a.rows if row.key in texts]
    return metrics.ratio(sum(texts[row.key] != row.text_sha256 for row in both), len(both))


def temperature(run: Run) -> float:
    return float(run.setting("sampling.temperature") or 0)


def speed_ratio(a: Run, b: Run) -> float | None:
    same = ("device_name", "dtype", "num_threads")
    if any(a.summary.get(key) != b.summary.get(key) for key in same):
        return None
    if a.setting("schedule.max_num_seqs") != b.setting("schedule.max_num_seqs"):
        return None
    fast, slow = (run.summary.get("tokens_per_second") for run in (a, b))
    return metrics.ratio(fast, slow) if fast and slow else None


def _differs(key: str, a: Run, b: Run) -> str:
    values = [_shown(run.setting(key)) for run in (a, b)]
    return f"{key} is {values[0]} in {a.name} and {values[1]} in {b.name}"


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value:.60}" if isinstance(value, str) else str(value)
