"""Row statistics of logits: what turns each row into probabilities, with the mass of its blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

SMALL_VOCABULARY = 32768


class RowStats(NamedTuple):
    """Scaled logit x = (logit - max) * inv_temperature, over ids below the vocabulary's size."""

    max: Tensor  # [n] fp32; not finite on an invalid row
    inv_temperature: Tensor  # [n] fp32, 1 on greedy rows
    cutoff: Tensor  # [n] fp32: +inf on invalid rows, 0 on greedy ones, -inf or the filters' own
    lse: Tensor  # [n] fp32, log of the sum of exp(x) where x >= cutoff; 0 on greedy rows
    greedy: Tensor  # [n] bool
    argmax: Tensor  # [n] int64, lowest id on ties, `invalid` on rows that are not finite
    block_mass: Tensor | None  # [n, C] fp32, sum of exp(x) where x >= cutoff, block by block


def block_size(vocab_size: int) -> int:
    """Ids of a block: of the vocabulary alone, so that a row's sums never depend on the batch.

    A multiple of `categorical.BLOCK`; 30 to 64 blocks a row keep a GPU busy with four rows.
    """
    return 1024 if vocab_size <= SMALL_VOCABULARY else 4096


def row_stats(
    logits: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
    all_greedy: bool = False,
    cutoff: Tensor | None = None,
    slots: Tensor | None = None,
    cu_num_logits: Tensor | None = None,
) -> RowStats:
    """Statistics of rows [n, V]; columns at or past `vocab_size` are padding.

    Args:
        temperature: [n] fp32, greedy below `epsilon`; with `slots` [S], see there.
        invalid: the argmax of a row that has a NaN or no finite maximum.
        all_greedy: every row is greedy and only its maximum matters; temperature goes unread.
        cutoff: [n] fp32 threshold on x where rows have filters. The kernels of filtered rows are
            `kernels.cutoff`'s, so that the kernel of this op has no such argument.
        slots: [R] int64; row i then takes temperature[slots[r]] of the request r that owns it, as
            `cu_num_logits` [R + 1] says (rows past the last belong to the last).
    """
    if slots is not None and cu_num_logits is not None and not all_greedy:
        rows = torch.arange(logits.shape[0], device=logits.device)
        owner = torch.searchsorted(cu_num_logits[1:].contiguous(), rows, right=True)
        temperature = temperature[slots[owner.clamp(max=slots.shape[0] - 1)]]
    real = logits[:, :vocab_size].float()
    top, argmax = real.max(-1)
    finite = torch.isfinite(top)
    argmax = torch.where(finite, argmax, invalid)
    zeros = torch.zeros_like(top)
    if all_greedy:
        cut = torch.where(finite, 0.0, torch.inf)
        return RowStats(top, zeros + 1, cut, zeros, torch.ones_like(finite), argmax, None)
    greedy = temperature < epsilon
    inv_temperature = torch.where(greedy, 1.0, 1.0 / temperature)
    scaled = (real - top[:, None]) * inv_temperature[:, None]
    cut = torch.full_like(top, -torch.inf) if cutoff is None else cutoff
    weights = torch.where(scaled >= cut[:, None], scaled.exp(), 0.0)
    size = min(block_size(vocab_size), vocab_size)  # a small vocabulary is one block, unpadded
    blocks = torch.nn.functional.pad(weights, (0, -vocab_size % size))
    mass = blocks.view(logits.shape[0], -1, size).sum(-1)
    return RowStats(
        max=top,
        inv_temperature=inv_temperature,
        cutoff=torch.where(finite, torch.where(greedy, zeros, cut), torch.inf),
        lse=torch.where(finite & ~greedy, mass.sum(-1).log(), zeros),
        greedy=greedy,
        argmax=argmax,
        block_mass=mass,
    )
