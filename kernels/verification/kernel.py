"""Rejection sampling: decisions, recovered and bonus draws, one program a request.

Only one row a request is read again. Where its draw is from p, or from p without a one-hot draft,
the masses that the row's statistics left behind (`row_stats`) name the block, and only that block
is read. Where q was drawn from, max(p - q, 0) is summed block by block over the whole GPU first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels.categorical.kernel import first_past, pick_block
from specdec.kernels.philox.kernel import key_uniform
from specdec.kernels.row_stats.kernel import load_logits
from specdec.kernels.verification.record import count_leading, load_drafts, store_record


@triton.jit
def kept(logits, top, inv_temperature, cut, lse):
    """`sampling.kept_probs`; lse 0 gives weights relative to the row's maximum."""
    scaled = (logits - top) * inv_temperature
    return tl.where(scaled >= cut, tl.exp(scaled - lse), 0.0)


@triton.jit
def draw_from_row(
    row,
    excluded,  # id of a refused one-hot draft, -1 for none
    draw,
    logits_ptr,
    row_stride,
    max_ptr,
    inv_temperature_ptr,
    cutoff_ptr,
    block_mass_ptr,
    num_blocks,
    vocab_size,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A draw from p, or from p without `excluded` where that leaves anything."""
    at = tl.arange(0, BLOCKS)
    lane = tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * row_stride
    top = tl.load(max_ptr + row)
    inv_temperature = tl.load(inv_temperature_ptr + row)
    cut = tl.load(cutoff_ptr + row)
    mass = tl.load(block_mass_ptr + row * num_blocks + at, mask=at < num_blocks, other=0.0)
    if excluded >= 0:
        ids = excluded // BLOCK * BLOCK + lane
        weights = kept(load_logits(row_ptr, ids, vocab_size), top, inv_temperature, cut, 0.0)
        rest = tl.sum(tl.where(ids == excluded, 0.0, weights), axis=0)
        others = tl.where(at == excluded // BLOCK, rest, mass)
        if tl.sum(others, axis=0) > 0:
            mass = others
        else:
            excluded = excluded * 0 - 1
    block, quantile = pick_block(mass, draw, BLOCKS)
    ids = block * BLOCK + lane
    weights = kept(load_logits(row_ptr, ids, vocab_size), top, inv_temperature, cut, 0.0)
    weights = tl.where(ids == excluded, 0.0, weights)
    return (block * BLOCK + first_past(weights, quantile, BLOCK)).to(tl.int64)


@triton.jit
def _decide(
    logits_ptr,  # [N, V]
    row_stride,
    max_ptr,  # [N] and so on: `TargetDist`
    inv_temperature_ptr,
    cutoff_ptr,
    lse_ptr,
    greedy_ptr,
    argmax_ptr,
    block_mass_ptr,  # [N, C]
    num_blocks,
    vocab_size,
    cu_num_logits_ptr,
    batch_rows_ptr,
    num_logits,
    draft_ids_ptr,  # [R, K]
    draft_stride,
    num_drafts_ptr,
    K,
    is_delta_ptr,  # [R, K]
    delta_stride,
    q_logits_ptr,  # [S, K, V_draft]
    q_slot_stride,
    q_index_stride,
    q_width,
    q_max_ptr,  # [S, K] and so on: `DraftDist`
    q_cutoff_ptr,
    q_lse_ptr,
    q_stride,
    q_inv_temperature_ptr,  # [S]
    q_slots_ptr,  # [R]
    t2d_ptr,  # [V_map]
    t2d_size,
    seeds_ptr,  # [R]
    round_start_ptr,  # [R]
    token_ids_ptr,
    rows_ptr,
    counts_ptr,
    num_requests,
    pending_ptr,  # [R] int32, 1 where the draw is from max(p - q, 0) and still to come
    ACCEPT: tl.constexpr,
    RECOVER: tl.constexpr,
    BONUS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_Q: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    first, num_rows, ids, num_drafts, limit = load_drafts(
        request, cu_num_logits_ptr, draft_ids_ptr, draft_stride, num_drafts_ptr, K, COLUMNS
    )
    column = tl.arange(0, COLUMNS)
    real = (column < limit) & (ids >= 0) & (ids < vocab_size)  # others are refused without a read
    row = first + column
    p = kept(
        tl.load(logits_ptr + row * row_stride + ids, mask=real, other=0.0).to(tl.float32),
        tl.load(max_ptr + row, mask=real, other=0.0),
        tl.load(inv_temperature_ptr + row, mask=real, other=1.0),
        tl.load(cutoff_ptr + row, mask=real, other=0.0),
        tl.load(lse_ptr + row, mask=real, other=0.0),
    )
    greedy = tl.load(greedy_ptr + row, mask=real, other=0) != 0
    best = tl.load(argmax_ptr + row, mask=real, other=0)
    p = tl.where(greedy, (ids == best).to(tl.float32), p)
    q = tl.full((COLUMNS,), 1.0, tl.float32)
    sampled = column < 0
    if HAS_Q:
        delta = tl.load(is_delta_ptr + request * delta_stride + column, mask=column < K, other=1)
        sampled = delta == 0
        local = ids
        known = real & sampled
        if MAPPED:
            known = known & (ids < t2d_size)
            local = tl.load(t2d_ptr + ids, mask=known, other=-1)
        known = known & (local >= 0) & (local < q_width)
        slot = tl.load(q_slots_ptr + request)
        index = slot * q_stride + column
        q_logits = q_logits_ptr + slot * q_slot_stride + column * q_index_stride + local
        probs = kept(
            tl.load(q_logits, mask=known, other=0.0).to(tl.float32),
            tl.load(q_max_ptr + index, mask=known, other=0.0),
            tl.load(q_inv_temperature_ptr + slot),
            tl.load(q_cutoff_ptr + index, mask=known, other=0.0),
            tl.load(q_lse_ptr + index, mask=known, other=0.0),
        )
        q = tl.where(sampled, tl.where(known, probs, 0.0), 1.0)
    seed = tl.load(seeds_ptr + request)
    start = tl.load(round_start_ptr + request)
    draws = key_uniform(seed, start, column, ACCEPT)
    num_accepted = count_leading(real & (q > 0) & (draws * q < p), COLUMNS)

    last = tl.minimum(first + num_accepted, num_logits - 1)
    token = tl.load(argmax_ptr + last)  # stands on greedy rows and on invalid ones
    pending = 0
    if (num_rows > 0) & (token >= 0) & (tl.load(greedy_ptr + last) == 0):
        at_stop = column == num_accepted
        stands = num_accepted == limit
        refused = tl.where(stands, -1, tl.sum(tl.where(at_stop, ids, 0), axis=0))
        from_q = tl.sum((at_stop & sampled).to(tl.int32), axis=0) > 0
        if from_q & (refused >= 0):
            pending = 1
        else:
            draw = key_uniform(seed, start, num_accepted, tl.where(stands, BONUS, RECOVER))
            token = draw_from_row(
                last, refused, draw, logits_ptr, row_stride, max_ptr, inv_temperature_ptr,
                cutoff_ptr, block_mass_ptr, num_blocks, vocab_size, BLOCK, BLOCKS,
            )  # fmt: skip
    if HAS_Q:
        tl.store(pending_ptr + request, pending)
    store_record(
        request, first, num_rows, ids, num_drafts, num_accepted, token, batch_rows_ptr, num_logits,
        K, token_ids_ptr, rows_ptr, counts_ptr, num_requests, COLUMNS,
    )  # fmt: skip


@triton.jit
def residual(
    row,
    ids,  # [BLOCK]
    slot,
    index,
    logits_ptr,
    row_stride,
    max_ptr,
    inv_temperature_ptr,
    cutoff_ptr,
    lse_ptr,
    vocab_size,
    q_logits_ptr,
    q_slot_stride,
    q_index_stride,
    q_width,
    q_max_ptr,
    q_cutoff_ptr,
    q_lse_ptr,
    q_stride,
    q_inv_temperature_ptr,
    t2d_ptr,
    t2d_size,
    MAPPED: tl.constexpr,
):
    """max(p - q, 0) at some ids of one position."""
    logits = load_logits(logits_ptr + row * row_stride, ids, vocab_size)
    known = ids < vocab_size
    local = ids
    if MAPPED:
        local = tl.load(t2d_ptr + ids, mask=known & (ids < t2d_size), other=-1).to(tl.int32)
    known = known & (local >= 0) & (local < q_width)
    q_row = q_logits_ptr + slot * q_slot_stride + index * q_index_stride
    q_logits = tl.load(q_row + local, mask=known, other=0.0).to(tl.float32)
    p = kept(
        logits,
        tl.load(max_ptr + row),
        tl.load(inv_temperature_ptr + row),
        tl.load(cutoff_ptr + row),
        tl.load(lse_ptr + row),
    )
    q = kept(
        q_logits,
        tl.load(q_max_ptr + slot * q_stride + index),
        tl.load(q_inv_temperature_ptr + slot),
        tl.load(q_cutoff_ptr + slot * q_stride + index),
        tl.load(q_lse_ptr + slot * q_stride + index),
    )
    return tl.maximum(p - tl.where(known, q, 0.0), 0.0)


@triton.jit
def _residual_mass(
    logits_ptr, row_stride, max_ptr, inv_temperature_ptr, cutoff_ptr, lse_ptr, vocab_size,
    cu_num_logits_ptr,
    q_logits_ptr, q_slot_stride, q_index_stride, q_width, q_max_ptr, q_cutoff_ptr, q_lse_ptr,
    q_stride, q_inv_temperature_ptr, q_slots_ptr, t2d_ptr, t2d_size,
    accepted_ptr,  # [R]
    pending_ptr,  # [R]
    mass_ptr,  # [R, C] out, where pending
    num_blocks,
    BLOCK: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    entry = tl.program_id(0).to(tl.int64)
    request = entry // num_blocks
    if tl.load(pending_ptr + request) != 0:
        index = tl.load(accepted_ptr + request)
        row = tl.load(cu_num_logits_ptr + request) + index
        ids = (entry % num_blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
        weights = residual(
            row, ids, tl.load(q_slots_ptr + request), index, logits_ptr, row_stride, max_ptr,
            inv_temperature_ptr, cutoff_ptr, lse_ptr, vocab_size, q_logits_ptr, q_slot_stride,
            q_index_stride, q_width, q_max_ptr, q_cutoff_ptr, q_lse_ptr, q_stride,
            q_inv_temperature_ptr, t2d_ptr, t2d_size, MAPPED,
        )  # fmt: skip
        tl.store(mass_ptr + entry, tl.sum(weights, axis=0))


@triton.jit
def _draw_residual(
    logits_ptr, row_stride, max_ptr, inv_temperature_ptr, cutoff_ptr, lse_ptr, vocab_size,
    block_mass_ptr, cu_num_logits_ptr,
    q_logits_ptr, q_slot_stride, q_index_stride, q_width, q_max_ptr, q_cutoff_ptr, q_lse_ptr,
    q_stride, q_inv_temperature_ptr, q_slots_ptr, t2d_ptr, t2d_size,
    seeds_ptr, round_start_ptr, accepted_ptr, pending_ptr, mass_ptr, num_blocks,
    token_ids_ptr,  # [R, K + 1]; the recovered token goes in
    K,
    RECOVER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    if tl.load(pending_ptr + request) != 0:
        index = tl.load(accepted_ptr + request)
        row = tl.load(cu_num_logits_ptr + request) + index
        seed = tl.load(seeds_ptr + request)
        draw = key_uniform(seed, tl.load(round_start_ptr + request), index, RECOVER)
        at = tl.arange(0, BLOCKS)
        mass = tl.load(mass_ptr + request * num_blocks + at, mask=at < num_blocks, other=0.0)
        if tl.sum(mass, axis=0) > 0:
            block, quantile = pick_block(mass, draw, BLOCKS)
            weights = residual(
                row, block * BLOCK + tl.arange(0, BLOCK), tl.load(q_slots_ptr + request), index,
                logits_ptr, row_stride, max_ptr, inv_temperature_ptr, cutoff_ptr, lse_ptr,
                vocab_size, q_logits_ptr, q_slot_stride, q_index_stride, q_width, q_max_ptr,
                q_cutoff_ptr, q_lse_ptr, q_stride, q_inv_temperature_ptr, t2d_ptr, t2d_size,
                MAPPED,
            )  # fmt: skip
            token = (block * BLOCK + first_past(weights, quantile, BLOCK)).to(tl.int64)
        else:  # q is p
            token = draw_from_row(
                row, index * 0 - 1, draw, logits_ptr, row_stride, max_ptr, inv_temperature_ptr,
                cutoff_ptr, block_mass_ptr, num_blocks, vocab_size, BLOCK, BLOCKS,
            )  # fmt: skip
        tl.store(token_ids_ptr + request * (K + 1) + index, token)
