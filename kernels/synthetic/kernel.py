"""The decision in one launch, so that what it adds to a step is one small kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.verification.record import load_drafts, store_record
from specdec.kernels.verification.reference import Verification


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
    first, own_rows, ids, num_drafts, limit = load_drafts(
        request, cu_num_logits_ptr, draft_token_ids_ptr, K, num_drafts_ptr, K, COLUMNS
    )
    if PER_REQUEST:
        accepted = tl.minimum(limit, tl.load(wanted_ptr + request))
    else:
        accepted = tl.minimum(limit, wanted)
    stop = tl.load(token_ids_ptr + request * (K + 1) + tl.load(num_accepted_ptr + request))
    store_record(
        request, first, own_rows, ids, num_drafts, accepted, stop, batch_rows_ptr, num_rows, K,
        new_token_ids_ptr, new_rows_ptr, new_counts_ptr, num_requests, COLUMNS,
    )  # fmt: skip


def decide(
    wanted: Tensor | int,
    draft_token_ids: Tensor,
    num_drafts: Tensor,
    cu_num_logits: Tensor,
    batch_rows: Tensor,
    token_ids: Tensor,
    num_accepted: Tensor,
) -> Verification:
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
    return Verification(new_token_ids, new_rows, *counts.unbind())
