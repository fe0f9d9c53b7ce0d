"""The rules on Triton kernels: same records in and out, decisions equal to the torch rules'."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specdec.kernels.row_stats.reference import block_size
from specdec.kernels.verification.kernel import _decide, _draw_residual, _residual_mass
from specdec.kernels.verification.record import _complete, _match
from specdec.keys import Keys, Purpose
from specdec.state import DraftDist, Drafts, TargetDist, Verification


class _Record(NamedTuple):
    """Outputs of one step."""

    grids: Tensor  # [2, R, K + 1] token_ids and rows
    counts: Tensor  # [3, R] accepted, sampled, rejected
    columns: int  # lanes of a request, more than K

    def arguments(self) -> tuple[Any, ...]:
        return self.grids[0], self.grids[1], self.counts, self.counts.shape[1]

    def verification(self) -> Verification:
        return Verification(*self.grids.unbind(0), *self.counts.unbind(0))


def _record(drafts: Drafts) -> _Record:
    ids = drafts.token_ids
    num_requests, num_drafts = ids.shape
    return _Record(
        ids.new_empty(2, num_requests, num_drafts + 1),
        ids.new_empty(3, num_requests),
        triton.next_power_of_2(num_drafts + 1),
    )


def _drafts(dist: TargetDist, drafts: Drafts) -> tuple[Any, ...]:
    ids = drafts.token_ids
    assert ids.stride(1) == 1 or ids.shape[1] <= 1, "draft ids are contiguous in a row"
    return (
        dist.cu_num_logits,
        dist.batch_rows,
        dist.argmax.shape[0],
        ids,
        ids.stride(0),
        drafts.num_drafts,
        ids.shape[1],
    )


def match(dist: TargetDist, drafts: Drafts, token_ids: Tensor) -> Verification:
    """`verify.match` in one launch."""
    record = _record(drafts)
    launch: Any = _match[(drafts.token_ids.shape[0],)]
    launch(
        token_ids.contiguous(),
        *_drafts(dist, drafts),
        *record.arguments(),
        COLUMNS=record.columns,
        num_warps=1,
    )
    return record.verification()


def complete(
    dist: TargetDist, drafts: Drafts, num_accepted: Tensor, stop_token: Tensor
) -> Verification:
    """`verify.complete` in one launch."""
    record = _record(drafts)
    launch: Any = _complete[(drafts.token_ids.shape[0],)]
    launch(
        num_accepted.contiguous(),
        stop_token.contiguous(),
        *_drafts(dist, drafts),
        *record.arguments(),
        COLUMNS=record.columns,
        num_warps=1,
    )
    return record.verification()


def rejection(dist: TargetDist, drafts: Drafts, keys: Keys) -> Verification:
    """`verify.rejection` in one launch, or in three where drafts have a q."""
    assert dist.block_mass is not None
    record, (num_requests, num_drafts) = _record(drafts), drafts.token_ids.shape
    has_q = drafts.q is not None and num_drafts > 0
    size, num_blocks = block_size(dist.vocab_size), dist.block_mass.shape[1]
    target = (
        dist.logits,
        dist.logits.stride(0),
        dist.max,
        dist.inv_temperature,
        dist.cutoff,
        dist.lse,
    )
    q = (
        _draft_arguments(drafts.q)
        if has_q and drafts.q is not None
        else (dist.max, 0, 0, 0)
        + ((dist.max,) * 3 + (0,) + (dist.max,) + (drafts.num_drafts,) * 2 + (0,))
    )
    mapped = has_q and drafts.q is not None and drafts.q.vocab_map is not None
    pending = torch.empty(num_requests, dtype=torch.int32, device=dist.max.device)
    seeds, starts = keys.seeds.contiguous(), keys.round_start.contiguous()
    common = {
        "BLOCK": size,
        "BLOCKS": triton.next_power_of_2(num_blocks),
        "MAPPED": mapped,
        "num_warps": size // 512,
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
        drafts.is_delta,
        drafts.is_delta.stride(0),
        *q,
        seeds,
        starts,
        *record.arguments(),
        pending,
        ACCEPT=int(Purpose.ACCEPT),
        RECOVER=int(Purpose.RECOVER),
        BONUS=int(Purpose.BONUS),
        COLUMNS=record.columns,
        HAS_Q=has_q,
        **common,
    )
    if not has_q:
        return record.verification()
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
        RECOVER=int(Purpose.RECOVER),
        **common,
    )
    return record.verification()


def _draft_arguments(q: DraftDist) -> tuple[Any, ...]:
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
