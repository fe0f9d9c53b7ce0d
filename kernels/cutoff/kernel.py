"""Top-k, top-p and min-p as one threshold from raw logits, without a sort.

`scan` reads the logits once and leaves the maximum of every chunk of a few ids. The J-th largest of
those bounds the J-th largest logit from below, so that the few logits at or above it, the
candidates, hold the whole answer whenever J reaches the k of top-k, or the candidates hold the mass
that top-p wants. One program a row gathers them and finds each threshold by halving over the bits
of the floats, which order as integers. Rows that this cannot answer (a k beyond `MAX_J`, more
candidates than `CANDIDATES`, a distribution so flat that they lack the mass) are halved over the
whole row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.categorical.reference import BLOCK
from specdec.kernels.chain import overlapped
from specdec.kernels.cutoff.reference import SLACK
from specdec.kernels.cutoff.scan import Scan, scan
from specdec.kernels.cutoff.search import (
    EXCLUDED,
    key_of,
    kth_key,
    mass_key,
    row_kth_key,
    row_mass,
    row_mass_key,
    value_of,
)
from specdec.kernels.row_stats.kernel import inverse_temperature, top_of
from specdec.kernels.row_stats.reference import RowStats, block_size

CANDIDATES = 2048  # most that one program holds
MAX_J = 1024
TILE = 2048  # ids read at once; more would leave one program of `_select` to a processor
STEPS = 12  # see `row_mass_key`


@triton.jit
def _select(
    logits_ptr,  # [n, >= vocab_size]
    row_stride,
    temperature_ptr,  # [n]
    top_k_ptr,  # [n]
    top_p_ptr,  # [n]
    min_p_ptr,  # [n]
    block_max_ptr,  # [n, num_blocks]
    block_sum_ptr,  # [n, num_blocks]
    chunk_max_ptr,  # [n, num_chunks]
    max_ptr,  # [n]
    inv_temperature_ptr,  # [n]
    cutoff_ptr,  # [n]
    lse_ptr,  # [n]
    greedy_ptr,  # [n]
    argmax_ptr,  # [n]
    mass_ptr,  # [n, num_masses]
    ids_ptr,  # [n, CANDIDATES], scratch
    keys_ptr,  # [n, CANDIDATES], scratch
    chunks_ptr,  # [n, num_chunks], scratch
    vocab_size,
    num_blocks,
    num_chunks,
    num_masses,
    epsilon,
    invalid,
    EXCLUDED: tl.constexpr,  # the key of -inf
    SLACK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a row
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a row
    CANDIDATES: tl.constexpr,
    MAX_J: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    MASS_BLOCK: tl.constexpr,  # ids of one mass, a multiple of BLOCK
    MASSES: tl.constexpr,  # of a row
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    dtype = logits_ptr.dtype.element_ty
    temperature = tl.load(temperature_ptr + row)
    scale = inverse_temperature(temperature, epsilon)
    greedy = temperature < epsilon

    block = tl.arange(0, BLOCKS)
    at = row * num_blocks + block
    block_max = tl.load(block_max_ptr + at, mask=block < num_blocks, other=float("-inf"))
    block_sum = tl.load(block_sum_ptr + at, mask=block < num_blocks, other=0.0)
    top, is_nan, finite = top_of(block_max)
    lowest = tl.min(tl.where(block_max == top, block, BLOCKS))
    near = lowest * BLOCK + tl.arange(0, BLOCK)
    around = tl.load(logits_ptr + near, mask=near < vocab_size, other=float("-inf"))
    argmax = tl.min(tl.where(around.to(tl.float32) == top, near, vocab_size))
    tl.store(max_ptr + row, tl.where(is_nan, float("nan"), top))
    tl.store(inv_temperature_ptr + row, scale)
    tl.store(greedy_ptr + row, greedy)
    tl.store(argmax_ptr + row, tl.where(finite, argmax, invalid).to(tl.int64))

    top_k = tl.minimum(tl.load(top_k_ptr + row), vocab_size).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    cut = tl.where(finite, tl.where(greedy, 0.0, float("-inf")), float("inf"))
    lse = 0.0
    mass_block = tl.arange(0, MASSES)
    mass_at = mass_ptr + row * num_masses + mass_block
    if finite & (greedy == 0):
        block_sum *= tl.exp((block_max - top) * scale)
        total = tl.sum(block_sum)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            # candidates: everything at or above the J-th largest chunk maximum
            bottom = EXCLUDED + 1
            chunk = tl.arange(0, CHUNKS)
            maxima = tl.load(
                chunk_max_ptr + row * num_chunks + chunk,
                mask=chunk < num_chunks,
                other=float("-inf"),
            )
            maxima = key_of(maxima)
            high = tl.max(maxima)
            some = tl.minimum(tl.maximum(num_chunks // 2, 1), MAX_J)
            by_k = (top_k > 0) & (top_k <= MAX_J)
            low = kth_key(maxima, bottom, high, tl.where(by_k, top_k, some))
            reach = maxima >= low
            place = tl.cumsum(reach.to(tl.int32), axis=0) - 1
            tl.store(chunks_ptr + row * num_chunks + place, chunk, mask=reach)
            num_hits = tl.sum(reach.to(tl.int32))
            tl.debug_barrier()
            found = 0
            for first in range(0, num_hits, TILE // CHUNK):
                nth = first + tl.arange(0, TILE // CHUNK)
                which = tl.load(chunks_ptr + row * num_chunks + nth, mask=nth < num_hits, other=0)
                ids = which[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
                tile = tl.load(
                    logits_ptr + ids,
                    mask=(nth < num_hits)[:, None] & (ids < vocab_size),
                    other=float("-inf"),
                )
                flat_ids = tl.reshape(ids, (TILE,))
                flat_keys = tl.reshape(key_of(tile), (TILE,))
                hit = flat_keys >= low
                to = found + tl.cumsum(hit.to(tl.int32), axis=0) - 1
                hit_at = row * CANDIDATES + to
                tl.store(ids_ptr + hit_at, flat_ids, mask=hit & (to < CANDIDATES))
                tl.store(keys_ptr + hit_at, flat_keys, mask=hit & (to < CANDIDATES))
                found += tl.sum(hit.to(tl.int32))
            tl.debug_barrier()
            few = found <= CANDIDATES
            index = tl.arange(0, CANDIDATES)
            held = few & (index < found)
            keys = tl.load(keys_ptr + row * CANDIDATES + index, mask=held, other=bottom - 1)
            scaled = (value_of(keys, dtype) - top) * scale
            exps = tl.where(held, tl.exp(scaled), 0.0)
            all_held = few & (low == bottom)  # no candidate was left out

            by_count = float("-inf")
            if top_k > 0:
                key = bottom - 1
                if few & (by_k | all_held):
                    if found >= top_k:
                        key = kth_key(keys, low, high, top_k)
                else:
                    key = row_kth_key(logits_ptr, vocab_size, bottom - 1, high, top_k, dtype, TILE)
                by_count = (value_of(key, dtype) - top) * scale
            inside = few & ((by_count >= (value_of(low, dtype) - top) * scale) | all_held)
            exps = tl.where(scaled >= by_count, exps, 0.0)
            if top_k > 0:
                if inside:
                    total = tl.sum(exps)
                else:
                    total = row_mass(logits_ptr, vocab_size, by_count, top, scale, TILE)

            by_mass = float("-inf")
            if top_p < 1.0:
                wanted = top_p * (1.0 - SLACK) * total
                if inside | (few & (tl.sum(exps) >= wanted)):
                    key = mass_key(keys, exps, low, high, wanted)
                else:
                    # ids of less than this leave out less than top-p does, even all together
                    light = (total - wanted) / vocab_size
                    least = top + (tl.log(tl.maximum(light, 1e-30)) - 1.0) / scale
                    key = row_mass_key(
                        logits_ptr, vocab_size,
                        tl.maximum(tl.minimum(key_of(least.to(dtype)) - 2, high), bottom - 1),
                        tl.where(few, tl.maximum(low - 1, bottom - 1), high),
                        wanted, by_count, top, scale, dtype, STEPS, TILE,
                    )  # fmt: skip
                by_mass = (value_of(key, dtype) - top) * scale

            by_peak = tl.where(
                min_p > 0.0, tl.log(tl.where(min_p > 0.0, min_p, 1.0)), float("-inf")
            )
            by_peak -= SLACK
            cut = tl.minimum(tl.maximum(tl.maximum(by_count, by_mass), by_peak), 0.0)
            if few & ((cut >= (value_of(low, dtype) - top) * scale) | all_held):
                total = tl.sum(tl.where(scaled >= cut, exps, 0.0))
                masses = tl.zeros((MASSES,), tl.float32)
                for first in range(0, found, 128):
                    some_index = first + tl.arange(0, 128)
                    some_at = row * CANDIDATES + some_index
                    some_ids = tl.load(ids_ptr + some_at, mask=some_index < found, other=0)
                    some_keys = tl.load(keys_ptr + some_at, mask=some_index < found, other=EXCLUDED)
                    x = (value_of(some_keys, dtype) - top) * scale
                    weights = tl.where((x >= cut) & (some_index < found), tl.exp(x), 0.0)
                    here = (some_ids // MASS_BLOCK)[:, None] == mass_block[None, :]
                    masses += tl.sum(tl.where(here, weights[:, None], 0.0), axis=0)
                tl.store(mass_at, masses, mask=mass_block < num_masses)
            else:
                total = 0.0
                for number in range(num_masses):
                    mass_ids = number * MASS_BLOCK + tl.arange(0, MASS_BLOCK)
                    mass_x = tl.load(
                        logits_ptr + mass_ids, mask=mass_ids < vocab_size, other=float("-inf")
                    )
                    mass_x = (mass_x.to(tl.float32) - top) * scale
                    one_mass = tl.sum(tl.where(mass_x >= cut, tl.exp(mass_x), 0.0))
                    tl.store(mass_ptr + row * num_masses + number, one_mass)
                    total += one_mass
        else:
            tl.store(
                mass_at,
                tl.sum(tl.reshape(block_sum, (MASSES, BLOCKS // MASSES)), axis=1),
                mask=mass_block < num_masses,
            )
        lse = tl.log(total)
    else:
        tl.store(mass_at, tl.zeros((MASSES,), tl.float32), mask=mass_block < num_masses)
    tl.store(cutoff_ptr + row, cut)
    tl.store(lse_ptr + row, lse)


def select(
    logits: Tensor,
    scanned: Scan,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
) -> RowStats:
    """`filtered_rows` after a scan that kept chunk maxima."""
    num_rows = logits.shape[0]
    num_blocks, num_chunks = scanned.block_max.shape[1], scanned.chunk_max.shape[1]
    mass_block = block_size(vocab_size)
    num_masses = triton.cdiv(vocab_size, mass_block)
    masses = triton.next_power_of_2(num_masses)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return logits.new_empty(num_rows, *shape, dtype=dtype)

    rows = RowStats(
        max=empty(torch.float32),
        inv_temperature=empty(torch.float32),
        cutoff=empty(torch.float32),
        lse=empty(torch.float32),
        greedy=empty(torch.bool),
        argmax=empty(torch.int64),
        block_mass=empty(torch.float32, num_masses),
    )
    launch: Any = _select[(num_rows,)]
    launch(
        logits,
        logits.stride(0),
        temperature,
        top_k,
        top_p,
        min_p,
        scanned.block_max,
        scanned.block_sum,
        scanned.chunk_max,
        *rows,
        empty(torch.int32, CANDIDATES),
        empty(torch.int32, CANDIDATES),
        empty(torch.int32, num_chunks),
        vocab_size,
        num_blocks,
        num_chunks,
        num_masses,
        epsilon,
        invalid,
        EXCLUDED=EXCLUDED[logits.dtype],
        SLACK=SLACK,
        BLOCK=BLOCK,
        BLOCKS=masses * (mass_block // BLOCK),
        CHUNK=scanned.chunk,
        CHUNKS=triton.next_power_of_2(num_chunks),
        CANDIDATES=CANDIDATES,
        MAX_J=MAX_J,
        TILE=TILE,
        STEPS=STEPS,
        MASS_BLOCK=mass_block,
        MASSES=masses,
        num_warps=8,
        **overlapped(),
    )
    return rows


def filtered_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    invalid: int,
) -> RowStats:
    """As `reference.filtered_rows`, in two launches: a read of the logits, and a program a row."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    temperature, top_k = temperature.contiguous(), top_k.contiguous()
    top_p, min_p = top_p.contiguous(), min_p.contiguous()
    scanned = scan(logits, temperature, vocab_size, epsilon, chunks=True)
    known: dict[str, Any] = {"vocab_size": vocab_size, "epsilon": epsilon, "invalid": invalid}
    return select(logits, scanned, temperature, top_k, top_p, min_p, **known)
