"""The window kernel: folds the committed rows, then runs a few new ones, state in registers."""

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
def plan_windows_kernel(
    positions_ptr,  # [T]
    query_start_ptr,  # [R + 1]
    row_valid_ptr,  # [T]
    slots_ptr,  # [R]
    window_start_ptr,  # [S]
    plan_ptr,  # [R, 4] int32
    arrived_ptr,  # [R, HK] int32
    WINDOW: tl.constexpr,
    HK: tl.constexpr,
    HK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    num_valid = tl.zeros((ROWS,), tl.int32)
    for tile in range(start, end, ROWS):
        row = tile + tl.arange(0, ROWS)
        num_valid += tl.load(row_valid_ptr + row, mask=row < end, other=0).to(tl.int32)
    num_valid = tl.sum(num_valid, axis=0)
    slot = tl.load(slots_ptr + request)
    first = tl.load(positions_ptr + start, mask=end > start, other=0)
    fresh = (num_valid > 0) & (first == 0)
    since = first - tl.load(window_start_ptr + slot)
    count = tl.minimum(tl.maximum(since, 0), WINDOW - 1).to(tl.int32)
    num_final = tl.where(num_valid > WINDOW, num_valid, 1)
    tl.store(plan_ptr + request * 4, num_valid)
    tl.store(plan_ptr + request * 4 + 1, tl.where(fresh, 0, count))
    tl.store(plan_ptr + request * 4 + 2, num_final)
    tl.store(plan_ptr + request * 4 + 3, fresh.to(tl.int32))
    head = tl.arange(0, HK_PAD)
    tl.store(arrived_ptr + request * HK + head, tl.zeros((HK_PAD,), tl.int32), mask=head < HK)
    tl.store(window_start_ptr + slot, first + num_final, mask=num_valid > 0)


@triton.jit
def delta_window_kernel(
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
):
    """One program a (request, value head, block of value dimensions) of at most WINDOW real rows.
    A loop runs over the folded rows and then the new ones, the next row's inputs on their way."""
    BLOCKS: tl.constexpr = (DV + BLOCK - 1) // BLOCK
    REPEAT: tl.constexpr = HV // HK
    C: tl.constexpr = 2 * HK * DK + HV * DV
    N: tl.constexpr = C + 2 * HV
    KEPT: tl.constexpr = W - 1 + WINDOW - 1
    head = tl.program_id(0) // BLOCKS
    key_head = head // REPEAT
    request = tl.program_id(1).to(tl.int64)
    num_valid = tl.load(plan_ptr + request * 4)
    count = tl.load(plan_ptr + request * 4 + 1)
    old = tl.load(plan_ptr + request * 4 + 3) == 0
    start = tl.load(query_start_ptr + request)
    num_rows = (tl.load(query_start_ptr + request + 1) - start).to(tl.int32)
    slot = tl.load(slots_ptr + request)

    dim = tl.arange(0, DK_PAD)
    is_dim = dim < DK
    value_dim = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    is_value = value_dim < DV
    out = out_ptr + head * DV + value_dim
    if num_valid <= WINDOW:
        for row in range(num_valid, num_rows):
            zero = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(out + (start + row) * (HV * DV), zero, mask=is_value)
    if (num_valid <= WINDOW) & (num_valid > 0):
        is_state = is_dim[:, None] & is_value[None, :]
        state_at = states_ptr + (slot * HV + head) * (DK * DV)
        state_at = state_at + dim[:, None] * DV + value_dim[None, :]
        state = tl.load(state_at, mask=is_state & old, other=0.0)
        stored = stored_ptr + slot * (KEPT * N)
        inputs = inputs_ptr + start * stride
        edge = W - 1 + count
        end = edge + num_valid
        query_at = key_head * DK + dim
        key_at = HK * DK + query_at
        value_at = 2 * HK * DK + head * DV + value_dim
        rate = tl.load(decay_log_ptr + head).to(tl.float32)
        bias = tl.load(bias_ptr + head).to(tl.float32)

        qw0 = tap_weights(conv_ptr, query_at, is_dim, 0, W)
        qw1 = tap_weights(conv_ptr, query_at, is_dim, 1, W)
        qw2 = tap_weights(conv_ptr, query_at, is_dim, 2, W)
        qw3 = tap_weights(conv_ptr, query_at, is_dim, 3, W)
        kw0 = tap_weights(conv_ptr, key_at, is_dim, 0, W)
        kw1 = tap_weights(conv_ptr, key_at, is_dim, 1, W)
        kw2 = tap_weights(conv_ptr, key_at, is_dim, 2, W)
        kw3 = tap_weights(conv_ptr, key_at, is_dim, 3, W)
        vw0 = tap_weights(conv_ptr, value_at, is_value, 0, W)
        vw1 = tap_weights(conv_ptr, value_at, is_value, 1, W)
        vw2 = tap_weights(conv_ptr, value_at, is_value, 2, W)
        vw3 = tap_weights(conv_ptr, value_at, is_value, 3, W)

        # the rows behind each tap; t: the row to come
        t = count * 0 + (W - 4)
        q0 = text_rows(stored, inputs, stride, t, 0, query_at, is_dim, edge, end, old, N)
        q1 = text_rows(stored, inputs, stride, t + 1, 0, query_at, is_dim, edge, end, old, N)
        q2 = text_rows(stored, inputs, stride, t + 2, 0, query_at, is_dim, edge, end, old, N)
        q3 = text_rows(stored, inputs, stride, t + 3, 0, query_at, is_dim, edge, end, old, N)
        k0 = text_rows(stored, inputs, stride, t, 0, key_at, is_dim, edge, end, old, N)
        k1 = text_rows(stored, inputs, stride, t + 1, 0, key_at, is_dim, edge, end, old, N)
        k2 = text_rows(stored, inputs, stride, t + 2, 0, key_at, is_dim, edge, end, old, N)
        k3 = text_rows(stored, inputs, stride, t + 3, 0, key_at, is_dim, edge, end, old, N)
        v0 = text_rows(stored, inputs, stride, t, 0, value_at, is_value, edge, end, old, N)
        v1 = text_rows(stored, inputs, stride, t + 1, 0, value_at, is_value, edge, end, old, N)
        v2 = text_rows(stored, inputs, stride, t + 2, 0, value_at, is_value, edge, end, old, N)
        v3 = text_rows(stored, inputs, stride, t + 3, 0, value_at, is_value, edge, end, old, N)
        strength = text_rows(stored, inputs, stride, t + 3, 0, C + head, True, edge, end, old, N)
        step = text_rows(stored, inputs, stride, t + 3, 0, C + HV + head, True, edge, end, old, N)

        for i in range(count + num_valid):
            query = silu(q0 * qw0 + q1 * qw1 + q2 * qw2 + q3 * qw3, inputs_ptr)
            key = silu(k0 * kw0 + k1 * kw1 + k2 * kw2 + k3 * kw3, inputs_ptr)
            value = silu(v0 * vw0 + v1 * vw1 + v2 * vw2 + v3 * vw3, inputs_ptr)
            beta = strength_of(strength, inputs_ptr)
            left = tl.exp(decay_of(step, bias, rate))
            q0, q1, q2 = q1, q2, q3
            k0, k1, k2 = k1, k2, k3
            v0, v1, v2 = v1, v2, v3
            t = count * 0 + (W + i)
            q3 = text_rows(stored, inputs, stride, t, 0, query_at, is_dim, edge, end, old, N)
            k3 = text_rows(stored, inputs, stride, t, 0, key_at, is_dim, edge, end, old, N)
            v3 = text_rows(stored, inputs, stride, t, 0, value_at, is_value, edge, end, old, N)
            strength = text_rows(stored, inputs, stride, t, 0, C + head, True, edge, end, old, N)
            step = text_rows(stored, inputs, stride, t, 0, C + HV + head, True, edge, end, old, N)

            query = query * tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * (DK**-0.5)
            key = key * tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
            state = state * left
            missing = value - tl.sum(state * key[:, None], axis=0)
            state += key[:, None] * (beta * missing)[None, :]
            if i >= count:
                row = tl.sum(state * query[:, None], axis=0)
                place = out + (start + (i - count)) * (HV * DV)
                tl.store(place, row.to(out_ptr.dtype.element_ty), mask=is_value)
            if i == count:  # the first new row is always committed: what is kept stands after it
                tl.store(state_at, state, mask=is_state)

        if KEPT > 0:
            first = count + 1
            keep_rows_(
                stored, inputs, stride, first, value_at, is_value, edge, end, old, N, KEPT, KEPT_PAD
            )
            keep_shared_rows_(
                arrived_ptr + request * HK + key_head,
                stored,
                inputs,
                stride,
                first,
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
