"""Matching drafts with tokens, and the record of a decision, one program a request."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PLACEHOLDER = tl.constexpr(-1)


@triton.jit
def load_drafts(
    request, cu_num_logits_ptr, draft_ids_ptr, draft_stride, num_drafts_ptr, K,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """First logits row, number of rows, drafts [COLUMNS] and how many of them can stand."""
    first = tl.load(cu_num_logits_ptr + request)
    num_rows = tl.load(cu_num_logits_ptr + request + 1) - first
    column = tl.arange(0, COLUMNS)
    ids = tl.load(
        draft_ids_ptr + request * draft_stride + column, mask=column < K, other=PLACEHOLDER
    )
    num_drafts = tl.load(num_drafts_ptr + request)
    limit = tl.maximum(tl.minimum(num_drafts, num_rows - 1), 0)
    return first, num_rows, ids, num_drafts, limit


@triton.jit
def count_leading(accept, COLUMNS: tl.constexpr):
    """How many come before the first that is not accepted; the last column never is."""
    column = tl.arange(0, COLUMNS)
    return tl.min(tl.where(accept, COLUMNS, column), axis=0).to(tl.int64)


@triton.jit
def store_record(
    request,
    first,
    num_rows,
    ids,
    num_drafts,
    num_accepted,
    token,
    batch_rows_ptr,
    num_logits,
    K,
    token_ids_ptr,  # [R, K + 1]
    rows_ptr,  # [R, K + 1]
    counts_ptr,  # [3, R] accepted, sampled, rejected
    num_requests,
    COLUMNS: tl.constexpr,
):
    """`verify.complete` for one request."""
    has_rows = num_rows > 0
    num_accepted = tl.where(has_rows, num_accepted, 0)
    column = tl.arange(0, COLUMNS)
    inside = column <= K
    out = tl.where(column < num_accepted, ids, PLACEHOLDER)
    out = tl.where(has_rows & (column == num_accepted), token, out)
    at = request * (K + 1) + column
    tl.store(token_ids_ptr + at, out, mask=inside)
    row = tl.minimum(first + tl.minimum(column, num_accepted), num_logits - 1)
    tl.store(rows_ptr + at, tl.load(batch_rows_ptr + row, mask=inside, other=0), mask=inside)
    tl.store(counts_ptr + request, num_accepted)
    tl.store(counts_ptr + num_requests + request, tl.where(has_rows, num_accepted + 1, 0))
    rejected = tl.where(has_rows, num_drafts - num_accepted, 0)
    tl.store(counts_ptr + 2 * num_requests + request, rejected)


@triton.jit
def _match(
    tokens_ptr,  # [N] the target's own token at each logits row
    cu_num_logits_ptr,  # [R + 1]
    batch_rows_ptr,  # [N]
    num_logits,
    draft_ids_ptr,  # [R, K]
    draft_stride,
    num_drafts_ptr,  # [R]
    K,
    token_ids_ptr,
    rows_ptr,
    counts_ptr,
    num_requests,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    first, num_rows, ids, num_drafts, limit = load_drafts(
        request, cu_num_logits_ptr, draft_ids_ptr, draft_stride, num_drafts_ptr, K, COLUMNS
    )
    column = tl.arange(0, COLUMNS)
    tokens = tl.load(tokens_ptr + tl.minimum(first + column, num_logits - 1))
    num_accepted = count_leading((ids == tokens) & (column < limit), COLUMNS)
    token = tl.sum(tl.where(column == num_accepted, tokens, 0), axis=0)
    store_record(
        request, first, num_rows, ids, num_drafts, num_accepted, token, batch_rows_ptr, num_logits,
        K, token_ids_ptr, rows_ptr, counts_ptr, num_requests, COLUMNS,
    )  # fmt: skip


@triton.jit
def _complete(
    accepted_ptr,  # [R]
    stop_token_ptr,  # [R]
    cu_num_logits_ptr,
    batch_rows_ptr,
    num_logits,
    draft_ids_ptr,
    draft_stride,
    num_drafts_ptr,
    K,
    token_ids_ptr,
    rows_ptr,
    counts_ptr,
    num_requests,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    first, num_rows, ids, num_drafts, _ = load_drafts(
        request, cu_num_logits_ptr, draft_ids_ptr, draft_stride, num_drafts_ptr, K, COLUMNS
    )
    num_accepted = tl.load(accepted_ptr + request)
    token = tl.load(stop_token_ptr + request)
    store_record(
        request, first, num_rows, ids, num_drafts, num_accepted, token, batch_rows_ptr, num_logits,
        K, token_ids_ptr, rows_ptr, counts_ptr, num_requests, COLUMNS,
    )  # fmt: skip
