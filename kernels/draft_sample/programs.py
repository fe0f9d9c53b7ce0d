"""The Triton programs behind `kernel`, one a row: the argmax, or a draw from what a scan of the row
left behind, and what is kept of q.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.categorical.kernel import first_past, pick_block
from specdec.kernels.philox.kernel import key_uniform
from specdec.kernels.row_stats.kernel import inverse_temperature, top_of


@triton.jit
def _propose(row, id, is_delta, d2t_ptr, token_ptr, delta_ptr, MAPPED: tl.constexpr):
    token = id.to(tl.int64)
    if MAPPED:
        token = tl.load(d2t_ptr + token)
    tl.store(token_ptr + row, token)
    tl.store(delta_ptr + row, is_delta)


@triton.jit
def _keep(
    row, slots_ptr, max_ptr, max_stride, inv_temperature_ptr, inv_temperature_stride,
    cutoff_ptr, cutoff_stride, lse_ptr, lse_stride, top, inv_temperature, cutoff, lse,
):  # fmt: skip
    slot = tl.load(slots_ptr + row)
    tl.store(max_ptr + slot * max_stride, top)
    tl.store(inv_temperature_ptr + slot * inv_temperature_stride, inv_temperature)
    tl.store(cutoff_ptr + slot * cutoff_stride, cutoff)
    tl.store(lse_ptr + slot * lse_stride, lse)


@triton.jit
def greedy(
    logits_ptr,  # [n, >= vocab_size]
    row_stride,
    d2t_ptr,  # [V_draft]
    token_ptr,  # [n]
    delta_ptr,  # [n]
    vocab_size,
    TILE: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.zeros((TILE,), tl.int32)
    for first in range(0, vocab_size, TILE):
        id = first + lane
        x = tl.load(logits_ptr + id, mask=id < vocab_size, other=float("-inf")).to(tl.float32)
        where = tl.where(x > best, first, where)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    top, _, finite = top_of(best)
    argmax = tl.min(tl.where(best == top, where + lane, vocab_size))
    _propose(row, tl.where(finite, argmax, 0), True, d2t_ptr, token_ptr, delta_ptr, MAPPED)


@triton.jit
def draw(
    logits_ptr,  # [n, >= vocab_size]
    row_stride,
    temperature_ptr,  # [n]
    block_max_ptr,  # [n, num_blocks]
    block_sum_ptr,  # [n, num_blocks]
    seeds_ptr,  # [n]
    round_start_ptr,  # [n]
    d2t_ptr,  # [V_draft]
    token_ptr,  # [n]
    delta_ptr,  # [n]
    slots_ptr,  # [n]
    max_ptr,
    max_stride,
    inv_temperature_ptr,
    inv_temperature_stride,
    cutoff_ptr,
    cutoff_stride,
    lse_ptr,
    lse_stride,
    vocab_size,
    num_blocks,
    offset,
    epsilon,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAPPED: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    scale = inverse_temperature(temperature, epsilon)
    greedy = temperature < epsilon
    uniform = key_uniform(tl.load(seeds_ptr + row), tl.load(round_start_ptr + row), offset, PURPOSE)
    block = tl.arange(0, BLOCKS)
    at = row * num_blocks + block
    tops = tl.load(block_max_ptr + at, mask=block < num_blocks, other=float("-inf"))
    sums = tl.load(block_sum_ptr + at, mask=block < num_blocks, other=0.0)
    top, is_nan, finite = top_of(tops)
    anchor = tl.where(finite, top, 0.0)
    sums = tl.where(finite, sums * tl.exp((tops - anchor) * scale), 0.0)
    total = tl.sum(sums)
    drawn, quantile = pick_block(sums, uniform, BLOCKS)
    best = tl.min(tl.where(tops == top, block, BLOCKS))
    id = tl.where(greedy, best, drawn) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + id, mask=id < vocab_size, other=float("-inf"))
    x = x.to(tl.float32)
    weights = tl.where(x > float("-inf"), tl.exp((x - anchor) * scale), 0.0)
    inside = first_past(weights, quantile, BLOCK)
    chosen = tl.where(greedy, tl.min(tl.where(x == top, id, vocab_size)), drawn * BLOCK + inside)
    chosen = tl.where(finite, chosen, 0)
    _propose(row, chosen, greedy | (finite == 0), d2t_ptr, token_ptr, delta_ptr, MAPPED)
    if KEEP:
        _keep(
            row, slots_ptr, max_ptr, max_stride, inv_temperature_ptr, inv_temperature_stride,
            cutoff_ptr, cutoff_stride, lse_ptr, lse_stride,
            tl.where(is_nan, float("nan"), top),
            scale,
            tl.where(finite, tl.where(greedy, 0.0, float("-inf")), float("inf")),
            tl.where(finite & (greedy == 0), tl.log(tl.where(finite, total, 1.0)), 0.0),
        )  # fmt: skip


@triton.jit
def draw_kept(
    logits_ptr,  # [n, >= vocab_size]
    row_stride,
    row_max_ptr,  # [n]
    row_inv_temperature_ptr,  # [n]
    row_cutoff_ptr,  # [n]
    row_lse_ptr,  # [n]
    row_greedy_ptr,  # [n]
    row_argmax_ptr,  # [n]
    mass_ptr,  # [n, num_blocks]
    seeds_ptr,  # [n]
    round_start_ptr,  # [n]
    d2t_ptr,  # [V_draft]
    token_ptr,  # [n]
    delta_ptr,  # [n]
    slots_ptr,  # [n]
    max_ptr,
    max_stride,
    inv_temperature_ptr,
    inv_temperature_stride,
    cutoff_ptr,
    cutoff_stride,
    lse_ptr,
    lse_stride,
    vocab_size,
    num_blocks,
    offset,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAPPED: tl.constexpr,
    KEEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    masses = tl.load(mass_ptr + row * num_blocks + block, mask=block < num_blocks, other=0.0)
    top = tl.load(row_max_ptr + row)
    scale = tl.load(row_inv_temperature_ptr + row)
    cut = tl.load(row_cutoff_ptr + row)
    lse = tl.load(row_lse_ptr + row)
    argmax = tl.load(row_argmax_ptr + row)
    one_hot = tl.load(row_greedy_ptr + row) | (argmax < 0)
    uniform = key_uniform(tl.load(seeds_ptr + row), tl.load(round_start_ptr + row), offset, PURPOSE)
    chosen = tl.maximum(argmax, 0).to(tl.int32)
    if one_hot == 0:
        drawn, quantile = pick_block(masses, uniform, BLOCKS)
        id = drawn * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * row_stride + id, mask=id < vocab_size, other=float("-inf"))
        scaled = (x.to(tl.float32) - top) * scale
        weights = tl.where((scaled >= cut) & (id < vocab_size), tl.exp(scaled), 0.0)
        inside = first_past(weights, quantile, BLOCK)
        chosen = drawn * BLOCK + inside
    _propose(row, chosen, one_hot, d2t_ptr, token_ptr, delta_ptr, MAPPED)
    if KEEP:
        _keep(
            row, slots_ptr, max_ptr, max_stride, inv_temperature_ptr, inv_temperature_stride,
            cutoff_ptr, cutoff_stride, lse_ptr, lse_stride, top, scale, cut, lse,
        )  # fmt: skip
