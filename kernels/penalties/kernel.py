"""Penalties in one pass over the rows that have any."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped
from specdec.kernels.row_stats.kernel import owner_of

BLOCK = 4096


@triton.jit
def _penalties(
    logits_ptr,  # [n, V]
    counts_ptr,  # [S, >= vocab_size] int32
    drafts_ptr,  # [S, K]
    slots_ptr,  # [R]
    cu_num_logits_ptr,  # [R + 1]
    repetition_ptr,  # [S]
    presence_ptr,  # [S]
    frequency_ptr,  # [S]
    row_stride,
    counts_stride,
    drafts_stride,
    num_requests,
    vocab_size,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    request = owner_of(row, cu_num_logits_ptr, num_requests, REQUESTS)
    slot = tl.load(slots_ptr + request)
    repetition = tl.load(repetition_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        offset = row - tl.load(cu_num_logits_ptr + request)
        id = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        real = id < vocab_size
        packed = tl.load(counts_ptr + slot * counts_stride + id, mask=real, other=0)
        num_output = packed >> 1
        for index in tl.static_range(K):
            draft = tl.load(drafts_ptr + slot * drafts_stride + index).to(tl.int32)
            num_output += ((id == draft) & (index < offset)).to(tl.int32)
        seen = (num_output > 0) | ((packed & 1) > 0)
        if tl.max(seen.to(tl.int32)) == 1:
            at = logits_ptr + row * row_stride + id
            # where there is none a number whose quotient is no special case: those take far longer
            x = tl.load(at, mask=real & seen, other=1.0).to(tl.float32)
            x = tl.where(
                x > 0.0,
                tl.div_rn(x, tl.full((BLOCK,), 1.0, tl.float32) * repetition),
                x * repetition,
            )
            x -= frequency * num_output.to(tl.float32)
            x -= tl.where(num_output > 0, presence, 0.0)
            tl.store(at, x.to(logits_ptr.dtype.element_ty), mask=real & seen)


def apply_penalties_(
    logits: Tensor,
    counts: Tensor,
    drafts: Tensor,
    slots: Tensor,
    cu_num_logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    *,
    vocab_size: int,
) -> None:
    """As `reference.apply_penalties_`; rows of logits, counts and drafts are contiguous."""
    if logits.shape[0] == 0:
        return
    launch: Any = _penalties[(logits.shape[0], triton.cdiv(vocab_size, BLOCK))]
    launch(
        logits,
        counts,
        drafts,
        slots,
        cu_num_logits,
        repetition,
        presence,
        frequency,
        logits.stride(0),
        counts.stride(0),
        drafts.stride(0),
        slots.shape[0],
        vocab_size,
        K=drafts.shape[1],
        BLOCK=BLOCK,
        REQUESTS=triton.next_power_of_2(slots.shape[0]),
        num_warps=8,
        **overlapped(),
    )
