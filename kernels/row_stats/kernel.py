"""Row statistics in one read: programs over blocks of the vocabulary, then one small program a row.

A few rows fill the GPU, since each row is split into 30 to 64 blocks; the last program to come
would save the second launch, but needs counters that live between steps.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped
from specdec.kernels.row_stats.reference import RowStats, block_size

INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950408889634)
TILE = tl.constexpr(1024)  # requests looked at at once: many more compile for minutes


@triton.jit
def _ended(row, cu_num_logits_ptr, first, num_requests, SIZE: tl.constexpr):
    """How many of the SIZE requests from `first` on end at or before a row."""
    at = first + tl.arange(0, SIZE)
    ends = tl.load(cu_num_logits_ptr + 1 + at, mask=at < num_requests, other=row + 1)
    return tl.sum((ends <= row).to(tl.int64), axis=0)


@triton.jit
def owner_of(row, cu_num_logits_ptr, num_requests, REQUESTS: tl.constexpr):
    """`reference.row_requests` of one row."""
    if REQUESTS <= TILE:
        owner = _ended(row, cu_num_logits_ptr, 0, num_requests, REQUESTS)
    else:
        owner = _ended(row, cu_num_logits_ptr, 0, num_requests, TILE)
        for first in range(TILE, num_requests, TILE):
            owner += _ended(row, cu_num_logits_ptr, first, num_requests, TILE)
    return tl.minimum(owner, num_requests - 1)


@triton.jit
def temperature_of(
    row, temperature_ptr, slots_ptr, cu_num_logits_ptr, num_requests, REQUESTS: tl.constexpr
):
    if REQUESTS > 0:
        request = owner_of(row, cu_num_logits_ptr, num_requests, REQUESTS)
        temperature = tl.load(temperature_ptr + tl.load(slots_ptr + request))
    else:
        temperature = tl.load(temperature_ptr + row)
    return temperature


@triton.jit
def top_of(maxima):
    """The largest of a row's maxima but NaN, whether one is NaN, and whether the row is valid."""
    is_nan = tl.max((maxima != maxima).to(tl.int32)) == 1
    top = tl.max(tl.where(maxima == maxima, maxima, float("-inf")))
    finite = (top > float("-inf")) & (top < float("inf")) & (is_nan == 0)
    return top, is_nan, finite


@triton.jit
def inverse_temperature(temperature, epsilon):
    """1 / temperature, rounded as division rounds; 1 below epsilon."""
    return tl.div_rn(1.0, tl.where(temperature < epsilon, 1.0, temperature))


@triton.jit
def finite_or_above(logits):
    """fp32 logits with +inf for NaN, which makes the row's maximum infinite: no row recovers."""
    x = logits.to(tl.float32)
    return tl.where(x == x, x, INFINITY)


@triton.jit
def load_logits(row_ptr, ids, vocab_size):
    """fp32 logits of one row; -inf past the vocabulary and +inf for NaN, which no row recovers."""
    return finite_or_above(tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INFINITY))


@triton.jit
def _block_stats(
    logits_ptr,  # [n, V]
    row_stride,
    temperature_ptr,
    slots_ptr,
    cu_num_logits_ptr,
    num_requests,
    block_max_ptr,  # [n, C] fp32; with SUMS a NaN shows in the sum alone
    block_sum_ptr,  # [n, C] fp32, of exp((logit - block max) / temperature)
    num_blocks,
    groups,  # programs of a row
    vocab_size,
    epsilon,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a program
    REQUESTS: tl.constexpr,
    SUMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // groups).to(tl.int64)
    first = tl.program_id(0) % groups * BLOCKS
    row_ptr = logits_ptr + row * row_stride
    ids = first * BLOCK + tl.arange(0, BLOCK)
    ahead = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INFINITY)
    scale = 1.0
    if SUMS:
        temperature = temperature_of(
            row, temperature_ptr, slots_ptr, cu_num_logits_ptr, num_requests, REQUESTS
        )
        scale = inverse_temperature(temperature, epsilon) * LOG2_E
    for step in range(BLOCKS):
        x = ahead.to(tl.float32)
        if not SUMS:
            x = finite_or_above(x)
        block = first + step
        ids = block * BLOCK + tl.arange(0, BLOCK)
        # memory is busy with the next block while this one is reduced
        more = (ids + BLOCK < vocab_size) & (step + 1 < BLOCKS)
        ahead = tl.load(row_ptr + BLOCK + ids, mask=more, other=-INFINITY)
        top = tl.max(x, axis=0)
        entry = row * num_blocks + block
        tl.store(block_max_ptr + entry, top, mask=block < num_blocks)
        if SUMS:
            anchor = tl.where(tl.abs(top) < INFINITY, top, 0.0)
            total = tl.sum(tl.exp2((x - anchor) * scale), axis=0)
            tl.store(block_sum_ptr + entry, total, mask=block < num_blocks)


@triton.jit
def _row_stats(
    logits_ptr,  # [n, V]
    row_stride,
    vocab_size,
    block_max_ptr,
    block_mass_ptr,  # [n, C] fp32: sums relative to each block's maximum become relative to max
    num_blocks,
    temperature_ptr,
    slots_ptr,
    cu_num_logits_ptr,
    num_requests,
    max_ptr,
    inv_temperature_ptr,
    cutoff_ptr,
    lse_ptr,
    greedy_ptr,
    argmax_ptr,
    epsilon,
    invalid,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    REQUESTS: tl.constexpr,
    SUMS: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    inside = at < num_blocks
    entry = row * num_blocks + at
    tops = tl.load(block_max_ptr + entry, mask=inside, other=-INFINITY)
    top = tl.max(tops, axis=0)
    if SUMS:
        sums = tl.load(block_mass_ptr + entry, mask=inside, other=0.0)
        top = tl.where(tl.max((sums != sums).to(tl.int32), axis=0) != 0, INFINITY, top)
    finite = tl.abs(top) < INFINITY
    # the row's first block of that maximum is read again, so that the pass keeps no ids
    block = tl.min(tl.where(tops == top, at, BLOCKS), axis=0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr + row * row_stride, ids, vocab_size)
    best = tl.min(tl.where(x == top, ids, 2147483647), axis=0).to(tl.int64)
    tl.store(max_ptr + row, top)
    tl.store(argmax_ptr + row, tl.where(finite, best, invalid))
    if ALL_GREEDY:
        inv_temperature = 1.0
        greedy = finite | True
    else:
        temperature = temperature_of(
            row, temperature_ptr, slots_ptr, cu_num_logits_ptr, num_requests, REQUESTS
        )
        inv_temperature = inverse_temperature(temperature, epsilon)
        greedy = temperature < epsilon
    lse = 0.0
    if SUMS:
        shift = tl.where(finite, (tops - top) * inv_temperature, 0.0)
        mass = tl.where(finite, tl.where(inside, sums * tl.exp(shift), 0.0), 0.0)
        tl.store(block_mass_ptr + entry, mass, mask=inside)
        lse = tl.where(finite & (greedy == 0), tl.log(tl.sum(mass, axis=0)), 0.0)
    tl.store(inv_temperature_ptr + row, inv_temperature)
    tl.store(cutoff_ptr + row, tl.where(finite, tl.where(greedy, 0.0, -INFINITY), INFINITY))
    tl.store(lse_ptr + row, lse)
    tl.store(greedy_ptr + row, greedy)


@triton.jit
def _request_rows(
    slots_ptr,  # [R]
    cu_num_logits_ptr,  # [R + 1]
    num_requests,
    temperature_ptr,  # [S] and so on
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,  # [3, n] fp32 temperature, top_p, min_p
    out_k_ptr,  # [n] int64
    num_rows,
    REQUESTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + owner_of(row, cu_num_logits_ptr, num_requests, REQUESTS))
    tl.store(out_ptr + row, tl.load(temperature_ptr + slot))
    tl.store(out_ptr + num_rows + row, tl.load(top_p_ptr + slot))
    tl.store(out_ptr + 2 * num_rows + row, tl.load(min_p_ptr + slot))
    tl.store(out_k_ptr + row, tl.load(top_k_ptr + slot))


def request_rows(
    num_rows: int,
    slots: Tensor,
    cu_num_logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `reference.request_rows`."""
    out, out_k = temperature.new_empty(3, num_rows), top_k.new_empty(num_rows)
    if num_rows:
        launch: Any = _request_rows[(num_rows,)]
        launch(
            slots,
            cu_num_logits,
            slots.shape[0],
            temperature,
            top_k,
            top_p,
            min_p,
            out,
            out_k,
            num_rows,
            REQUESTS=triton.next_power_of_2(slots.shape[0]),
            num_warps=1,
            **overlapped(),
        )
    return out[0], out_k, out[1], out[2]


def row_stats(
    logits: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
    all_greedy: bool = False,
    slots: Tensor | None = None,
    cu_num_logits: Tensor | None = None,
) -> RowStats:
    """Statistics of rows [n, V]; arguments as in `reference.row_stats`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, size = logits.shape[0], block_size(vocab_size)
    num_blocks, sums = triton.cdiv(vocab_size, size), not all_greedy

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    block_max = new(n, num_blocks)
    mass = new(n, num_blocks) if sums else block_max
    stats = RowStats(
        new(n),
        new(n),
        new(n),
        new(n),
        new(n, dtype=torch.bool),
        new(n, dtype=torch.int64),
        mass if sums else None,
    )
    if n == 0:
        return stats
    owned = slots is not None and cu_num_logits is not None and not all_greedy
    num_requests = slots.shape[0] if owned and slots is not None else 0
    owners = (temperature.contiguous(), slots, cu_num_logits, num_requests)
    requests = triton.next_power_of_2(num_requests) if owned else 0
    blocks = _blocks_of_a_program(n * num_blocks)
    groups = triton.cdiv(num_blocks, blocks)
    launch: Any = _block_stats[(n * groups,)]
    launch(
        logits,
        logits.stride(0),
        *owners,
        block_max,
        mass,
        num_blocks,
        groups,
        vocab_size,
        epsilon,
        BLOCK=size,
        BLOCKS=blocks,
        REQUESTS=requests,
        SUMS=sums,
        num_warps=size // 512,  # 16 elements a thread
        **overlapped(),
    )
    finish: Any = _row_stats[(n,)]
    finish(
        logits,
        logits.stride(0),
        vocab_size,
        block_max,
        mass,
        num_blocks,
        *owners,
        *stats[:6],
        epsilon,
        invalid,
        BLOCK=size,
        BLOCKS=triton.next_power_of_2(num_blocks),
        REQUESTS=requests,
        SUMS=sums,
        ALL_GREEDY=all_greedy,
        num_warps=4,
        **overlapped(),
    )
    return stats


def _blocks_of_a_program(num_blocks: int) -> int:
    """Few while they are few, so that they spread; sums are the same whatever this says."""
    return 4 if num_blocks >= 4096 else 2 if num_blocks >= 2048 else 1
