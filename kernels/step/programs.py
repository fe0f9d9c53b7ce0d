"""The Triton programs behind `kernel`: one a request, or one a tile of a request's rows.

All integers are int64 but flags, which are bool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.penalties.reference import ONE_OUTPUT as _ONE_OUTPUT
from specdec.kernels.step.reference import ERROR as _ERROR
from specdec.kernels.step.reference import INVALID as _INVALID
from specdec.kernels.step.reference import LENGTH as _LENGTH
from specdec.kernels.step.reference import NULL_SLOT as _NULL_SLOT
from specdec.kernels.step.reference import PLACEHOLDER as _PLACEHOLDER
from specdec.kernels.step.reference import RUNNING as _RUNNING
from specdec.kernels.step.reference import STOP as _STOP

NULL_SLOT = tl.constexpr(_NULL_SLOT)
PLACEHOLDER = tl.constexpr(_PLACEHOLDER)
INVALID = tl.constexpr(_INVALID)
RUNNING = tl.constexpr(_RUNNING)
STOP = tl.constexpr(_STOP)
LENGTH = tl.constexpr(_LENGTH)
ERROR = tl.constexpr(_ERROR)
ONE_OUTPUT = tl.constexpr(_ONE_OUTPUT)


@triton.jit
def prepare_step(
    rows_ptr,  # [3, R] slots, rows, logits rows
    token_ids_ptr,  # [S, L], as all up to block_tables_ptr of the state
    token_stride,
    num_tokens_ptr,
    num_computed_ptr,
    finish_reason_ptr,
    draft_token_ids_ptr,  # [S, K]
    draft_is_delta_ptr,  # [S, K]
    num_drafts_ptr,
    seeds_ptr,
    block_tables_ptr,  # [S, M]
    out_input_ids,  # the fields of StepRows
    out_positions,
    out_slot_mapping,
    out_row_valid,
    out_query_start,
    out_cu_num_logits,
    out_seq_lens,
    out_logits_indices,
    out_block_tables,
    out_draft_token_ids,
    out_draft_is_delta,
    out_num_drafts,
    out_num_tokens,
    out_seeds,
    num_requests,
    columns,  # M
    K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    REQUESTS: tl.constexpr,
    K_PAD: tl.constexpr,
):
    request = tl.program_id(0)
    tile = tl.program_id(1)
    other = tl.arange(0, REQUESTS)
    before = other < request
    lens = tl.load(rows_ptr + num_requests + other, mask=before, other=0)
    start = tl.sum(lens, axis=0)
    slot = tl.load(rows_ptr + request)
    query_len = tl.load(rows_ptr + num_requests + request)
    length = tl.load(num_tokens_ptr + slot)
    computed = tl.load(num_computed_ptr + slot)
    pending = tl.load(num_drafts_ptr + slot)
    running = tl.load(finish_reason_ptr + slot) == RUNNING
    total = tl.where(running, length + pending, 0)

    offset = tile * TILE + tl.arange(0, TILE)
    is_row = offset < query_len
    position = computed + offset
    valid = is_row & (position < total)
    position = tl.where(valid, position, 0)
    is_draft = valid & (position >= length)
    known = tl.load(
        token_ids_ptr + slot * token_stride + position, mask=valid & (position < length), other=0
    )
    drafted = tl.load(draft_token_ids_ptr + slot * K + (position - length), mask=is_draft, other=0)
    block = tl.load(block_tables_ptr + slot * columns + position // BLOCK_SIZE, mask=valid, other=0)
    place = tl.where(valid, block * BLOCK_SIZE + position % BLOCK_SIZE, NULL_SLOT)
    row = start + offset
    tl.store(out_input_ids + row, known + tl.maximum(drafted, 0), mask=is_row)
    tl.store(out_positions + row, position, mask=is_row)
    tl.store(out_slot_mapping + row, place, mask=is_row)
    tl.store(out_row_valid + row, valid, mask=is_row)

    if tile == 0:
        logits_lens = tl.load(rows_ptr + 2 * num_requests + other, mask=before, other=0)
        first_logit = tl.sum(logits_lens, axis=0)
        num_logits = tl.load(rows_ptr + 2 * num_requests + request)
        if request == 0:
            tl.store(out_query_start, start)
            tl.store(out_cu_num_logits, first_logit)
        tl.store(out_query_start + request + 1, start + query_len)
        tl.store(out_cu_num_logits + request + 1, first_logit + num_logits)
        tl.store(out_seq_lens + request, tl.minimum(computed + query_len, total))
        tl.store(out_num_drafts + request, pending)
        tl.store(out_num_tokens + request, length)
        tl.store(out_seeds + request, tl.load(seeds_ptr + slot))
        first_row = start + tl.maximum(length - 1 - computed, 0)
        index = tl.arange(0, TILE)
        for done in range(0, num_logits, TILE):
            at = done + index
            tl.store(
                out_logits_indices + first_logit + at,
                tl.minimum(first_row + at, start + query_len - 1),
                mask=at < num_logits,
            )
        for done in range(0, columns, TILE):
            at = done + index
            blocks = tl.load(block_tables_ptr + slot * columns + at, mask=at < columns, other=0)
            tl.store(
                out_block_tables + request.to(tl.int64) * columns + at, blocks, mask=at < columns
            )
        if K > 0:
            draft = tl.arange(0, K_PAD)
            ids = tl.load(draft_token_ids_ptr + slot * K + draft, mask=draft < K, other=0)
            tl.store(out_draft_token_ids + request * K + draft, ids, mask=draft < K)
            delta = tl.load(draft_is_delta_ptr + slot * K + draft, mask=draft < K, other=0)
            tl.store(out_draft_is_delta + request * K + draft, delta, mask=draft < K)


@triton.jit
def num_sampled_and_rejected(
    num_accepted_ptr,  # [R]
    num_drafts_ptr,  # [R]
    cu_num_logits_ptr,  # [R + 1]
    num_sampled_ptr,  # [R]
    num_rejected_ptr,  # [R]
    num_requests,
    TILE: tl.constexpr,
):
    request = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = request < num_requests
    first = tl.load(cu_num_logits_ptr + request, mask=mask, other=0)
    has_rows = tl.load(cu_num_logits_ptr + request + 1, mask=mask, other=0) > first
    accepted = tl.load(num_accepted_ptr + request, mask=mask, other=0)
    drafts = tl.load(num_drafts_ptr + request, mask=mask, other=0)
    tl.store(num_sampled_ptr + request, tl.where(has_rows, accepted + 1, 0), mask=mask)
    tl.store(num_rejected_ptr + request, tl.where(has_rows, drafts - accepted, 0), mask=mask)


@triton.jit
def trim(
    token_ids_ptr,  # [R, W]
    rows_ptr,  # [R, W]
    num_accepted_ptr,  # [R]
    num_sampled_ptr,  # [R]
    slots_ptr,  # [R]
    query_start_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    eos_ptr,  # [E]
    ignore_eos_ptr,  # [S], as all up to finish_reason_ptr
    max_len_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    num_drafts_ptr,
    finish_reason_ptr,
    out_token_ids,  # the fields of Committed
    out_num_committed,
    out_num_accepted,
    out_num_drafted,
    out_num_tokens,
    out_num_computed,
    out_last_rows,
    out_finish_reason,
    NUM_EOS: tl.constexpr,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request)
    status = tl.load(finish_reason_ptr + slot)
    running = status == RUNNING
    num_sampled = tl.where(running, tl.load(num_sampled_ptr + request), 0)
    length = tl.load(num_tokens_ptr + slot)
    limit = tl.load(max_len_ptr + slot)
    before = tl.load(num_computed_ptr + slot)
    obeys = tl.load(ignore_eos_ptr + slot) == 0
    index = tl.arange(0, W_PAD)
    tokens = tl.load(token_ids_ptr + request * W + index, mask=index < W, other=PLACEHOLDER)
    sampled = index < num_sampled
    is_eos = index < 0
    for which in range(NUM_EOS):
        is_eos = is_eos | (tokens == tl.load(eos_ptr + which))
    end = tl.min(tl.where(is_eos & obeys & sampled, index, W), axis=0)
    bad = tl.min(tl.where((tokens == INVALID) & sampled, index, W), axis=0)
    kept = tl.minimum(tl.minimum(num_sampled, end + 1), tl.minimum(limit - length, bad))
    reason = tl.where(length + kept >= limit, LENGTH, RUNNING)
    reason = tl.where(end < kept, STOP, reason)
    reason = tl.where((bad == kept) & (bad < W), ERROR, reason)
    started = num_sampled > 0
    last_row = tl.load(rows_ptr + request * W + tl.maximum(kept - 1, 0))
    computed = tl.where(running, tl.load(seq_lens_ptr + request), before)
    chunk_row = tl.load(query_start_ptr + request) + tl.maximum(computed - before - 1, 0)
    tl.store(
        out_token_ids + request * W + index,
        tl.where(index < kept, tokens, PLACEHOLDER),
        mask=index < W,
    )
    accepted = tl.load(num_accepted_ptr + request)
    drafted = tl.load(num_drafts_ptr + slot)
    tl.store(out_num_committed + request, kept)
    tl.store(out_num_accepted + request, tl.minimum(accepted, kept))
    tl.store(out_num_drafted + request, tl.where(started, drafted, 0))
    tl.store(out_num_tokens + request, length + kept)
    tl.store(out_num_computed + request, tl.where(started, length + kept - 1, computed))
    tl.store(out_last_rows + request, tl.where(started, last_row, chunk_row))
    tl.store(out_finish_reason + request, tl.where(started, reason, status))


@triton.jit
def post_update(
    new_token_ids_ptr,  # [R, W], as all up to new_finish_ptr of Committed
    num_committed_ptr,
    num_accepted_ptr,
    num_drafted_ptr,
    new_num_tokens_ptr,
    new_computed_ptr,
    new_finish_ptr,
    drafts_ptr,  # [R, P]
    is_delta_ptr,  # [R, P]
    num_proposed_ptr,  # [R]
    slots_ptr,  # [R]
    token_ids_ptr,  # [S, L], as all up to counts_ptr of the state
    token_stride,
    max_len_ptr,
    num_tokens_ptr,
    num_computed_ptr,
    finish_reason_ptr,
    draft_token_ids_ptr,  # [S, K]
    draft_is_delta_ptr,  # [S, K]
    num_drafts_ptr,
    counts_ptr,  # [S, V] int32 or None
    count_stride,
    report_ptr,  # [R, W + 6]
    COUNTS: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    W_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request)
    committed = tl.load(num_committed_ptr + request)
    length = tl.load(new_num_tokens_ptr + request)
    computed = tl.load(new_computed_ptr + request)
    finish = tl.load(new_finish_ptr + request)
    index = tl.arange(0, W_PAD)
    is_column = index < W
    tokens = tl.load(new_token_ids_ptr + request * W + index, mask=is_column, other=PLACEHOLDER)
    kept = tokens >= 0
    text = token_ids_ptr + slot * token_stride + (length - committed)
    tl.store(text + index, tokens, mask=kept)
    if COUNTS:
        tl.atomic_add(counts_ptr + slot * count_stride + tokens, ONE_OUTPUT, mask=kept)
    tl.store(num_tokens_ptr + slot, length)
    tl.store(num_computed_ptr + slot, computed)
    tl.store(finish_reason_ptr + slot, finish)

    room = tl.load(max_len_ptr + slot) - length - 1
    pending = tl.minimum(tl.minimum(tl.load(num_proposed_ptr + request), P), room)
    going = (committed > 0) & (finish == RUNNING)
    pending = tl.where(going, tl.maximum(pending, 0), 0)
    tl.store(num_drafts_ptr + slot, pending)
    if K > 0:
        draft = tl.arange(0, K_PAD)
        is_new = draft < P
        ids = tl.load(drafts_ptr + request * P + draft, mask=is_new, other=PLACEHOLDER)
        delta = tl.load(is_delta_ptr + request * P + draft, mask=is_new, other=1)
        ids = tl.where(draft < pending, ids, PLACEHOLDER)
        tl.store(draft_token_ids_ptr + slot * K + draft, ids, mask=draft < K)
        tl.store(draft_is_delta_ptr + slot * K + draft, delta, mask=draft < K)

    report = report_ptr + request * (W + 6)
    tl.store(report + index, tokens, mask=is_column)
    tl.store(report + W, committed)
    tl.store(report + W + 1, tl.load(num_accepted_ptr + request))
    tl.store(report + W + 2, tl.load(num_drafted_ptr + request))
    tl.store(report + W + 3, computed)
    tl.store(report + W + 4, finish)
    tl.store(report + W + 5, pending)
