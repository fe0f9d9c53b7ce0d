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


@triton.jit
def owner_of(row, cu_num_logits_ptr, num_requests, REQUESTS: tl.constexpr):
    """The request that owns a logits row; rows past the last belong to the last."""
    at = tl.arange(0, REQUESTS)
    ends = tl.load(cu_num_logits_ptr + 1 + at, mask=at < num_requests, other=row + 1)
    return tl.minimum(tl.sum((ends <= row).to(tl.int64), axis=0), num_requests - 1)


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
def inverse(temperature, epsilon):
    """1 / temperature, rounded as division rounds; 1 below epsilon."""
    return tl.div_rn(1.0, tl.where(temperature < epsilon, 1.0, temperature))


@triton.jit
def load_logits(row_ptr, ids, vocab_size):
    """fp32 logits of one row; -inf past the vocabulary and +inf for NaN, which no row recovers."""
    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-INFINITY).to(tl.float32)
    return tl.where(x == x, x, INFINITY)


@triton.jit
def _block_stats(
    logits_ptr,  # [n, V]
    row_stride,
    temperature_ptr,
    slots_ptr,
    cu_num_logits_ptr,
    num_requests,
    block_max_ptr,  # [n, C] fp32
    block_argmax_ptr,  # [n, C] int32
    block_sum_ptr,  # [n, C] fp32, of exp((logit - block max) / temperature)
    num_blocks,
    vocab_size,
    epsilon,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    SUMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0).to(tl.int64)
    row = entry // num_blocks
    ids = (entry % num_blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr + row * row_stride, ids, vocab_size)
    if SUMS:
        temperature = temperature_of(
            row, temperature_ptr, slots_ptr, cu_num_logits_ptr, num_requests, REQUESTS
        )
    top = tl.max(x, axis=0)
    tl.store(block_max_ptr + entry, top)
    tl.store(block_argmax_ptr + entry, tl.min(tl.where(x == top, ids, 2147483647), axis=0))
    if SUMS:
        anchor = tl.where(tl.abs(top) < INFINITY, top, 0.0)
        scaled = (x - anchor) * inverse(temperature, epsilon)
        tl.store(block_sum_ptr + entry, tl.sum(tl.exp(scaled), axis=0))


@triton.jit
def _row_stats(
    block_max_ptr,
    block_argmax_ptr,
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
    ids = tl.load(block_argmax_ptr + entry, mask=inside, other=2147483647)
    top = tl.max(tops, axis=0)
    best = tl.min(tl.where(tops == top, ids, 2147483647), axis=0).to(tl.int64)
    finite = tl.abs(top) < INFINITY
    tl.store(max_ptr + row, top)
    tl.store(argmax_ptr + row, tl.where(finite, best, invalid))
    if ALL_GREEDY:
        inv_temperature = 1.0
        greedy = finite | True
    else:
        temperature = temperature_of(
            row, temperature_ptr, slots_ptr, cu_num_logits_ptr, num_requests, REQUESTS
        )
        inv_temperature = inverse(temperature, epsilon)
        greedy = temperature < epsilon
    lse = 0.0
    if SUMS:
        sums = tl.load(block_mass_ptr + entry, mask=inside, other=0.0)
        shift = tl.where(finite, (tops - top) * inv_temperature, 0.0)
        mass = tl.where(inside, sums * tl.exp(shift), 0.0)
        tl.store(block_mass_ptr + entry, mass, mask=inside)
        lse = tl.where(finite & (greedy == 0), tl.log(tl.sum(mass, axis=0)), 0.0)
    tl.store(inv_temperature_ptr + row, inv_temperature)
    tl.store(cutoff_ptr + row, tl.where(finite, tl.where(greedy, 0.0, -INFINITY), INFINITY))
    tl.store(lse_ptr + row, lse)
    tl.store(greedy_ptr + row, greedy)


@triton.jit
def _kept_mass(
    logits_ptr,
    row_stride,
    max_ptr,
    inv_temperature_ptr,
    cutoff_ptr,  # [n] as the filters gave it
    block_mass_ptr,
    num_blocks,
    vocab_size,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = entry // num_blocks
    ids = (entry % num_blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits_ptr + row * row_stride, ids, vocab_size)
    scaled = (x - tl.load(max_ptr + row)) * tl.load(inv_temperature_ptr + row)
    kept = scaled >= tl.load(cutoff_ptr + row)
    tl.store(block_mass_ptr + entry, tl.sum(tl.where(kept, tl.exp(scaled), 0.0), axis=0))


@triton.jit
def _kept_lse(
    block_mass_ptr, num_blocks, max_ptr, greedy_ptr, given_ptr, cutoff_ptr, lse_ptr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)
    mass = tl.load(block_mass_ptr + row * num_blocks + at, mask=at < num_blocks, other=0.0)
    total = tl.sum(mass, axis=0)
    if (tl.abs(tl.load(max_ptr + row)) < INFINITY) & (tl.load(greedy_ptr + row) == 0):
        tl.store(cutoff_ptr + row, tl.load(given_ptr + row))
        tl.store(lse_ptr + row, tl.log(total))


def row_stats(
    logits: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
    all_greedy: bool = False,
    cutoff: Tensor | None = None,
    slots: Tensor | None = None,
    cu_num_logits: Tensor | None = None,
) -> RowStats:
    """Statistics of rows [n, V]; arguments as in `reference.row_stats`."""
    stats = _unfiltered(
        logits,
        temperature,
        vocab_size=vocab_size,
        epsilon=epsilon,
        invalid=invalid,
        all_greedy=all_greedy,
        sums=not all_greedy and cutoff is None,
        slots=slots,
        cu_num_logits=cu_num_logits,
    )
    return stats if cutoff is None or all_greedy else with_cutoff(logits, stats, cutoff, vocab_size)


def peaks(
    logits: Tensor, temperature: Tensor, *, vocab_size: int, epsilon: float, invalid: int
) -> RowStats:
    """`row_stats` without sums, for rows whose cutoff comes from their maximum (`with_cutoff`)."""
    return _unfiltered(
        logits,
        temperature,
        vocab_size=vocab_size,
        epsilon=epsilon,
        invalid=invalid,
        all_greedy=False,
        sums=False,
        slots=None,
        cu_num_logits=None,
    )


def with_cutoff(logits: Tensor, stats: RowStats, cutoff: Tensor, vocab_size: int) -> RowStats:
    """`peaks` completed by the filters' threshold [n]: one more read, for what they keep."""
    n, (size, num_blocks) = logits.shape[0], _blocks(vocab_size)
    mass = torch.empty(n, num_blocks, dtype=torch.float32, device=logits.device)
    cutoff = cutoff.contiguous()
    if n:
        launch: Any = _kept_mass[(n * num_blocks,)]
        launch(
            logits,
            logits.stride(0),
            stats.max,
            stats.inv_temperature,
            cutoff,
            mass,
            num_blocks,
            vocab_size,
            BLOCK=size,
            num_warps=size // 512,
        )
        finish: Any = _kept_lse[(n,)]
        finish(
            mass,
            num_blocks,
            stats.max,
            stats.greedy,
            cutoff,
            stats.cutoff,
            stats.lse,
            BLOCKS=triton.next_power_of_2(num_blocks),
            num_warps=1,
        )
    return stats._replace(block_mass=mass)


def _blocks(vocab_size: int) -> tuple[int, int]:
    size = block_size(vocab_size)
    return size, triton.cdiv(vocab_size, size)


def _unfiltered(
    logits: Tensor,
    temperature: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
    all_greedy: bool,
    sums: bool,
    slots: Tensor | None,
    cu_num_logits: Tensor | None,
) -> RowStats:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, (size, num_blocks) = logits.shape[0], _blocks(vocab_size)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    block_max, block_argmax = new(n, num_blocks), new(n, num_blocks, dtype=torch.int32)
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
    launch: Any = _block_stats[(n * num_blocks,)]
    launch(
        logits,
        logits.stride(0),
        *owners,
        block_max,
        block_argmax,
        mass,
        num_blocks,
        vocab_size,
        epsilon,
        BLOCK=size,
        REQUESTS=requests,
        SUMS=sums,
        num_warps=size // 512,  # 16 elements a thread
        **overlapped(),
    )
    finish: Any = _row_stats[(n,)]
    finish(
        block_max,
        block_argmax,
        mass,
        num_blocks,
        *owners,
        *stats[:6],
        epsilon,
        invalid,
        BLOCKS=triton.next_power_of_2(num_blocks),
        REQUESTS=requests,
        SUMS=sums,
        ALL_GREEDY=all_greedy,
        num_warps=1,
        **overlapped(),
    )
    return stats
