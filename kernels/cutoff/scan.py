"""One read of the logits: what each block of a row holds, for everything drawn from it later."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.categorical.reference import BLOCK
from specdec.kernels.chain import overlapped
from specdec.kernels.row_stats.kernel import inverse_temperature
from specdec.kernels.row_stats.reference import block_size

MAX_CHUNKS = 4096  # chunk maxima of a row that one program holds


class Scan(NamedTuple):
    """Per block of `BLOCK` ids and per chunk of `chunk` ids of each row."""

    block_max: Tensor  # [n, num_blocks] fp32, NaN where one is inside
    block_sum: Tensor  # [n, num_blocks] fp32, of exp((logit - block_max) * inv_temperature)
    chunk_max: Tensor  # [n, num_chunks] in the logits' dtype; empty when not asked for
    chunk: int


@triton.jit
def _scan(
    logits_ptr,  # [n, >= vocab_size]
    temperature_ptr,  # [n]
    block_max_ptr,  # [n, num_blocks]
    block_sum_ptr,  # [n, num_blocks]
    chunk_max_ptr,  # [n, num_chunks]
    copy_ptr,  # [slots, width]
    slots_ptr,  # [n]
    row_stride,
    copy_stride,
    vocab_size,
    width,
    num_blocks,
    num_chunks,
    epsilon,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of one program
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # keep chunk maxima
    COPY: tl.constexpr,  # write the row, -inf at padding, to its slot
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    inside = tl.arange(0, BLOCK // CHUNK)
    id = (
        block[:, None, None] * BLOCK
        + inside[None, :, None] * CHUNK
        + tl.arange(0, CHUNK)[None, None, :]
    )  # [BLOCKS, chunks of a block, CHUNK]
    logits = tl.load(logits_ptr + row * row_stride + id, mask=id < vocab_size, other=float("-inf"))
    if COPY:
        slot = tl.load(slots_ptr + row)
        tl.store(copy_ptr + slot * copy_stride + id, logits, mask=id < width)
    inv_temperature = inverse_temperature(tl.load(temperature_ptr + row), epsilon)
    x = logits.to(tl.float32)
    number = x == x
    x = tl.where(number, x, float("-inf"))
    chunk_max = tl.max(x, axis=2)
    top = tl.max(chunk_max, axis=1)
    base = tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)
    weights = tl.exp((x - base[:, None, None]) * inv_temperature)
    total = tl.sum(tl.sum(weights, axis=2), axis=1)
    numbers = tl.min(tl.min(number.to(tl.int32), axis=2), axis=1)
    top = tl.where(numbers == 1, top, float("nan"))
    at = row * num_blocks + block
    tl.store(block_max_ptr + at, top, mask=block < num_blocks)
    tl.store(block_sum_ptr + at, total, mask=block < num_blocks)
    if CHUNKS:
        chunk = block[:, None] * (BLOCK // CHUNK) + inside[None, :]
        tl.store(
            chunk_max_ptr + row * num_chunks + chunk,
            chunk_max.to(chunk_max_ptr.dtype.element_ty),
            mask=chunk < num_chunks,
        )


def scan(
    logits: Tensor,
    temperature: Tensor,
    vocab_size: int,
    epsilon: float,
    *,
    chunks: bool,
    copy: Tensor | None = None,
    slots: Tensor | None = None,
) -> Scan:
    """Block maxima and sums of each row, and chunk maxima on request.

    Args:
        logits: [n, V], rows contiguous; columns at or past `vocab_size` are padding.
        temperature: [n] fp32, greedy (scale 1) below `epsilon`.
        copy: [S, V] view, rows contiguous, that also takes the rows, -inf at padding columns.
        slots: [n] int64 row of each in `copy`.
    """
    num_rows, width = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    chunk = min(BLOCK, max(8, triton.next_power_of_2(triton.cdiv(vocab_size, MAX_CHUNKS))))
    num_chunks = triton.cdiv(vocab_size, chunk) if chunks else 0
    block_max = logits.new_empty(num_rows, num_blocks, dtype=torch.float32)
    block_sum = torch.empty_like(block_max)
    chunk_max = logits.new_empty(num_rows, num_chunks)
    blocks = block_size(vocab_size) // BLOCK
    columns = vocab_size if copy is None else width
    launch: Any = _scan[(num_rows, triton.cdiv(columns, BLOCK * blocks))]
    launch(
        logits,
        temperature,
        block_max,
        block_sum,
        chunk_max,
        logits if copy is None else copy,
        block_max if slots is None else slots,
        logits.stride(0),
        0 if copy is None else copy.stride(0),
        vocab_size,
        width,
        num_blocks,
        num_chunks,
        epsilon,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        CHUNK=chunk,
        CHUNKS=chunks,
        COPY=copy is not None,
        num_warps=2 * blocks,
        **overlapped(),
    )
    return Scan(block_max, block_sum, chunk_max, chunk)
