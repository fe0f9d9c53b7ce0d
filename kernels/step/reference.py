"""What a step does before its target and after it, in plain torch: rows made from counts on the
device, the outcome trimmed and written back.

The seeds' names are kept where the seed text (engine walkthrough) describes the function. Nothing
here waits for the device, and all sizes come from shapes and host integers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.penalties.reference import ONE_OUTPUT

NULL_SLOT = 0  # cache slot that padding rows write to
PLACEHOLDER = -1  # no token here
INVALID = -2  # a token drawn from a row without a distribution
RUNNING, STOP, LENGTH, ERROR = range(4)  # why a request ended


class StepRows(NamedTuple):
    """Rows of a step, and what is pending for its requests. T rows, N logits rows, R requests."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    row_valid: Tensor  # [T] bool
    query_start: Tensor  # [R + 1]
    cu_num_logits: Tensor  # [R + 1]
    seq_lens: Tensor  # [R]
    logits_indices: Tensor  # [N]
    block_tables: Tensor  # [R, M]
    draft_token_ids: Tensor  # [R, K]
    draft_is_delta: Tensor  # [R, K] bool
    num_drafts: Tensor  # [R]
    num_tokens: Tensor  # [R]
    seeds: Tensor  # [R]


class Committed(NamedTuple):
    """What stands of a verification, trimmed by end-of-sequence, length and errors; all int64."""

    token_ids: Tensor  # [R, W] padded with PLACEHOLDER; W = K + 1
    num_committed: Tensor  # [R]
    num_accepted: Tensor  # [R] accepted drafts among the committed tokens
    num_drafted: Tensor  # [R] drafts that were verified
    num_tokens: Tensor  # [R] new prompt + output length
    num_computed_tokens: Tensor  # [R]
    last_rows: Tensor  # [R] batch row that predicted the last token (or a chunk's last row)
    finish_reason: Tensor  # [R] RUNNING, STOP, LENGTH or ERROR; as it was where nothing was decided


def prepare_step(
    rows: Tensor,
    *,
    num_rows: int,
    num_logits: int,
    max_query_len: int,
    block_size: int,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    finish_reason: Tensor,
    draft_token_ids: Tensor,
    draft_is_delta: Tensor,
    num_drafts: Tensor,
    seeds: Tensor,
    block_tables: Tensor,
) -> StepRows:
    """Exact ids, positions and slots of the planned rows, from the device's own counts.

    Rows past a request's real tokens, and all rows of one that is not running, are padding: id 0,
    position 0, the null slot.

    Args:
        rows: [3, R] slots, rows and logits rows of each request.
        num_rows, num_logits: their sums.
        max_query_len: at least the longest query; grids are made from it.
        token_ids: [S, L]; like all that follow, of the state, a row a slot.
    """
    slots, query_lens, logits_lens = rows
    device, num_requests = rows.device, rows.shape[1]
    query_start = F.pad(query_lens.cumsum(0), (1, 0))
    cu_num_logits = F.pad(logits_lens.cumsum(0), (1, 0))
    numbers = torch.arange(num_requests, device=device)
    request = torch.repeat_interleave(numbers, query_lens, output_size=num_rows)
    offset = torch.arange(num_rows, device=device) - query_start[request]
    length, computed = num_tokens[slots], num_computed_tokens[slots]
    running = finish_reason[slots] == RUNNING
    total = torch.where(running, length + num_drafts[slots], 0)
    positions = computed[request] + offset
    valid = positions < total[request]
    positions = torch.where(valid, positions, 0)
    input_ids = token_ids[slots[request], positions]
    draft_index = positions - length[request]
    if draft_token_ids.shape[1]:
        drafts = draft_token_ids[slots[request], draft_index.clamp(min=0)].clamp(min=0)
        input_ids = torch.where(draft_index >= 0, drafts, input_ids)
    tables = block_tables[slots]
    blocks = tables[request, torch.div(positions, block_size, rounding_mode="floor")]
    slot_mapping = blocks * block_size + positions % block_size

    logits_request = torch.repeat_interleave(numbers, logits_lens, output_size=num_logits)
    logits_offset = torch.arange(num_logits, device=device) - cu_num_logits[logits_request]
    first_row = query_start[:-1] + (length - 1 - computed).clamp(min=0)
    last_row = query_start[1:] - 1
    logits_indices = first_row[logits_request] + logits_offset
    return StepRows(
        input_ids=torch.where(valid, input_ids, 0),
        positions=positions,
        slot_mapping=torch.where(valid, slot_mapping, NULL_SLOT),
        row_valid=valid,
        query_start=query_start,
        cu_num_logits=cu_num_logits,
        seq_lens=torch.minimum(computed + query_lens, total),
        logits_indices=torch.minimum(logits_indices, last_row[logits_request]),
        block_tables=tables,
        draft_token_ids=draft_token_ids[slots],
        draft_is_delta=draft_is_delta[slots],
        num_drafts=num_drafts[slots],
        num_tokens=length,
        seeds=seeds[slots],
    )


def get_num_sampled_and_rejected(
    num_accepted: Tensor, num_drafts: Tensor, cu_num_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens that a verification gives each request, and drafts that it refused, both [R].

    A request without logits rows, a chunk of a prompt, gets and loses none.
    """
    has_rows = cu_num_logits[1:] > cu_num_logits[:-1]
    num_sampled = torch.where(has_rows, num_accepted + 1, 0)
    return num_sampled, torch.where(has_rows, num_drafts - num_accepted, 0)


def trim(
    token_ids: Tensor,
    rows: Tensor,
    num_accepted: Tensor,
    num_sampled: Tensor,
    *,
    request_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    eos_token_ids: Tensor,
    ignore_eos: Tensor,
    max_len: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_drafts: Tensor,
    finish_reason: Tensor,
) -> Committed:
    """What stands of verified tokens, and the new counts: see `specdec.postprocess`.

    Args:
        token_ids, rows: [R, W] of the verification.
        num_accepted, num_sampled: [R].
        request_slots, seq_lens: [R].
        query_start: [R + 1].
        eos_token_ids: [E].
        ignore_eos: [S]; like all that follow, of the state before the step's committed.
    """
    width, slots = token_ids.shape[1], request_slots
    running = finish_reason[slots] == RUNNING
    num_sampled = torch.where(running, num_sampled, 0)
    index = torch.arange(width, device=token_ids.device)
    sampled = index[None, :] < num_sampled[:, None]
    is_eos = torch.isin(token_ids, eos_token_ids) & ~ignore_eos[slots, None] & sampled
    is_invalid = (token_ids == INVALID) & sampled
    end = torch.where(is_eos, index, width).amin(dim=1)
    bad = torch.where(is_invalid, index, width).amin(dim=1)
    length, limit = num_tokens[slots], max_len[slots]
    kept = torch.minimum(torch.minimum(num_sampled, end + 1), limit - length)
    kept = torch.minimum(kept, bad)
    reason = torch.where(length + kept >= limit, LENGTH, RUNNING)
    reason = torch.where(end < kept, STOP, reason)
    reason = torch.where((bad == kept) & (bad < width), ERROR, reason)
    started = num_sampled > 0
    last_rows = rows.gather(1, (kept - 1).clamp(min=0)[:, None])[:, 0]
    before = num_computed_tokens[slots]
    computed = torch.where(running, seq_lens, before)
    chunk_rows = query_start[:-1] + (computed - before - 1).clamp(min=0)
    return Committed(
        token_ids=torch.where(index[None, :] < kept[:, None], token_ids, PLACEHOLDER),
        num_committed=kept,
        num_accepted=torch.minimum(num_accepted, kept),
        num_drafted=torch.where(started, num_drafts[slots], 0),
        num_tokens=length + kept,
        num_computed_tokens=torch.where(started, length + kept - 1, computed),
        last_rows=torch.where(started, last_rows, chunk_rows),
        finish_reason=torch.where(started, reason, finish_reason[slots]),
    )


def post_update_(
    committed: Committed,
    drafts: Tensor,
    is_delta: Tensor,
    num_proposed: Tensor,
    *,
    request_slots: Tensor,
    token_ids: Tensor,
    max_len: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    finish_reason: Tensor,
    draft_token_ids: Tensor,
    draft_is_delta: Tensor,
    num_drafts: Tensor,
    output_bin_counts: Tensor | None = None,
) -> Tensor:
    """Writes a step's outcome into the state; drafts that could not be committed before `max_len`
    are dropped. Requests that share a slot are padding: they write what is there.

    Args:
        drafts, is_delta: [R, P], P <= K.
        num_proposed: [R].
        request_slots: [R].
        token_ids: [S, L]; like all that follow, of the state, a row a slot.
        output_bin_counts: [S, V] int32 packed counts of tokens (`kernels.penalties`), to which each
            committed token is added.

    Returns:
        [R, W + 6] int64 for the host: the committed token ids, then num_committed, num_accepted,
        num_drafted, num_computed_tokens, finish_reason and the drafts now pending.
    """
    slots, proposed, k = request_slots, drafts.shape[1], draft_token_ids.shape[1]
    width = committed.token_ids.shape[1]
    kept = committed.token_ids >= 0
    before = committed.num_tokens - committed.num_committed
    column = before[:, None] + torch.arange(width, device=slots.device)
    old = token_ids[slots[:, None], column]
    token_ids[slots[:, None], column] = torch.where(kept, committed.token_ids, old)
    if output_bin_counts is not None:
        place = (slots[:, None].expand_as(kept), committed.token_ids.clamp(min=0))
        added = kept.to(output_bin_counts.dtype) * ONE_OUTPUT
        output_bin_counts.index_put_(place, added, accumulate=True)
    num_tokens[slots] = committed.num_tokens
    num_computed_tokens[slots] = committed.num_computed_tokens
    finish_reason[slots] = committed.finish_reason
    room = max_len[slots] - committed.num_tokens - 1
    going = (committed.num_committed > 0) & (committed.finish_reason == RUNNING)
    pending = torch.minimum(num_proposed.clamp(max=proposed), room).clamp(min=0) * going
    padded = F.pad(drafts.to(draft_token_ids.dtype), (0, k - proposed), value=PLACEHOLDER)
    is_pending = torch.arange(k, device=slots.device)[None, :] < pending[:, None]
    draft_token_ids[slots] = torch.where(is_pending, padded, PLACEHOLDER)
    draft_is_delta[slots] = F.pad(is_delta.to(torch.bool), (0, k - proposed), value=True)
    num_drafts[slots] = pending
    counts = (
        committed.num_committed,
        committed.num_accepted,
        committed.num_drafted,
        committed.num_computed_tokens,
        committed.finish_reason,
        pending,
    )
    return torch.cat([committed.token_ids, torch.stack(counts, dim=1)], dim=1)
