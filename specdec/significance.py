"""Whether a difference of pooled ratios can be chance."""

from collections.abc import Sequence

import numpy as np

NUM_SWAPS = 10_000


def swap_p_value(
    a: tuple[Sequence[float], Sequence[float]],
    b: tuple[Sequence[float], Sequence[float]],
    *,
    seed: int = 0,
) -> float | None:
    """Two-sided p of the difference of two pooled ratios over the same prompts.

    A randomisation test: were the two runs alike, each prompt's results could as well have been
    the other run's, so the difference is compared with those after swapping a random half of the
    prompts. Every swap is tried where there are at most `NUM_SWAPS`. Two runs that are equal have
    p = 1; n prompts cannot give less than 2 / 2^n.

    Args:
        a, b: (numerators, denominators), one value a prompt, in the same order of prompts.

    Returns:
        p, or None where a ratio is undefined.
    """
    first, second = (np.array(values, dtype=np.float64).T for values in (a, b))  # [prompts, 2]
    num_prompts = len(first)
    if not num_prompts or not first[:, 1].sum() or not second[:, 1].sum():
        return None
    observed = _differences(np.zeros((1, num_prompts)), first, second)[0]
    if 2**num_prompts <= NUM_SWAPS:
        swaps = (np.arange(2**num_prompts)[:, None] >> np.arange(num_prompts)) & 1
    else:
        swaps = np.random.default_rng(seed).integers(0, 2, (NUM_SWAPS, num_prompts))
    # As far as the observed one, but for rounding; an undefined one counts as such.
    nearer = np.abs(_differences(swaps, first, second)) < abs(observed) - 1e-12
    extreme = len(swaps) - int(nearer.sum())
    if 2**num_prompts <= NUM_SWAPS:
        return extreme / len(swaps)  # the observed one is among them
    return (extreme + 1) / (len(swaps) + 1)


def _differences(swaps: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Differences of the pooled ratios [n] where swaps [n, prompts] are 1; NaN where undefined."""
    moved = swaps @ (second - first)  # [n, 2]
    a, b = first.sum(axis=0) + moved, second.sum(axis=0) - moved
    with np.errstate(divide="ignore", invalid="ignore"):
        return a[:, 0] / a[:, 1] - b[:, 0] / b[:, 1]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p values adjusted for their number (Holm, 1979), in the same order; None stays and is not
    counted."""
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, index) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        adjusted[index] = least
    return adjusted
