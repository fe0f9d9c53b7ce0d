"""Drafts from logits: one launch when greedy, two when sampled, three when sampled with filters.

The scan that sums the blocks also writes the copy of the logits that verification reads, so that a
draw reads one block again and no row twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specdec.kernels.categorical.reference import BLOCK
from specdec.kernels.chain import overlapped
from specdec.kernels.cutoff.kernel import select
from specdec.kernels.cutoff.scan import Scan, scan
from specdec.kernels.draft_sample import programs
from specdec.kernels.draft_sample.reference import KeptRows
from specdec.kernels.race.kernel import race
from specdec.kernels.row_stats.kernel import row_stats
from specdec.kernels.row_stats.reference import RowStats, block_size


def draft_sample_(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    vocab_size: int,
    epsilon: float,
    seeds: Tensor,
    round_start: Tensor,
    offset: int,
    purpose: int,
    mode: str,
    d2t: Tensor | None = None,
    filters: bool = True,
    all_greedy: bool = False,
    keep: KeptRows | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.draft_sample_`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows = logits.shape[0]
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    is_delta = logits.new_empty(num_rows, dtype=torch.bool)
    if num_rows == 0:
        return tokens, is_delta
    known: dict[str, Any] = {"vocab_size": vocab_size, "epsilon": epsilon}
    filtered = (temperature, top_k, top_p, min_p)
    if all_greedy or mode == "greedy":
        _greedy_(logits, vocab_size, d2t, tokens, is_delta)
        return tokens, is_delta
    if mode == "shared":
        if filters:
            scanned = scan(logits, temperature, chunks=True, **known)
            rows = select(logits, scanned, *filtered, invalid=-1, **known)
        else:
            rows = row_stats(logits, temperature, invalid=-1, **known)
        ids = race(
            logits,
            *rows[:3],
            rows.greedy,
            rows.argmax,
            vocab_size=vocab_size,
            seeds=seeds,
            round_start=round_start,
            purpose=purpose,
            offset=offset,
            lanes=d2t,
        ).clamp_(min=0)
        return ids if d2t is None else d2t[ids], is_delta.fill_(True)
    copied: dict[str, Any] = {} if keep is None else {"copy": keep.logits, "slots": keep.slots}
    scanned = scan(logits, temperature, chunks=filters, **known, **copied)
    noise = (seeds.contiguous(), round_start.contiguous())
    out = (tokens if d2t is None else d2t, tokens, is_delta, *_kept_arguments(keep, tokens))
    flags = {"PURPOSE": purpose, "MAPPED": d2t is not None, "KEEP": keep is not None}
    if filters:
        rows = select(logits, scanned, *filtered, invalid=-1, **known)
        _draw_kept_(logits, rows, noise, out, vocab_size, offset, flags)
    else:
        _draw_(logits, temperature, scanned, noise, out, vocab_size, offset, epsilon, flags)
    return tokens, is_delta


def _greedy_(
    logits: Tensor, vocab_size: int, d2t: Tensor | None, tokens: Tensor, is_delta: Tensor
) -> None:
    launch: Any = programs.greedy[(logits.shape[0],)]
    launch(
        logits,
        logits.stride(0),
        tokens if d2t is None else d2t,
        tokens,
        is_delta,
        vocab_size,
        TILE=min(16384, triton.next_power_of_2(vocab_size)),
        MAPPED=d2t is not None,
        num_warps=32 if vocab_size > 8192 else 4,
        **overlapped(),
    )


def _kept_arguments(keep: KeptRows | None, unused: Tensor) -> tuple[Tensor | int, ...]:
    """Pointers and strides of `_keep`, from its slots on."""
    if keep is None:
        return (unused,) + (unused, 0) * 4
    buffers = (keep.max, keep.inv_temperature, keep.cutoff, keep.lse)
    return (keep.slots, *(item for b in buffers for item in (b, b.stride(0))))


def _draw_(
    logits: Tensor,
    temperature: Tensor,
    scanned: Scan,
    noise: tuple[Tensor, Tensor],
    out: tuple[Tensor | int, ...],
    vocab_size: int,
    offset: int,
    epsilon: float,
    flags: dict[str, int],
) -> None:
    num_blocks = scanned.block_max.shape[1]
    launch: Any = programs.draw[(logits.shape[0],)]
    launch(
        logits,
        logits.stride(0),
        temperature,
        scanned.block_max,
        scanned.block_sum,
        *noise,
        *out,
        vocab_size,
        num_blocks,
        offset,
        epsilon,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=4,
        **overlapped(),
        **flags,
    )


def _draw_kept_(
    logits: Tensor,
    rows: RowStats,
    noise: tuple[Tensor, Tensor],
    out: tuple[Tensor | int, ...],
    vocab_size: int,
    offset: int,
    flags: dict[str, int],
) -> None:
    assert rows.block_mass is not None
    num_blocks, size = rows.block_mass.shape[1], block_size(vocab_size)
    launch: Any = programs.draw_kept[(logits.shape[0],)]
    launch(
        logits,
        logits.stride(0),
        *rows,
        *noise,
        *out,
        vocab_size,
        num_blocks,
        offset,
        BLOCK=size,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=size // 256,
        **overlapped(),
        **flags,
    )
