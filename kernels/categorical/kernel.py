"""Draws by inverse CDF inside Triton kernels, as `reference.categorical` makes them.

`first_past` and `pick_block` are called from other kernels; the weights of a row are summed block
by block before they are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_past(weights, quantile, SIZE: tl.constexpr):
    """Index of the first positive weight whose cumulative sum exceeds the quantile, or the last."""
    at = tl.arange(0, SIZE)
    positive = weights > 0
    past = positive & (tl.cumsum(weights, axis=0) > quantile)
    first = tl.min(tl.where(past, at, SIZE), axis=0)
    last = tl.max(tl.where(positive, at, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def pick_block(mass, draw, BLOCKS: tl.constexpr):
    """The block that holds the quantile, and what of the quantile is left inside it."""
    quantile = draw * tl.sum(mass, axis=0)
    block = first_past(mass, quantile, BLOCKS)
    below = tl.sum(tl.where(tl.arange(0, BLOCKS) < block, mass, 0.0), axis=0)
    return block, quantile - below
