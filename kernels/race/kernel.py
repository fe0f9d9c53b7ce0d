"""Gumbel-max draws in one read of the logits, the noise made where it is used."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.chain import overlapped
from specdec.kernels.philox.kernel import philox_words, to_exponential
from specdec.kernels.row_stats.kernel import INFINITY, load_logits, owner_of
from specdec.kernels.row_stats.reference import block_size

LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _block_race(
    logits_ptr,  # [n, V]
    row_stride,
    max_ptr,  # [n]
    inv_temperature_ptr,
    cutoff_ptr,
    greedy_ptr,
    argmax_ptr,
    seeds_ptr,  # [n] or [num_requests]
    round_start_ptr,
    cu_num_logits_ptr,
    num_requests,
    lanes_ptr,  # [vocab_size]
    best_ptr,  # [n, C] fp32
    best_id_ptr,  # [n, C] int32
    num_blocks,
    vocab_size,
    offset,
    PURPOSE: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0).to(tl.int64)
    row = entry // num_blocks
    block = (entry % num_blocks).to(tl.int32)
    if (tl.load(greedy_ptr + row) == 0) & (tl.load(argmax_ptr + row) >= 0):
        owner = row
        position = offset
        if REQUESTS > 0:
            owner = owner_of(row, cu_num_logits_ptr, num_requests, REQUESTS)
            position += row - tl.load(cu_num_logits_ptr + owner)
        seed = tl.load(seeds_ptr + owner)
        position += tl.load(round_start_ptr + owner)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        if MAPPED:
            lane = tl.load(lanes_ptr + ids, mask=ids < vocab_size, other=0)
            w0, w1, w2, w3 = philox_words(seed, lane // 4, position, 0, PURPOSE)
            low = tl.where(lane % 2 == 0, w0, w1)
            high = tl.where(lane % 2 == 0, w2, w3)
            words = tl.where(lane % 4 < 2, low, high)
        else:
            fours = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            w0, w1, w2, w3 = philox_words(seed, fours, position, 0, PURPOSE)
            words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        logits = load_logits(logits_ptr + row * row_stride, ids, vocab_size)
        scaled = (logits - tl.load(max_ptr + row)) * tl.load(inv_temperature_ptr + row)
        scores = tl.maximum(scaled - tl.log(to_exponential(words)), LOWEST)
        kept = (scaled >= tl.load(cutoff_ptr + row)) & (ids < vocab_size)
        scores = tl.where(kept, scores, -INFINITY)
        best = tl.max(scores, axis=0)
        tl.store(best_ptr + entry, best)
        tl.store(best_id_ptr + entry, tl.min(tl.where(scores == best, ids, 2147483647), axis=0))


@triton.jit
def _winner(
    best_ptr,
    best_id_ptr,
    num_blocks,
    greedy_ptr,
    argmax_ptr,
    out_ptr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(argmax_ptr + row)
    if (tl.load(greedy_ptr + row) == 0) & (token >= 0):
        at = tl.arange(0, BLOCKS)
        inside = at < num_blocks
        best = tl.load(best_ptr + row * num_blocks + at, mask=inside, other=-INFINITY)
        ids = tl.load(best_id_ptr + row * num_blocks + at, mask=inside, other=2147483647)
        token = tl.min(tl.where(best == tl.max(best, axis=0), ids, 2147483647), axis=0).to(tl.int64)
    tl.store(out_ptr + row, token)


def race(
    logits: Tensor,
    top: Tensor,
    inv_temperature: Tensor,
    cutoff: Tensor,
    greedy: Tensor,
    argmax: Tensor,
    *,
    vocab_size: int,
    seeds: Tensor,
    round_start: Tensor,
    purpose: int,
    offset: int = 0,
    cu_num_logits: Tensor | None = None,
    lanes: Tensor | None = None,
) -> Tensor:
    """Ids [n] int64; arguments as in `reference.race`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, size = logits.shape[0], block_size(vocab_size)
    num_blocks = triton.cdiv(vocab_size, size)
    out = torch.empty_like(argmax)
    if n == 0:
        return out
    best = torch.empty(n, num_blocks, dtype=torch.float32, device=logits.device)
    best_id = torch.empty_like(best, dtype=torch.int32)
    owned = cu_num_logits is not None
    num_requests = seeds.shape[0] if owned else 0
    launch: Any = _block_race[(n * num_blocks,)]
    launch(
        logits,
        logits.stride(0),
        top,
        inv_temperature,
        cutoff,
        greedy,
        argmax,
        seeds.contiguous(),
        round_start.contiguous(),
        cu_num_logits,
        num_requests,
        lanes,
        best,
        best_id,
        num_blocks,
        vocab_size,
        offset,
        PURPOSE=purpose,
        BLOCK=size,
        REQUESTS=triton.next_power_of_2(num_requests) if owned else 0,
        MAPPED=lanes is not None,
        num_warps=size // 512,
        **overlapped(),
    )
    finish: Any = _winner[(n,)]
    finish(
        best,
        best_id,
        num_blocks,
        greedy,
        argmax,
        out,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **overlapped(),
    )
    return out
