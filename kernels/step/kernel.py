"""The step's bookkeeping in Triton, one launch a function: see `reference`."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.step import programs
from specdec.kernels.step.reference import Committed, StepRows

TILE = 128  # rows of a program


def prepare_step(
    rows: Tensor,
    *,
    num_rows: int,
    num_logits: int,
    max_query_len: int,
    block_size: int,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    finish_reason: Tensor,
    draft_token_ids: Tensor,
    draft_is_delta: Tensor,
    num_drafts: Tensor,
    seeds: Tensor,
    block_tables: Tensor,
) -> StepRows:
    """See `reference.prepare_step`."""
    num_requests, k, columns = rows.shape[1], draft_token_ids.shape[1], block_tables.shape[1]

    def ints(*shape: int) -> Tensor:
        return rows.new_empty(shape)

    out = StepRows(
        input_ids=ints(num_rows),
        positions=ints(num_rows),
        slot_mapping=ints(num_rows),
        row_valid=torch.empty(num_rows, dtype=torch.bool, device=rows.device),
        query_start=ints(num_requests + 1),
        cu_num_logits=ints(num_requests + 1),
        seq_lens=ints(num_requests),
        logits_indices=ints(num_logits),
        block_tables=ints(num_requests, columns),
        draft_token_ids=ints(num_requests, k),
        draft_is_delta=torch.empty((num_requests, k), dtype=torch.bool, device=rows.device),
        num_drafts=ints(num_requests),
        num_tokens=ints(num_requests),
        seeds=ints(num_requests),
    )
    tile = row_tile(max_query_len)
    launch: Any = programs.prepare_step[(num_requests, triton.cdiv(max_query_len, tile))]
    launch(
        rows,
        token_ids,
        token_ids.stride(0),
        num_tokens,
        num_computed_tokens,
        finish_reason,
        draft_token_ids,
        draft_is_delta,
        num_drafts,
        seeds,
        block_tables,
        *out,
        num_requests,
        columns,
        K=k,
        BLOCK_SIZE=block_size,
        TILE=tile,
        REQUESTS=triton.next_power_of_2(num_requests),
        K_PAD=triton.next_power_of_2(max(1, k)),
        num_warps=1 if tile <= 32 else 4,
    )
    return out


def get_num_sampled_and_rejected(
    num_accepted: Tensor, num_drafts: Tensor, cu_num_logits: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.get_num_sampled_and_rejected`."""
    num_requests = len(num_accepted)
    num_sampled, num_rejected = torch.empty_like(num_accepted), torch.empty_like(num_accepted)
    launch: Any = programs.num_sampled_and_rejected[(triton.cdiv(num_requests, TILE),)]
    launch(
        num_accepted, num_drafts, cu_num_logits, num_sampled, num_rejected, num_requests, TILE=TILE
    )
    return num_sampled, num_rejected


def trim(
    token_ids: Tensor,
    rows: Tensor,
    num_accepted: Tensor,
    num_sampled: Tensor,
    *,
    request_slots: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    eos_token_ids: Tensor,
    ignore_eos: Tensor,
    max_len: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_drafts: Tensor,
    finish_reason: Tensor,
) -> Committed:
    """See `reference.trim`; the verification's tensors may lie at any strides."""
    num_requests, width = token_ids.shape
    counts = token_ids.new_empty(len(Committed._fields) - 1, num_requests)
    out = Committed(token_ids.new_empty(num_requests, width), *counts)
    launch: Any = programs.trim[(num_requests,)]
    launch(
        token_ids.contiguous(),
        rows.contiguous(),
        num_accepted.contiguous(),
        num_sampled.contiguous(),
        request_slots,
        query_start,
        seq_lens,
        eos_token_ids,
        ignore_eos,
        max_len,
        num_tokens,
        num_computed_tokens,
        num_drafts,
        finish_reason,
        *out,
        NUM_EOS=len(eos_token_ids),
        W=width,
        W_PAD=triton.next_power_of_2(width),
        num_warps=1,
    )
    return out


def post_update_(
    committed: Committed,
    drafts: Tensor,
    is_delta: Tensor,
    num_proposed: Tensor,
    *,
    request_slots: Tensor,
    token_ids: Tensor,
    max_len: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    finish_reason: Tensor,
    draft_token_ids: Tensor,
    draft_is_delta: Tensor,
    num_drafts: Tensor,
    output_bin_counts: Tensor | None = None,
) -> Tensor:
    """See `reference.post_update_`; the stages' tensors may lie at any strides."""
    committed = dense(committed)
    (num_requests, width), proposed = committed.token_ids.shape, drafts.shape[1]
    k = draft_token_ids.shape[1]
    report = committed.token_ids.new_empty(num_requests, width + 6)
    launch: Any = programs.post_update[(num_requests,)]
    launch(
        committed.token_ids,
        committed.num_committed,
        committed.num_accepted,
        committed.num_drafted,
        committed.num_tokens,
        committed.num_computed_tokens,
        committed.finish_reason,
        drafts.contiguous(),
        is_delta.contiguous(),
        num_proposed.contiguous(),
        request_slots,
        token_ids,
        token_ids.stride(0),
        max_len,
        num_tokens,
        num_computed_tokens,
        finish_reason,
        draft_token_ids,
        draft_is_delta,
        num_drafts,
        output_bin_counts,
        0 if output_bin_counts is None else output_bin_counts.stride(0),
        report,
        COUNTS=output_bin_counts is not None,
        W=width,
        P=proposed,
        K=k,
        W_PAD=triton.next_power_of_2(width),
        K_PAD=triton.next_power_of_2(max(1, k)),
        num_warps=1,
    )
    return report


def dense(committed: Committed) -> Committed:
    """The record as kernels read it, whatever postprocess stage it comes from."""
    return Committed(**{name: tensor.contiguous() for name, tensor in committed._asdict().items()})


def row_tile(max_query_len: int) -> int:
    """Rows of a program where the longest query is known."""
    return min(TILE, max(16, triton.next_power_of_2(max_query_len)))
