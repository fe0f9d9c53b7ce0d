"""The Triton programs behind `kernel`: one a request, or one a tile of its rows or of requests.

All integers are int64 but flags, which are bool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.step.reference import NULL_SLOT as _NULL_SLOT

NULL_SLOT = tl.constexpr(_NULL_SLOT)


@triton.jit
def eagle_inputs(
    new_token_ids_ptr,  # [R, W]
    last_rows_ptr,  # [R]
    positions_ptr,  # [T]
    query_start_ptr,  # [R + 1]
    slots_ptr,  # [R]
    token_ids_ptr,  # [S, L]
    token_stride,
    num_tokens_ptr,  # [S]
    out_ids,  # [T]
    out_last,  # [R]
    W: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    slot = tl.load(slots_ptr + request)
    row = start + tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row = row < end
    following = tl.load(positions_ptr + row, mask=is_row, other=0) + 1
    index = following - tl.load(num_tokens_ptr + slot)
    is_new = (index >= 0) & (index < W)
    fresh = tl.load(new_token_ids_ptr + request * W + index, mask=is_row & is_new, other=0)
    known = tl.load(
        token_ids_ptr + slot * token_stride + following, mask=is_row & (is_new == 0), other=0
    )
    tl.store(out_ids + row, tl.where(is_new, tl.maximum(fresh, 0), known), mask=is_row)
    if tl.program_id(1) == 0:
        last = tl.load(positions_ptr + tl.load(last_rows_ptr + request))
        tl.store(out_last + request, last)


@triton.jit
def eagle_decode(
    last_ptr,  # [R]
    block_tables_ptr,  # [R, M]
    table_stride,
    out_positions,  # [steps, row_stride]
    out_slot_mapping,  # [steps, row_stride]
    out_row_valid,  # [steps, row_stride]
    out_query_start,  # [steps, request_stride], as all that follow
    out_seq_lens,
    out_logits_indices,
    out_cu_num_logits,
    row_stride,
    request_stride,
    num_requests,
    DEPTHS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program a tile of requests at one draft step."""
    request = tl.program_id(0) * TILE + tl.arange(0, TILE)
    step = tl.program_id(1) + 1
    count = tl.minimum(step, DEPTHS)
    ahead = step // DEPTHS * DEPTHS
    is_request = request < num_requests
    last = tl.load(last_ptr + request, mask=is_request, other=0)
    first = request * count
    at = (step - 1) * request_stride + request
    tl.store(out_query_start + at, first.to(tl.int64), mask=request <= num_requests)
    tl.store(out_cu_num_logits + at, request.to(tl.int64), mask=request <= num_requests)
    tl.store(out_seq_lens + at, last + ahead + 1, mask=is_request)
    tl.store(out_logits_indices + at, (first + count - 1).to(tl.int64), mask=is_request)
    for index in range(count):
        position = last + ahead + 1 - count + index
        valid = position >= 0
        position = tl.maximum(position, 0)
        table = block_tables_ptr + request.to(tl.int64) * table_stride
        block = tl.load(table + position // BLOCK_SIZE, mask=is_request, other=0)
        place = tl.where(valid, block * BLOCK_SIZE + position % BLOCK_SIZE, NULL_SLOT)
        row = (step - 1) * row_stride + first + index
        tl.store(out_positions + row, position, mask=is_request)
        tl.store(out_slot_mapping + row, place, mask=is_request)
        tl.store(out_row_valid + row, valid, mask=is_request)


@triton.jit
def move_back(
    positions_ptr,  # [T]
    row_valid_ptr,  # [T]
    seq_lens_ptr,  # [R]
    block_tables_ptr,  # [R, M]
    table_stride,
    query_start_ptr,  # [R + 1]
    out_positions,  # [T]
    out_slot_mapping,  # [T]
    out_row_valid,  # [T]
    out_seq_lens,  # [R]
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    row = start + tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row = row < end
    position = tl.load(positions_ptr + row, mask=is_row, other=0)
    valid = tl.load(row_valid_ptr + row, mask=is_row, other=0) & (position >= DEPTH)
    position = tl.where(valid, position - DEPTH, 0)
    table = block_tables_ptr + request.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE, mask=valid, other=0)
    place = tl.where(valid, block * BLOCK_SIZE + position % BLOCK_SIZE, NULL_SLOT)
    tl.store(out_positions + row, position, mask=is_row)
    tl.store(out_slot_mapping + row, place, mask=is_row)
    tl.store(out_row_valid + row, valid, mask=is_row)
    if tl.program_id(1) == 0:
        length = tl.load(seq_lens_ptr + request)
        tl.store(out_seq_lens + request, tl.maximum(length - DEPTH, 0))
