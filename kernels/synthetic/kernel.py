"""The decision in one launch, so that what it adds to a step is one small kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.synthetic.reference import Decision


@triton.jit
def _decide(
    wanted_ptr,  # [R] or nothing
    wanted,
    draft_token_ids_ptr,  # [R, K]
    num_drafts_ptr,  # [R]
    cu_num_logits_ptr,  # [R + 1]
    batch_rows_ptr,  # [N]
    token_ids_ptr,  # [R, K + 1]
    num_accepted_ptr,  # [R]
    new_token_ids_ptr,  # [R, K + 1]
    new_rows_ptr,  # [R, K + 1]
    new_counts_ptr,  # [3, R] accepted, sampled, rejected
    num_requests,
    num_rows,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # K + 1, padded
    PER_REQUEST: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + request)
    own_rows = tl.load(cu_num_logits_ptr + request + 1) - first
    has_rows = own_rows > 0
    num_drafts = tl.load(num_drafts_ptr + request)
    limit = tl.maximum(tl.minimum(num_drafts, own_rows - 1), 0)
    if PER_REQUEST:
        accepted = tl.minimum(limit, tl.load(wanted_ptr + request))
    else:
        accepted = tl.minimum(limit, wanted)
    stop = tl.load(token_ids_ptr + request * (K + 1) + tl.load(num_accepted_ptr + request))
    index = tl.arange(0, COLUMNS)
    is_kept = (index < accepted) & (index < K) & has_rows
    tokens = tl.load(draft_token_ids_ptr + request * K + index, mask=is_kept, other=-1)
    tokens = tl.where((index == accepted) & has_rows, stop, tokens)
    line = tl.minimum(first + tl.minimum(index.to(tl.int64), accepted), num_rows - 1)
    is_column = index <= K
    out = request * (K + 1) + index
    tl.store(new_token_ids_ptr + out, tokens, mask=is_column)
    tl.store(new_rows_ptr + out, tl.load(batch_rows_ptr + line, mask=is_column), mask=is_column)
    counts = new_counts_ptr + request
    tl.store(counts, accepted)
    tl.store(counts + num_requests, tl.where(has_rows, accepted + 1, 0))
    tl.store(counts + 2 * num_requests, tl.where(has_rows, num_drafts - accepted, 0))


def decide(
    wanted: Tensor | int,
    draft_token_ids: Tensor,
    num_drafts: Tensor,
    cu_num_logits: Tensor,
    batch_rows: Tensor,
    token_ids: Tensor,
    num_accepted: Tensor,
) -> Decision:
    """As `reference.decide`."""
    num_requests, columns = token_ids.shape
    new_token_ids, new_rows = torch.empty_like(token_ids), torch.empty_like(token_ids)
    counts = token_ids.new_empty(3, num_requests)
    per_request = isinstance(wanted, Tensor)
    launch: Any = _decide[(num_requests,)]
    launch(
        wanted.contiguous() if per_request else num_drafts,
        0 if per_request else wanted,
        draft_token_ids.contiguous(),
        num_drafts.contiguous(),
        cu_num_logits.contiguous(),
        batch_rows.contiguous(),
        token_ids.contiguous(),
        num_accepted.contiguous(),
        new_token_ids,
        new_rows,
        counts,
        num_requests,
        len(batch_rows),
        K=columns - 1,
        COLUMNS=triton.next_power_of_2(columns),
        PER_REQUEST=per_request,
        num_warps=1,
    )
    return Decision(new_token_ids, new_rows, *counts.unbind())
