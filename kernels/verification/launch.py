"""Launches of the verification kernels.

They take the records of `specdec.state` and `specdec.keys` by their fields (`TargetDist`, `Drafts`,
`DraftDist`, `Keys`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdec.kernels.chain import overlapped
from specdec.kernels.row_stats.reference import block_size
from specdec.kernels.verification.kernel import _decide, _draw_residual, _residual_mass
from specdec.kernels.verification.record import _complete, _match
from specdec.kernels.verification.reference import Verification


class Purposes(NamedTuple):
    """Streams of uniforms, as `keys.Purpose` numbers them."""

    accept: int
    recover: int
    bonus: int


class _Record(NamedTuple):
    """Outputs of one step."""

    grids: Tensor  # [2, R, K + 1] token_ids and rows
    counts: Tensor  # [3, R] accepted, sampled, rejected
    columns: int  # lanes of a request, more than K

    def arguments(self) -> tuple[Any, ...]:
        return self.grids[0], self.grids[1], self.counts, self.counts.shape[1]

    def outputs(self) -> Verification:
        return Verification(*self.grids.unbind(0), *self.counts.unbind(0))


def _record(drafts: Any) -> _Record:
    ids = drafts.token_ids
    num_requests, num_drafts = ids.shape
    return _Record(
        ids.new_empty(2, num_requests, num_drafts + 1),
        ids.new_empty(3, num_requests),
        triton.next_power_of_2(num_drafts + 1),
    )


def _drafts(dist: Any, drafts: Any) -> tuple[Any, ...]:
    ids = drafts.token_ids
    ids = ids if ids.shape[1] < 2 or ids.stride(1) == 1 else ids.contiguous()
    return (
        dist.cu_num_logits,
        dist.batch_rows,
        dist.argmax.shape[0],
        ids,
        ids.stride(0),
        drafts.num_drafts,
        ids.shape[1],
    )


def match(dist: Any, drafts: Any, token_ids: Tensor) -> Verification:
    """Accepts drafts while they equal the target's tokens [N]; N > 0."""
    record = _record(drafts)
    launch: Any = _match[(drafts.token_ids.shape[0],)]
    launch(
        token_ids.contiguous(),
        *_drafts(dist, drafts),
        *record.arguments(),
        COLUMNS=record.columns,
        num_warps=1,
        **overlapped(),
    )
    return record.outputs()


def complete(dist: Any, drafts: Any, num_accepted: Tensor, stop_token: Tensor) -> Verification:
    """The record of a decision [R] that was made elsewhere; N > 0."""
    record = _record(drafts)
    launch: Any = _complete[(drafts.token_ids.shape[0],)]
    launch(
        num_accepted.contiguous(),
        stop_token.contiguous(),
        *_drafts(dist, drafts),
        *record.arguments(),
        COLUMNS=record.columns,
        num_warps=1,
        **overlapped(),
    )
    return record.outputs()


def rejection(dist: Any, drafts: Any, keys: Any, purposes: Purposes) -> Verification:
    """Rejection sampling in one launch, or in three where drafts have a q; N > 0.

    `dist.block_mass` is set, and rows of its logits are contiguous.
    """
    record, (num_requests, num_drafts) = _record(drafts), drafts.token_ids.shape
    has_q = drafts.q is not None and num_drafts > 0
    mapped = has_q and drafts.q.vocab_map is not None
    size, num_blocks = block_size(dist.vocab_size), dist.block_mass.shape[1]
    logits = dist.logits if dist.logits.stride(1) == 1 else dist.logits.contiguous()
    target = (
        logits,
        logits.stride(0),
        dist.max,
        dist.inv_temperature,
        dist.cutoff,
        dist.lse,
    )
    q = _draft_dist(drafts.q) if has_q else _no_draft_dist(dist.max, drafts.num_drafts)
    is_delta = drafts.is_delta.contiguous()
    pending = torch.empty(num_requests, dtype=torch.int32, device=dist.max.device)
    seeds, starts = keys.seeds.contiguous(), keys.round_start.contiguous()
    common = {
        "BLOCK": size,
        "BLOCKS": triton.next_power_of_2(num_blocks),
        "MAPPED": mapped,
        "num_warps": size // 512,
        **overlapped(),
    }
    decide: Any = _decide[(num_requests,)]
    decide(
        *target,
        dist.greedy,
        dist.argmax,
        dist.block_mass,
        num_blocks,
        dist.vocab_size,
        *_drafts(dist, drafts),
        is_delta,
        is_delta.stride(0),
        *q,
        seeds,
        starts,
        *record.arguments(),
        pending,
        ACCEPT=purposes.accept,
        RECOVER=purposes.recover,
        BONUS=purposes.bonus,
        COLUMNS=record.columns,
        HAS_Q=has_q,
        **common,
    )
    if not has_q:
        return record.outputs()
    mass = dist.max.new_empty(num_requests, num_blocks)
    add: Any = _residual_mass[(num_requests * num_blocks,)]
    add(
        *target,
        dist.vocab_size,
        dist.cu_num_logits,
        *q,
        record.counts,
        pending,
        mass,
        num_blocks,
        BLOCK=size,
        MAPPED=mapped,
        num_warps=size // 512,
        **overlapped(),
    )
    draw: Any = _draw_residual[(num_requests,)]
    draw(
        *target,
        dist.vocab_size,
        dist.block_mass,
        dist.cu_num_logits,
        *q,
        seeds,
        starts,
        record.counts,
        pending,
        mass,
        num_blocks,
        record.grids,
        num_drafts,
        RECOVER=purposes.recover,
        **common,
    )
    return record.outputs()


def _draft_dist(q: Any) -> tuple[Any, ...]:
    t2d = q.slots if q.vocab_map is None else q.vocab_map.t2d
    return (
        q.logits,
        q.logits.stride(0),
        q.logits.stride(1),
        q.logits.shape[2],
        q.max,
        q.cutoff,
        q.lse,
        q.max.stride(0),
        q.inv_temperature,
        q.slots,
        t2d,
        t2d.shape[0],
    )


def _no_draft_dist(floats: Tensor, ints: Tensor) -> tuple[Any, ...]:
    """Arguments in the places of `_draft_dist` that go unread."""
    return floats, 0, 0, 0, floats, floats, floats, 0, floats, ints, ints, 0
