"""Randomness as keys: every number is Philox of (seed, round start, offset, node, purpose, lane).

*Round start* is the position of the round's first draft. It strictly increases over a request's
rounds, so no draw is consulted in two rounds, which bottom-up rules (block verification) need.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.philox.reference import philox, to_exponential, to_uniform


class Purpose(IntEnum):
    """Streams that never share a number."""

    DRAFT = 0  # the drafter's own draw
    ACCEPT = 1  # the uniform that accepts or rejects a draft
    RECOVER = 2  # the draw from the residual
    BONUS = 3  # the draw from the target when all drafts were accepted
    TARGET = 4  # Gumbel noise by absolute position, as plain sampling uses it


class Keys(NamedTuple):
    seeds: Tensor  # [R] int64
    round_start: Tensor  # [R] int64


def uniform(keys: Keys, purpose: Purpose, offset: Tensor | int, node: Tensor | int = 0) -> Tensor:
    """One fp32 uniform in [0, 1) a request, or a row of them.

    Args:
        offset: draft index in the round: an int or [R] gives [R]; [1, K] or [R, K] gives [R, K].
    """
    counter = offset + (node << 16)  # integers stay on the host: nothing is copied for them
    seeds, start = keys.seeds, keys.round_start
    if isinstance(counter, Tensor) and counter.dim() == 2:
        seeds, start = seeds[:, None], start[:, None]
    return to_uniform(philox(seeds, 0, start, counter, int(purpose))[0])


def exponential(
    keys: Keys, purpose: Purpose, offset: Tensor | int, num_lanes: int, node: Tensor | int = 0
) -> Tensor:
    """Exp(1) races [R, num_lanes] fp32; lane v is word v mod 4 of counter block v // 4.

    `argmin(e / p)`, or `argmax(log p - log e)`, is a draw from p (Gumbel-max in another form).
    """
    counter = offset + (node << 16)
    if isinstance(counter, Tensor) and counter.dim() == 1:
        counter = counter[:, None]
    seeds, start = keys.seeds[:, None], keys.round_start[:, None]
    blocks = torch.arange((num_lanes + 3) // 4, device=seeds.device)[None, :]
    words = torch.stack(philox(seeds, blocks, start, counter, int(purpose)), dim=-1)
    return to_exponential(words.flatten(1)[:, :num_lanes])  # of [R, blocks, 4]


def target_exponential(seeds: Tensor, positions: Tensor, num_lanes: int) -> Tensor:
    """Races [n, num_lanes] of rows that sample absolute `positions` [n], as plain decoding does.

    The same whatever round, K or drafter a position is reached by.
    """
    return exponential(Keys(seeds, positions), Purpose.TARGET, 0, num_lanes)
