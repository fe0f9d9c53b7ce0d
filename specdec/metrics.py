"""Acceptance, defined once. Everything that reports an acceptance number takes it from here.

A round is one decode step of one request as `(drafted, accepted, committed)` after trimming by EOS,
stop or limit; a step without drafts is a round too. The token that a prefill yields belongs to no
round. Quotients without a denominator are None, which JSON writes as null.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

NUM_RESAMPLES = 10_000
LOW_REPEAT_SHARE = 0.05  # prompts below it count as free of loops


@dataclass(frozen=True)
class Output:
    """One finished output: a prompt's turn and sample."""

    prompt_id: str
    turn: int  # from 0
    category: str
    sample: int  # from 0
    token_ids: tuple[int, ...]  # after trimming, the prefill's token first
    rounds: Sequence[tuple[int, int, int]]  # (drafted, accepted, committed)
    num_bytes: int  # UTF-8 text behind the rounds' committed tokens
    seconds: float  # from admission to the last token
    finish_reason: str


class Counts(NamedTuple):
    """Sums over rounds; the arrays are indexed by draft position, from 0."""

    rounds: int
    drafted: int
    accepted: int
    committed: int
    drafted_at: np.ndarray  # [K] rounds that verified a draft there
    accepted_at: np.ndarray  # [K] rounds that kept it
    tried_at: np.ndarray  # [K] rounds that kept all before it and then decided on it


def count_rounds(rounds: Iterable[tuple[int, int, int]], num_positions: int = 0) -> Counts:
    """Sum rounds (case M1: scheduled [3, 3, 3, 1], accepted [3, 1, 0, 1] give 10 and 5).

    A draft past the end of an output (its round was trimmed before it) was verified, so it is in
    `drafted`; but nothing was decided about it, so it is not in `tried_at`.

    Args:
        num_positions: least K of the arrays.
    """
    table = np.array(list(rounds), dtype=np.int64).reshape(-1, 3)
    drafted, accepted, committed = table.T
    positions = np.arange(max(num_positions, int(drafted.max(initial=0))))[None, :]
    was_drafted = drafted[:, None] > positions
    was_kept = (accepted[:, None] > positions) & was_drafted
    rejected_here = (accepted[:, None] == positions) & (committed > accepted)[:, None] & was_drafted
    return Counts(
        rounds=len(table),
        drafted=int(drafted.sum()),
        accepted=int(accepted.sum()),
        committed=int(committed.sum()),
        drafted_at=was_drafted.sum(axis=0),
        accepted_at=was_kept.sum(axis=0),
        tried_at=(was_kept | rejected_here).sum(axis=0),
    )


def ratio(numerator: float, denominator: float) -> float | None:
    return float(numerator) / float(denominator) if denominator else None


def acceptance(counts: Counts) -> dict[str, Any]:
    """Pooled acceptance (ratios of sums).

    `acceptance_length` is committed / rounds; `mean_acceptance_length` is 1 + accepted / rounds,
    which differs from it in trimmed rounds only. `per_position_joint[j]` is the share of the drafts
    at position j that were kept, `per_position_conditional[j]` the same among rounds that had kept
    every draft before it.
    """
    kept_share = ratio(counts.accepted, counts.rounds)
    return {
        "acceptance_length": ratio(counts.committed, counts.rounds),
        "mean_acceptance_length": None if kept_share is None else 1 + kept_share,
        "acceptance_rate": ratio(counts.accepted, counts.drafted),
        "per_position_conditional": _ratios(counts.accepted_at, counts.tried_at),
        "per_position_joint": _ratios(counts.accepted_at, counts.drafted_at),
        "num_verify_rounds": counts.rounds,
        "num_drafted": counts.drafted,
        "num_accepted": counts.accepted,
    }


def _ratios(numerators: np.ndarray, denominators: np.ndarray) -> list[float | None]:
    return [ratio(a, b) for a, b in zip(numerators, denominators, strict=True)]


def bootstrap_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0
) -> tuple[float | None, float | None]:
    """95% percentile interval of sum(numerators) / sum(denominators), prompts resampled.

    Args:
        numerators, denominators: one value a prompt, all of its turns and samples together.

    Returns:
        (low, high), or (None, None) for fewer than two prompts.
    """
    return interval(resampled_ratios(numerators, denominators, seed=seed))


def paired_difference(
    a: tuple[Sequence[float], Sequence[float]],
    b: tuple[Sequence[float], Sequence[float]],
    *,
    seed: int = 0,
) -> tuple[float | None, float | None, float | None]:
    """Difference of pooled ratios a - b over the same prompts, with its 95% interval.

    Args:
        a, b: (numerators, denominators), one value a prompt, in the same order of prompts.

    Returns:
        (difference, low, high); None where a ratio or, for one prompt, the interval is undefined.
    """
    ratios = [ratio(float(np.sum(n)), float(np.sum(d))) for n, d in (a, b)]
    if ratios[0] is None or ratios[1] is None:
        return None, None, None
    draws = resampled_ratios(*a, seed=seed) - resampled_ratios(*b, seed=seed)
    return ratios[0] - ratios[1], *interval(draws)


def quotient_interval(
    a: tuple[Sequence[float], Sequence[float]],
    b: tuple[Sequence[float], Sequence[float]],
    *,
    seed: int = 0,
) -> tuple[float | None, float | None]:
    """95% percentile interval of the quotient of two pooled ratios whose parts do not pair.

    Args:
        a, b: (numerators, denominators), one value a part, as tokens and seconds of a turn.

    Returns:
        (low, high), or (None, None) where either has fewer than two parts.
    """
    above, below = (resampled_ratios(*x, seed=seed + i) for i, x in enumerate((a, b)))
    return interval(above / below)


def resampled_ratios(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0, block: int = 1000
) -> np.ndarray:
    """Ratios of the sums over resampled prompts [NUM_RESAMPLES], NaN where undefined; the draw
    depends on the number of prompts and the seed alone, so that two calls pair."""
    values = np.array([numerators, denominators], dtype=np.float64).T
    num_prompts = len(values)
    if num_prompts < 2:
        return np.full(1, np.nan)
    rng = np.random.default_rng(seed)
    shares = np.full(num_prompts, 1 / num_prompts)
    sums = np.concatenate(
        [
            rng.multinomial(num_prompts, shares, size=block) @ values
            for _ in range(NUM_RESAMPLES // block)
        ]
    )
    return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] != 0)


def interval(draws: np.ndarray) -> tuple[float | None, float | None]:
    """95% percentile interval of finite draws; (None, None) where there are none."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return None, None
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def repeated_ngrams(token_ids: Sequence[int], n: int = 8) -> tuple[int, int]:
    """(n-grams that occurred before in the same output, all of its n-grams)."""
    total = max(0, len(token_ids) - n + 1)
    distinct = {tuple(token_ids[i : i + n]) for i in range(total)}
    return total - len(distinct), total


def ids_sha256(token_ids: Sequence[int]) -> str:
    """SHA-256 of one output's ids as a compact JSON list."""
    return _json_sha256([int(i) for i in token_ids])


def output_sha256(outputs: Iterable[Sequence[int]]) -> str:
    """SHA-256 of the compact JSON list of each output's ids."""
    return _json_sha256([[int(i) for i in ids] for ids in outputs])


def _json_sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()


def by_prompt(outputs: Iterable[Output]) -> dict[str, Counts]:
    """Counts of each prompt, its turns and samples together, in order of first appearance."""
    rounds: dict[str, list] = defaultdict(list)
    for output in outputs:
        rounds[output.prompt_id].extend(output.rounds)
    return {prompt_id: count_rounds(r) for prompt_id, r in rounds.items()}


def summarize(outputs: Sequence[Output], num_draft_tokens: int, *, seed: int = 0) -> dict[str, Any]:
    """Every acceptance number of a run.

    Args:
        outputs: in prompt-file order, then turn, then sample.
    """
    counts = count_rounds([r for o in outputs for r in o.rounds], num_draft_tokens)
    repeats: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for output in outputs:
        again, total = repeated_ngrams(output.token_ids)
        repeats[output.prompt_id][0] += again
        repeats[output.prompt_id][1] += total
    repeated, possible = zip(*repeats.values(), strict=True) if repeats else ((), ())
    fresh_ids = {p for p, (r, t) in repeats.items() if r < LOW_REPEAT_SHARE * max(t, 1)}
    fresh = [o for o in outputs if o.prompt_id in fresh_ids]
    fresh_counts = count_rounds([r for o in fresh for r in o.rounds])
    return {
        **acceptance(counts),
        "acceptance_length_ci95": list(_pooled_interval(outputs, seed)),
        "acceptance_length_low_repeat": ratio(fresh_counts.committed, fresh_counts.rounds),
        "acceptance_length_low_repeat_ci95": list(_pooled_interval(fresh, seed)),
        "num_prompts_low_repeat": len(fresh_ids),
        "num_prompts": len(repeats),
        "num_outputs": len(outputs),
        "num_output_tokens": sum(len(o.token_ids) for o in outputs),
        "num_errors": sum(o.finish_reason == "error" for o in outputs),
        "repeated_8gram_share": ratio(sum(repeated), sum(possible)),
        "repeated_8gram_share_ci95": list(bootstrap_interval(repeated, possible, seed=seed)),
        "bytes_per_round": ratio(sum(o.num_bytes for o in outputs), counts.rounds),
        "output_sha256": output_sha256([o.token_ids for o in outputs]),
    }


def _pooled_interval(outputs: Sequence[Output], seed: int) -> tuple[float | None, float | None]:
    counts = by_prompt(outputs).values()
    return bootstrap_interval([c.committed for c in counts], [c.rounds for c in counts], seed=seed)


def per_prompt_columns(num_draft_tokens: int) -> list[str]:
    positions = range(1, num_draft_tokens + 1)
    return [
        *("prompt_id", "turn", "category", "sample", "text_sha256", "num_tokens", "rounds"),
        *("expected_rounds", "var_rounds"),
        *(f"accepted_{j}" for j in positions),
        *(f"drafted_{j}" for j in positions),
        "seconds",
    ]


def per_prompt_rows(outputs: Iterable[Output], num_draft_tokens: int) -> list[dict[str, Any]]:
    """Rows of `per_prompt.csv`. `accepted_<j>` counts the rounds that kept at least j drafts and
    `drafted_<j>` those that verified at least j. The expected rounds and their variance are left
    empty: they are for replayed texts, and these were decoded."""
    rows = []
    for output in outputs:
        counts = count_rounds(output.rounds, num_draft_tokens)
        row: dict[str, Any] = {
            "prompt_id": output.prompt_id,
            "turn": output.turn,
            "category": output.category,
            "sample": output.sample,
            "text_sha256": ids_sha256(output.token_ids),
            "num_tokens": len(output.token_ids),
            "rounds": counts.rounds,
            "expected_rounds": "",
            "var_rounds": "",
            "seconds": round(output.seconds, 6),
        }
        for j in range(num_draft_tokens):
            row[f"accepted_{j + 1}"] = int(counts.accepted_at[j])
            row[f"drafted_{j + 1}"] = int(counts.drafted_at[j])
        rows.append(row)
    return rows
