"""A draft head's rows in Triton, one launch a function: see `reference`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.draft_rows import programs
from specdec.kernels.draft_rows.reference import DraftRows
from specdec.kernels.step.kernel import TILE, dense, row_tile
from specdec.kernels.step.reference import Committed


def prepare_eagle_inputs(
    committed: Committed,
    *,
    positions: Tensor,
    query_start: Tensor,
    request_slots: Tensor,
    max_query_len: int,
    token_ids: Tensor,
    num_tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `reference.prepare_eagle_inputs`; the record's tensors may lie at any strides."""
    committed = dense(committed)
    ids, last = torch.empty_like(positions), torch.empty_like(request_slots)
    tile = row_tile(max_query_len)
    launch: Any = programs.eagle_inputs[(len(request_slots), triton.cdiv(max_query_len, tile))]
    launch(
        committed.token_ids,
        committed.last_rows,
        positions,
        query_start,
        request_slots,
        token_ids,
        token_ids.stride(0),
        num_tokens,
        ids,
        last,
        W=committed.token_ids.shape[1],
        TILE=tile,
        num_warps=1 if tile <= 32 else 4,
    )
    return ids, last


def prepare_eagle_decode(
    last: Tensor,
    block_tables: Tensor,
    *,
    num_draft_tokens: int,
    num_depths: int,
    block_size: int,
) -> tuple[DraftRows, ...]:
    """See `reference.prepare_eagle_decode`; one launch for all steps."""
    num_requests, num_steps = len(last), num_draft_tokens - 1
    if num_steps < 1:
        return ()
    most = num_requests * min(num_steps, num_depths)
    aligned = [-(-size // 16) * 16 for size in (most, num_requests + 1)]
    rows = last.new_empty(2, num_steps, aligned[0])
    valid = torch.empty((num_steps, aligned[0]), dtype=torch.bool, device=last.device)
    requests = last.new_empty(4, num_steps, aligned[1])
    launch: Any = programs.eagle_decode[(triton.cdiv(num_requests + 1, TILE), num_steps)]
    launch(
        last,
        block_tables,
        block_tables.stride(0),
        *rows,
        valid,
        *requests,
        aligned[0],
        aligned[1],
        num_requests,
        DEPTHS=num_depths,
        BLOCK_SIZE=block_size,
        TILE=TILE,
    )
    steps = []
    for index in range(num_steps):
        num_rows = num_requests * min(index + 1, num_depths)
        starts, lens, ends, cu_num_logits = requests[:, index]
        steps.append(
            DraftRows(
                positions=rows[0, index, :num_rows],
                slot_mapping=rows[1, index, :num_rows],
                row_valid=valid[index, :num_rows],
                query_start=starts[: num_requests + 1],
                seq_lens=lens[:num_requests],
                logits_indices=ends[:num_requests],
                cu_num_logits=cu_num_logits[: num_requests + 1],
            )
        )
    return tuple(steps)


def moved_back(
    positions: Tensor,
    row_valid: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    *,
    query_start: Tensor,
    max_query_len: int,
    depth: int,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `reference.moved_back`."""
    moved, slots, lens = (torch.empty_like(t) for t in (positions, positions, seq_lens))
    valid = torch.empty_like(row_valid)
    tile = row_tile(max_query_len)
    launch: Any = programs.move_back[(len(seq_lens), triton.cdiv(max_query_len, tile))]
    launch(
        positions,
        row_valid,
        seq_lens,
        block_tables,
        block_tables.stride(0),
        query_start,
        moved,
        slots,
        valid,
        lens,
        DEPTH=depth,
        BLOCK_SIZE=block_size,
        TILE=tile,
        num_warps=1 if tile <= 32 else 4,
    )
    return moved, slots, valid, lens
