"""Drafts from logits: one launch when greedy, two when sampled, three when sampled with filters.

The scan that sums the blocks also writes the copy of the logits that verification reads, so that a
draw reads one block again and no row twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.categorical.kernel import first_past, pick_block
from specdec.kernels.categorical.reference import BLOCK
from specdec.kernels.chain import overlapped
from specdec.kernels.cutoff.kernel import select
from specdec.kernels.cutoff.scan import Scan, scan
from specdec.kernels.draft_sample.reference import KeptRows
from specdec.kernels.philox.kernel import key_uniform
from specdec.kernels.race.kernel import race
from specdec.kernels.row_stats.kernel import inverse_temperature, row_stats
from specdec.kernels.row_stats.reference import RowStats, block_size


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
def _greedy(
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
    is_nan = tl.max((best != best).to(tl.int32)) == 1
    top = tl.max(tl.where(best == best, best, float("-inf")))
    finite = (top > float("-inf")) & (top < float("inf")) & (is_nan == 0)
    argmax = tl.min(tl.where(best == top, where + lane, vocab_size))
    _propose(row, tl.where(finite, argmax, 0), True, d2t_ptr, token_ptr, delta_ptr, MAPPED)


@triton.jit
def _draw(
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
    is_nan = tl.max((tops != tops).to(tl.int32)) == 1
    top = tl.max(tl.where(tops == tops, tops, float("-inf")))
    finite = (top > float("-inf")) & (top < float("inf")) & (is_nan == 0)
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
def _draw_kept(
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


def draft_sample_(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    seeds: Tensor,
    round_start: Tensor,
    offset: int,
    purpose: int,
    mode: str,
    d2t: Tensor | None = None,
    filters: bool = True,
    all_greedy: bool = False,
    keep: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.draft_sample_`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows = logits.shape[0]
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    is_delta = logits.new_empty(num_rows, dtype=torch.bool)
    if num_rows == 0:
        return tokens, is_delta
    known: dict[str, Any] = {"vocab_size": vocab_size, "epsilon": epsilon}
    filtered = (temperature, top_k, top_p, min_p)
    if all_greedy or mode == "greedy":
        _greedy_(logits, vocab_size, d2t, tokens, is_delta)
        return tokens, is_delta
    if mode == "shared":
        if filters:
            scanned = scan(logits, temperature, chunks=True, **known)
            rows = select(logits, scanned, *filtered, invalid=-1, **known)
        else:
            rows = row_stats(logits, temperature, invalid=-1, **known)
        ids = race(
            logits,
            *rows[:3],
            rows.greedy,
            rows.argmax,
            vocab_size=vocab_size,
            seeds=seeds,
            round_start=round_start,
            purpose=purpose,
            offset=offset,
            lanes=d2t,
        ).clamp_(min=0)
        return ids if d2t is None else d2t[ids], is_delta.fill_(True)
    copied: dict[str, Any] = {} if keep is None else {"copy": keep.logits, "slots": keep.slots}
    scanned = scan(logits, temperature, chunks=filters, **known, **copied)
    noise = (seeds.contiguous(), round_start.contiguous())
    out = (tokens if d2t is None else d2t, tokens, is_delta, *_kept_arguments(keep, tokens))
    flags = {"PURPOSE": purpose, "MAPPED": d2t is not None, "KEEP": keep is not None}
    if filters:
        rows = select(logits, scanned, *filtered, invalid=-1, **known)
        _draw_kept_(logits, rows, noise, out, vocab_size, offset, flags)
    else:
        _draw_(logits, temperature, scanned, noise, out, vocab_size, offset, epsilon, flags)
    return tokens, is_delta


def _greedy_(
    logits: Tensor, vocab_size: int, d2t: Tensor | None, tokens: Tensor, is_delta: Tensor
) -> None:
    launch: Any = _greedy[(logits.shape[0],)]
    launch(
        logits,
        logits.stride(0),
        tokens if d2t is None else d2t,
        tokens,
        is_delta,
        vocab_size,
        TILE=min(16384, triton.next_power_of_2(vocab_size)),
        MAPPED=d2t is not None,
        num_warps=32 if vocab_size > 8192 else 4,
        **overlapped(),
    )


def _kept_arguments(keep: KeptRows | None, unused: Tensor) -> tuple[Tensor | int, ...]:
    """Pointers and strides of `_keep`, from its slots on."""
    if keep is None:
        return (unused,) + (unused, 0) * 4
    buffers = (keep.max, keep.inv_temperature, keep.cutoff, keep.lse)
    return (keep.slots, *(item for b in buffers for item in (b, b.stride(0))))


def _draw_(
    logits: Tensor,
    temperature: Tensor,
    scanned: Scan,
    noise: tuple[Tensor, Tensor],
    out: tuple[Tensor | int, ...],
    vocab_size: int,
    offset: int,
    epsilon: float,
    flags: dict[str, int],
) -> None:
    num_blocks = scanned.block_max.shape[1]
    launch: Any = _draw[(logits.shape[0],)]
    launch(
        logits,
        logits.stride(0),
        temperature,
        scanned.block_max,
        scanned.block_sum,
        *noise,
        *out,
        vocab_size,
        num_blocks,
        offset,
        epsilon,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=4,
        **overlapped(),
        **flags,
    )


def _draw_kept_(
    logits: Tensor,
    rows: RowStats,
    noise: tuple[Tensor, Tensor],
    out: tuple[Tensor | int, ...],
    vocab_size: int,
    offset: int,
    flags: dict[str, int],
) -> None:
    assert rows.block_mass is not None
    num_blocks, size = rows.block_mass.shape[1], block_size(vocab_size)
    launch: Any = _draw_kept[(logits.shape[0],)]
    launch(
        logits,
        logits.stride(0),
        *rows,
        *noise,
        *out,
        vocab_size,
        num_blocks,
        offset,
        BLOCK=size,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=size // 256,
        **overlapped(),
        **flags,
    )
