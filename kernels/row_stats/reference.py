"""Row statistics of logits: what turns each row into probabilities, with the mass of its blocks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

SMALL_VOCABULARY = 32768


class RowStats(NamedTuple):
    """What turns n rows of logits into probabilities over ids below the vocabulary's size.

    Scaled logit x = (logit - max) * inv_temperature; p = exp(x - lse) where x >= cutoff, else 0.
    A greedy row is one-hot at argmax. In a row that is not finite p is 0 everywhere.
    """

    max: Tensor  # [n] fp32; not finite on an invalid row
    inv_temperature: Tensor  # [n] fp32, 1 on greedy rows
    cutoff: Tensor  # [n] fp32: +inf on invalid rows, 0 on greedy ones, -inf or the filters' own
    lse: Tensor  # [n] fp32, log of the sum of exp(x) where x >= cutoff; 0 on greedy rows
    greedy: Tensor  # [n] bool
    argmax: Tensor  # [n] int64, lowest id on ties, `invalid` on rows that are not finite
    block_mass: Tensor | None  # [n, C] fp32, sum of exp(x) where x >= cutoff, block by block; None
    # where all rows are greedy


def block_size(vocab_size: int) -> int:
    """Ids of a block: of the vocabulary alone, so that a row's sums never depend on the batch.

    A multiple of `categorical.BLOCK`; 30 to 64 blocks a row keep a GPU busy with four rows.
    """
    return 1024 if vocab_size <= SMALL_VOCABULARY else 4096


def row_requests(cu_num_logits: Tensor, num_rows: int) -> Tensor:
    """The request [num_rows] int64 that owns each row; rows past the last belong to the last.

    Args:
        cu_num_logits: [R + 1] int64; request r owns rows cu[r] .. cu[r + 1] - 1. A batch's rows
            are owned alike, by its `query_start`.
    """
    rows = torch.arange(num_rows, device=cu_num_logits.device)
    owner = torch.searchsorted(cu_num_logits[1:].contiguous(), rows, right=True)
    return owner.clamp(max=cu_num_logits.shape[0] - 2)


def request_rows(
    num_rows: int,
    slots: Tensor,
    cu_num_logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sampling parameters [S] of slots as those of logits rows [num_rows], in the same order.

    Args:
        slots: [R] int64; cu_num_logits: [R + 1] int64, as in `row_stats`.
    """
    owner = slots[row_requests(cu_num_logits, num_rows)]
    return temperature[owner], top_k[owner], top_p[owner], min_p[owner]


def row_stats(
    logits: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
    all_greedy: bool = False,
    slots: Tensor | None = None,
    cu_num_logits: Tensor | None = None,
) -> RowStats:
    """Statistics of rows [n, V]; columns at or past `vocab_size` are padding.

    Args:
        temperature: [n] fp32, greedy below `epsilon`; with `slots` [S], see there.
        invalid: the argmax of a row that has a NaN or no finite maximum.
        all_greedy: every row is greedy and only its maximum matters; temperature goes unread.
        slots: [R] int64; row i then takes temperature[slots[r]] of the request r that owns it, as
            `cu_num_logits` [R + 1] says (`row_requests`).
    """
    if all_greedy:
        top, finite, argmax = _maxima(logits[:, :vocab_size], invalid)
        zeros = torch.zeros_like(top)
        cut = torch.where(finite, 0.0, torch.inf)
        return RowStats(top, zeros + 1, cut, zeros, torch.ones_like(finite), argmax, None)
    if slots is not None and cu_num_logits is not None:
        temperature = temperature[slots[row_requests(cu_num_logits, len(logits))]]
    known: dict[str, Any] = {"vocab_size": vocab_size, "epsilon": epsilon, "invalid": invalid}
    return kept_stats(logits, temperature, None, **known)


def kept_stats(
    logits: Tensor,
    temperature: Tensor,
    cutoff: Tensor | None,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
) -> RowStats:
    """`row_stats` of the ids whose scaled logit is at least `cutoff` [n] fp32; None keeps all."""
    real = logits[:, :vocab_size]
    top, finite, argmax = _maxima(real, invalid)
    greedy = temperature < epsilon
    inv_temperature = torch.where(greedy, 1.0, 1.0 / temperature)
    scaled = (real.float() - top[:, None]).mul_(inv_temperature[:, None])
    weights = scaled.exp()
    if cutoff is None:
        cutoff = torch.full_like(top, -torch.inf)
    else:
        weights = torch.where(scaled >= cutoff[:, None], weights, 0.0)
    size = min(block_size(vocab_size), vocab_size)  # a small vocabulary is one block, unpadded
    if vocab_size % size:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % size))
    mass = weights.unflatten(1, (-1, size)).sum(-1)
    zeros = torch.zeros_like(top)
    return RowStats(
        max=top,
        inv_temperature=inv_temperature,
        cutoff=torch.where(finite, torch.where(greedy, zeros, cutoff), torch.inf),
        lse=torch.where(finite & ~greedy, mass.sum(-1).log(), zeros),
        greedy=greedy,
        argmax=argmax,
        block_mass=mass,
    )


def _maxima(real: Tensor, invalid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum [n] fp32 of each row, whether it is finite, and where it is."""
    top, argmax = real.max(-1)
    finite = torch.isfinite(top)
    return top.float(), finite, torch.where(finite, argmax, invalid)
