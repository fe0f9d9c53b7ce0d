"""A grammar's packed mask over logits, which are written and never read."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped

WORDS = 128  # of one program


@triton.jit
def _bitmask(
    logits_ptr,  # [n, V]
    bitmask_ptr,  # [n, num_words] int32
    row_stride,
    mask_stride,
    vocab_size,
    num_words,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask_ptr + row * mask_stride + word, mask=word < num_words, other=-1)
    lane = tl.arange(0, 32)
    id = word[:, None] * 32 + lane[None, :]
    banned = ((bits[:, None] >> lane[None, :]) & 1) == 0
    excluded = tl.full((WORDS, 32), float("-inf"), tl.float32)
    tl.store(
        logits_ptr + row * row_stride + id,
        excluded.to(logits_ptr.dtype.element_ty),
        mask=banned & (id < vocab_size),
    )


def apply_bitmask_(logits: Tensor, bitmask: Tensor, *, vocab_size: int) -> None:
    """As `reference.apply_bitmask_`, without reading the logits; their rows are contiguous."""
    num_words = triton.cdiv(vocab_size, 32)
    if logits.shape[0] == 0:
        return
    launch: Any = _bitmask[(logits.shape[0], triton.cdiv(num_words, WORDS))]
    launch(
        logits,
        bitmask,
        logits.stride(0),
        bitmask.stride(0),
        vocab_size,
        num_words,
        WORDS=WORDS,
        num_warps=4,
        **overlapped(),
    )
