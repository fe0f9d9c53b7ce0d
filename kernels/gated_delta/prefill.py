"""The prefill kernel: chunks of rows, each with one triangular system solved by small products."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.gated_delta.rows import (
    decay_of,
    keep_rows_,
    keep_shared_rows_,
    silu,
    strength_of,
    tap_weights,
    text_rows,
)


@triton.jit
def convolved(
    stored,
    inputs,
    conv_ptr,
    stride,
    first,
    line,  # [rows, 1]
    channel,  # [1, D]
    is_channel,  # [1, D]
    is_row,  # [rows, 1]
    edge,
    end,
    old,
    like,
    W: tl.constexpr,
    N: tl.constexpr,
):
    """silu of the convolution at text rows first + line, in fp32."""
    mask = is_row & is_channel
    total = text_rows(stored, inputs, stride, first, line, channel, mask, edge, end, old, N)
    total *= tap_weights(conv_ptr, channel, is_channel, 3, W)
    for back in tl.static_range(1, W):
        rows = text_rows(
            stored, inputs, stride, first - back, line, channel, mask, edge, end, old, N
        )
        total += rows * tap_weights(conv_ptr, channel, is_channel, 3 - back, W)
    return silu(total, like)


@triton.jit
def solve_unit_lower(system, right, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + system)^-1 right, for a strictly lower triangular `system` [ROWS, ROWS].

    With D the blocks of 8 on the diagonal, (1 + D)^-1 = (1 - D)(1 + D^2)(1 + D^4) = B, exactly. The
    rest is 1 + N with N = B (system - D), whose eighth power is 0 for at most 64 rows: the same
    product once more. Powers of blocks this small stay small also where all keys are alike, which
    those of the whole system do not.
    """
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
    if ROWS > 32:
        fourth = tl.dot(square, square, input_precision=PRECISION)
        right += tl.dot(fourth, right, input_precision=PRECISION)
    right += tl.dot(square, right, input_precision=PRECISION)
    right -= tl.dot(rest, right, input_precision=PRECISION)
    return right


@triton.jit
def delta_prefill_kernel(
    inputs_ptr,  # [T, N] of any row stride
    conv_ptr,  # [C, W]
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
    PRECISION: tl.constexpr,  # of products,
    SOLVE_PRECISION: tl.constexpr,  # and of those that solve the system
):
    """One program a (request, value head, block of value dimensions) of more than WINDOW real rows;
    see `reference.gated_delta_chunked` for the formulas."""
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
        edge = W - 1 + count
        end = edge + num_valid
        query_at = (key_head * DK + dim)[None, :]
        key_at = HK * DK + query_at
        value_at = (2 * HK * DK + head * DV + value_dim)[None, :]
        rate = tl.load(decay_log_ptr + head).to(tl.float32)
        bias = tl.load(bias_ptr + head).to(tl.float32)
        line = tl.arange(0, ROWS)
        lower = line[:, None] >= line[None, :]

        # the folded rows are the first chunk: at most WINDOW - 1 rows, which may be several chunks
        total = count + num_valid
        passed = count + num_rows
        for first in range(0, passed, ROWS):
            at = first + line
            t = count * 0 + (W - 1 + first)
            is_row = at < total
            tall = line[:, None]
            dims, values, rows = is_dim[None, :], is_value[None, :], is_row[:, None]
            key = convolved(
                stored,
                inputs,
                conv_ptr,
                stride,
                t,
                tall,
                key_at,
                dims,
                rows,
                edge,
                end,
                old,
                inputs_ptr,
                W,
                N,
            )
            key *= tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
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
            system = tl.dot(key, turned, input_precision=PRECISION) * between * beta[:, None]
            system = tl.where(line[:, None] > line[None, :], system, 0.0)
            value = convolved(
                stored,
                inputs,
                conv_ptr,
                stride,
                t,
                tall,
                value_at,
                values,
                rows,
                edge,
                end,
                old,
                inputs_ptr,
                W,
                N,
            )
            past = tl.exp(since)[:, None]
            seen = value - past * tl.dot(key, state, input_precision=PRECISION)
            delta = solve_unit_lower(system, beta[:, None] * seen, ROWS, SOLVE_PRECISION)

            query = convolved(
                stored,
                inputs,
                conv_ptr,
                stride,
                t,
                tall,
                query_at,
                dims,
                rows,
                edge,
                end,
                old,
                inputs_ptr,
                W,
                N,
            )
            query *= tl.rsqrt(tl.sum(query * query, axis=1) + 1e-6)[:, None] * (DK**-0.5)
            scores = tl.dot(query, turned, input_precision=PRECISION) * between
            out = past * tl.dot(query, state, input_precision=PRECISION)
            out += tl.dot(scores, delta, input_precision=PRECISION)
            row = (start + (at - count))[:, None]
            tl.store(
                out_ptr + (row * HV + head) * DV + value_dim[None, :],
                out.to(out_ptr.dtype.element_ty),
                mask=((at >= count) & (at < passed))[:, None] & is_value[None, :],
            )
            whole = tl.sum(decay, axis=0)
            written = tl.trans(key * tl.exp(whole - since)[:, None])
            state = state * tl.exp(whole) + tl.dot(written, delta, input_precision=PRECISION)

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
