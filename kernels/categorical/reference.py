"""A draw from unnormalised weights with one uniform: inverse CDF over fixed blocks.

The block that holds the quantile is found from block sums, then the id inside that block, so that a
kernel reads a row once to sum and one block again. Fixed blocks fix the order of the sums.
"""

import torch
from torch import Tensor

BLOCK = 1024


def categorical(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Ids [n] int64, each drawn with probability `weights[i, id] / weights[i].sum()`.

    An id of weight 0 is never returned: where rounding carries the quantile past the end, the last
    id of positive weight is. Rows whose weights are all 0 return an arbitrary id in range.

    Args:
        weights: [n, V] fp32, nonnegative, finite.
        uniforms: [n] fp32 in [0, 1).
    """
    num_rows, num_ids = weights.shape
    block = min(BLOCK, num_ids)
    num_blocks = -(-num_ids // block)
    blocks = torch.nn.functional.pad(weights, (0, num_blocks * block - num_ids))
    blocks = blocks.view(num_rows, num_blocks, block)
    sums = blocks.sum(-1)  # [n, num_blocks]
    below = sums.cumsum(-1)
    quantile = uniforms * below[:, -1]
    index = _first_past(quantile, below, sums)
    rows = torch.arange(num_rows, device=weights.device)
    inside = blocks[rows, index]  # [n, block]
    quantile = quantile - (below[rows, index] - sums[rows, index])
    return index * block + _first_past(quantile, inside.cumsum(-1), inside)


def _first_past(quantile: Tensor, cumulative: Tensor, weights: Tensor) -> Tensor:
    """Index [n] of the first positive weight whose cumulative sum exceeds the quantile.

    Asking for a positive weight keeps sums that a parallel scan rounds differently from exposing an
    id of weight 0.
    """
    size = weights.shape[-1]
    index = torch.arange(size, device=weights.device)
    positive = weights > 0
    past = positive & (cumulative > quantile[:, None])
    first = torch.where(past, index, size).amin(-1)
    last = torch.where(positive, index, 0).amax(-1)
    return torch.where(first < size, first, last)
