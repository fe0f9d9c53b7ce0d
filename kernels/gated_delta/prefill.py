"""The prefill kernels: the convolution, then chunks of rows, each a small triangular system."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.gated_delta.rows import (
    decay_of,
    keep_rows_,
    keep_shared_rows_,
    strength_of,
    text_rows,
)


@triton.jit
def convolve_kernel(
    inputs_ptr,  # [T, N] of any row stride
    conv_ptr,  # [C, W]
    stored_ptr,  # [S, KEPT, N]
    mixed_ptr,  # [T + R * (WINDOW - 1), C], written
    plan_ptr,  # [R, 4] int32
    query_start_ptr,  # [R + 1]
    slots_ptr,  # [R]
    stride,
    num_requests,
    num_rows,  # of `mixed`
    C: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    WINDOW: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """silu of the convolution over the folded and new rows of each prefill chunk.

    Request r's rows follow each other from row query_start[r] + r * (WINDOW - 1) of `mixed` on.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    other = tl.arange(0, REQUESTS)
    bound = tl.load(query_start_ptr + 1 + other, mask=other < num_requests, other=0)
    bound += (other + 1) * (WINDOW - 1)
    passed = (bound[None, :] <= row[:, None]) & (other < num_requests)[None, :]
    request = tl.minimum(tl.sum(passed.to(tl.int32), axis=1), num_requests - 1)
    start = tl.load(query_start_ptr + request)
    num_valid = tl.load(plan_ptr + request * 4)
    count = tl.load(plan_ptr + request * 4 + 1)
    old = tl.load(plan_ptr + request * 4 + 3) == 0
    slot = tl.load(slots_ptr + request)
    at = (row - (start + request * (WINDOW - 1))).to(tl.int32)  # among the request's own
    is_row = (row < num_rows) & (num_valid > WINDOW) & (at < count + num_valid)
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    is_channel = channel < C
    total = tl.zeros((ROWS, CHANNELS), tl.float32)
    for tap in tl.static_range(0, W):
        t = at + tap  # stored row, or past the last committed one a new row
        new = t - (W - 1 + count)
        kept = tl.load(
            stored_ptr + (slot * (W + WINDOW - 2) + t)[:, None] * N + channel,
            mask=(is_row & old & (new < 0))[:, None] & is_channel,
            other=0.0,
        )
        rows = tl.load(
            inputs_ptr + (start + new)[:, None] * stride + channel,
            mask=(is_row & (new >= 0))[:, None] & is_channel,
            other=0.0,
        )
        weight = tl.load(conv_ptr + channel * W + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += (kept.to(tl.float32) + rows.to(tl.float32)) * weight
    tl.store(
        mixed_ptr + row.to(tl.int64)[:, None] * C + channel,
        (total / (1 + tl.exp(-total))).to(mixed_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_channel,
    )


@triton.jit
def mixed_dot(exact, wide, PRECISION: tl.constexpr):
    """exact @ wide in fp32: against bf16 rows, fp32 ones count as the sum of two bf16 ones."""
    if exact.dtype == tl.bfloat16:
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(exact, high) + tl.dot(exact, low)
    else:
        return tl.dot(exact, wide, input_precision=PRECISION)


@triton.jit
def solve_unit_lower(system, right, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)^-1 right, for a strictly lower triangular `system` [ROWS, ROWS].

    With D the blocks of 8 on the diagonal, (1 + D)^-1 = (1 - D)(1 + D^2)(1 + D^4) = B, exactly. The
    rest is 1 + N with N = B (system - D), whose fourth power is 0 for at most 32 rows: the same
    product once more. Powers of blocks this small stay small also where all keys are alike, which
    those of the whole system do not.
    """
    tl.static_assert(ROWS <= 32, "of more rows the fourth power of N is not 0")
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    within = row // 8 == column // 8
    blocks = tl.where(within, system, 0.0)
    square = tl.dot(blocks, blocks, input_precision=PRECISION)
    fourth = tl.dot(square, square, input_precision=PRECISION)
    rest = system - blocks
    rest += tl.dot(fourth, rest, input_precision=PRECISION)
    rest += tl.dot(square, rest, input_precision=PRECISION)
    rest -= tl.dot(blocks, rest, input_precision=PRECISION)
    right += tl.dot(fourth, right, input_precision=PRECISION)
    right += tl.dot(square, right, input_precision=PRECISION)
    right -= tl.dot(blocks, right, input_precision=PRECISION)
    square = tl.dot(rest, rest, input_precision=PRECISION)
    right += tl.dot(square, right, input_precision=PRECISION)
    right -= tl.dot(rest, right, input_precision=PRECISION)
    return right


@triton.jit
def delta_prefill_kernel(
    inputs_ptr,  # [T, N] of any row stride
    mixed_ptr,  # [T + R * (WINDOW - 1), C] of `convolve_kernel`
    decay_log_ptr,  # [HV]
    bias_ptr,  # [HV]
    states_ptr,  # [S, HV, DK, DV] fp32
    stored_ptr,  # [S, KEPT, N]
    out_ptr,  # [T, HV, DV]
    plan_ptr,  # [R, 4] int32
    arrived_ptr,  # [R, HK] int32
    query_start_ptr,  # [R + 1]
    slots_ptr,  # [R]
    stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    WINDOW: tl.constexpr,
    DK_PAD: tl.constexpr,
    BLOCK: tl.constexpr,  # value dimensions of a program
    REPEAT_PAD: tl.constexpr,
    KEPT_PAD: tl.constexpr,
    ROWS: tl.constexpr,  # of a chunk
    OPERAND: tl.constexpr,  # type of queries and keys in products: bf16 holds bf16 rows exactly
    PRECISION: tl.constexpr,  # of fp32 products with them,
    SOLVE_PRECISION: tl.constexpr,  # of those that solve the system,
    LOOSE_PRECISION: tl.constexpr,  # and of the one that only makes outputs
):
    """One program a (request, value head, block of value dimensions) of more than WINDOW real rows.

    See `reference.gated_delta_chunked` for the formulas. Products take queries and keys as the
    convolution leaves them, which bf16 holds, and their lengths are divided out afterwards.
    """
    BLOCKS: tl.constexpr = (DV + BLOCK - 1) // BLOCK
    REPEAT: tl.constexpr = HV // HK
    C: tl.constexpr = 2 * HK * DK + HV * DV
    N: tl.constexpr = C + 2 * HV
    KEPT: tl.constexpr = W - 1 + WINDOW - 1
    head = tl.program_id(0) // BLOCKS
    key_head = head // REPEAT
    request = tl.program_id(1).to(tl.int64)
    num_valid = tl.load(plan_ptr + request * 4)
    if num_valid > WINDOW:
        count = tl.load(plan_ptr + request * 4 + 1)
        old = tl.load(plan_ptr + request * 4 + 3) == 0
        start = tl.load(query_start_ptr + request)
        num_rows = (tl.load(query_start_ptr + request + 1) - start).to(tl.int32)
        slot = tl.load(slots_ptr + request)
        dim = tl.arange(0, DK_PAD)
        is_dim = dim < DK
        value_dim = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
        is_value = value_dim < DV
        is_state = is_dim[:, None] & is_value[None, :]
        state_at = states_ptr + (slot * HV + head) * (DK * DV)
        state_at = state_at + dim[:, None] * DV + value_dim[None, :]
        state = tl.load(state_at, mask=is_state & old, other=0.0)
        stored = stored_ptr + slot * (KEPT * N)
        inputs = inputs_ptr + start * stride
        mixed = mixed_ptr + (start + request * (WINDOW - 1)) * C
        edge = W - 1 + count
        end = edge + num_valid
        query_at = (key_head * DK + dim)[None, :]
        key_at = HK * DK + query_at
        value_at = (2 * HK * DK + head * DV + value_dim)[None, :]
        rate = tl.load(decay_log_ptr + head).to(tl.float32)
        bias = tl.load(bias_ptr + head).to(tl.float32)
        line = tl.arange(0, ROWS)
        lower = line[:, None] >= line[None, :]

        # the folded rows come first, and have no outputs
        total = count + num_valid
        passed = count + num_rows
        for first in range(0, passed, ROWS):
            at = first + line
            t = count * 0 + (W - 1 + first)
            is_row = at < total
            here = mixed + (t - (W - 1)).to(tl.int64) * C  # the chunk's first row
            dims, values, rows = is_dim[None, :], is_value[None, :], is_row[:, None]
            key = tl.load(here + line[:, None] * C + key_at, mask=rows & dims, other=0.0).to(
                tl.float32
            )
            key_scale = tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)
            key = key.to(OPERAND)
            strength = text_rows(
                stored, inputs, stride, t, line, C + head, is_row, edge, end, old, N
            )
            step = text_rows(
                stored, inputs, stride, t, line, C + HV + head, is_row, edge, end, old, N
            )
            beta = tl.where(is_row, strength_of(strength, inputs_ptr), 0.0)
            decay = tl.where(is_row, decay_of(step, bias, rate), 0.0)
            since = tl.cumsum(decay, axis=0)
            between = tl.exp(
                tl.where(lower, since[:, None] - since[None, :], float("-inf"))
            )  # row i, column j <= i: what is left at i of what j wrote
            turned = tl.trans(key)
            between *= key_scale[None, :]
            system = tl.dot(key, turned, input_precision=PRECISION) * between
            system *= (beta * key_scale)[:, None]
            system = tl.where(line[:, None] > line[None, :], system, 0.0)
            value = tl.load(here + line[:, None] * C + value_at, mask=rows & values, other=0.0).to(
                tl.float32
            )
            past = tl.exp(since)
            seen = value - (past * key_scale)[:, None] * mixed_dot(key, state, PRECISION)
            delta = solve_unit_lower(system, beta[:, None] * seen, ROWS, SOLVE_PRECISION)

            query = tl.load(here + line[:, None] * C + query_at, mask=rows & dims, other=0.0).to(
                tl.float32
            )
            query_scale = tl.rsqrt(tl.sum(query * query, axis=1) + 1e-6) * (DK**-0.5)
            query = query.to(OPERAND)
            scores = tl.dot(query, turned, input_precision=PRECISION) * between
            scores *= query_scale[:, None]
            out = (past * query_scale)[:, None] * mixed_dot(query, state, PRECISION)
            out += tl.dot(scores, delta, input_precision=LOOSE_PRECISION)
            row = (start + (at - count))[:, None]
            tl.store(
                out_ptr + (row * HV + head) * DV + value_dim[None, :],
                out.to(out_ptr.dtype.element_ty),
                mask=((at >= count) & (at < passed))[:, None] & is_value[None, :],
            )
            whole = tl.sum(decay, axis=0)
            delta *= (key_scale * tl.exp(whole - since))[:, None]
            state = state * tl.exp(whole) + mixed_dot(turned, delta, PRECISION)

        tl.store(state_at, state, mask=is_state)
        if KEPT > 0:
            kept = count + num_valid
            channel = 2 * HK * DK + head * DV + value_dim
            keep_rows_(
                stored, inputs, stride, kept, channel, is_value, edge, end, old, N, KEPT, KEPT_PAD
            )
            keep_shared_rows_(
                arrived_ptr + request * HK + key_head,
                stored,
                inputs,
                stride,
                kept,
                edge,
                end,
                old,
                key_head,
                HK,
                HV,
                DK,
                DV,
                DK_PAD,
                REPEAT_PAD,
                REPEAT * BLOCKS,
                N,
                KEPT,
                KEPT_PAD,
            )
