"""The rows that a draft head runs, in plain torch: those of the step, and one more a draft.

The seeds' names are kept where the seed text (engine walkthrough) describes the function. Nothing
here waits for the device, and all sizes come from shapes and host integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.step.reference import NULL_SLOT, Committed


class DraftRows(NamedTuple):
    """Rows of one draft step after the first: m a request."""

    positions: Tensor  # [R * m]
    slot_mapping: Tensor  # [R * m]
    row_valid: Tensor  # [R * m] bool
    query_start: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    logits_indices: Tensor  # [R]
    cu_num_logits: Tensor  # [R + 1]


def prepare_eagle_inputs(
    committed: Committed,
    *,
    positions: Tensor,
    query_start: Tensor,
    request_slots: Tensor,
    max_query_len: int,
    token_ids: Tensor,
    num_tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """The token after each row, and where each request's last committed row stands.

    Ids are shifted left by one: a request's last real row takes the newly committed token, or the
    known next one in the middle of a prompt. Rows of rejected drafts hold any valid id.

    Args:
        positions: [T] of the step's rows.
        query_start: [R + 1].
        request_slots: [R].
        max_query_len: at least the longest query.
        token_ids: [S, L] of the state, before the outcome is written.
        num_tokens: [S], likewise.

    Returns:
        Ids [T], and positions of `committed.last_rows` [R].
    """
    lens = query_start.diff()
    numbers = torch.arange(len(lens), device=lens.device)
    request = torch.repeat_interleave(numbers, lens, output_size=len(positions))
    slots = request_slots[request]
    following = positions + 1
    index = following - num_tokens[slots]
    width = committed.token_ids.shape[1]
    fresh = committed.token_ids[request, index.clamp(0, width - 1)].clamp(min=0)
    known = token_ids[slots, following]
    ids = torch.where((index >= 0) & (index < width), fresh, known)
    return ids, positions[committed.last_rows]


def prepare_eagle_decode(
    last: Tensor,
    block_tables: Tensor,
    *,
    num_draft_tokens: int,
    num_depths: int,
    block_size: int,
) -> tuple[DraftRows, ...]:
    """Rows of the draft steps 1, 2, ... of a chain, in lookahead slots.

    Before n layers have taken their first turns, step i runs the i rows up to `last`; in a later
    turn each layer runs the last n drafts. With one layer: one row a step.

    Args:
        last: [R] position of the last row with the target's hidden state.
        block_tables: [R, M].
        num_draft_tokens: K; K - 1 steps are prepared.
        num_depths: n.

    Returns:
        One record a step; rows before position 0 are padding.
    """
    numbers = torch.arange(len(last) + 1, device=last.device)
    steps = []
    for step in range(1, num_draft_tokens):
        count, ahead = min(step, num_depths), step // num_depths * num_depths
        offset = torch.arange(1 - count, 1, device=last.device) + ahead
        positions = (last[:, None] + offset).flatten()
        valid = positions >= 0
        positions = positions.clamp(min=0)
        column = torch.div(positions, block_size, rounding_mode="floor")
        blocks = block_tables[numbers[:-1].repeat_interleave(count), column]
        slots = torch.where(valid, blocks * block_size + positions % block_size, NULL_SLOT)
        starts = numbers * count
        rows = (positions, slots, valid, starts, last + ahead + 1, starts[1:] - 1, numbers)
        steps.append(DraftRows(*rows))
    return tuple(steps)


def moved_back(
    positions: Tensor,
    row_valid: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    query_start: Tensor,
    max_query_len: int,
    depth: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step's rows `depth` positions earlier, as the later layers of a draft head take them.

    Args:
        positions, row_valid: [T].
        seq_lens: [R].
        block_tables: [R, M].
        query_start: [R + 1].
        max_query_len: at least the longest query.

    Returns:
        Positions, cache slots and validity [T], where rows before position 0 are padding, and the
        sequence lengths [R].
    """
    lens = query_start.diff()
    numbers = torch.arange(len(lens), device=lens.device)
    request = torch.repeat_interleave(numbers, lens, output_size=len(positions))
    valid = row_valid & (positions >= depth)
    moved = torch.where(valid, positions - depth, 0)
    blocks = block_tables[request, torch.div(moved, block_size, rounding_mode="floor")]
    slots = torch.where(valid, blocks * block_size + moved % block_size, NULL_SLOT)
    return moved, slots, valid, (seq_lens - depth).clamp(min=0)
