"""Verification from bf16 logits: row statistics, then a rule. Nearly all drafts are refused.

`num_bytes` counts one read of the logits and, where drafts have a q, one more of a row of p and of
q for each request.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.bench import Case
from specdec.kernels.race.kernel import race
from specdec.kernels.row_stats.kernel import row_stats
from specdec.kernels.verification import launch

VOCAB_SIZE = 128256
REDUCED = 32000
SHAPES = ((1, 3), (8, 3), (64, 3), (256, 7))  # requests, drafts
PURPOSES = launch.Purposes(1, 2, 3)
KNOWN: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "epsilon": 1e-5, "invalid": -2}


def cases(device: torch.device) -> list[Case]:
    """Greedy, without q, with q over 32000 ids and over all, and Gumbel match."""
    made = []
    for num_requests, num_drafts in SHAPES:
        step = _step(num_requests, num_drafts, device)
        shape = f"{num_requests} x K={num_drafts}"
        read = step.logits.nbytes
        made.append(Case(f"greedy, {shape}", partial(_greedy, step), read))
        made.append(Case(f"no q, {shape}", partial(_rejection, step, None), read))
        for width in (REDUCED, VOCAB_SIZE):
            if num_requests * num_drafts * width > 2**28:
                continue
            q = _draft_dist(step, width, device)
            row = (VOCAB_SIZE + width) * step.logits.element_size()
            made.append(
                Case(
                    f"q of {width}, {shape}",
                    partial(_rejection, step, q),
                    read + num_requests * row,
                )
            )
        made.append(Case(f"gumbel, {shape}", partial(_gumbel, step), read))
    return made


def _step(num_requests: int, num_drafts: int, device: torch.device) -> SimpleNamespace:
    num_rows = num_requests * (num_drafts + 1)
    logits = torch.empty(num_rows, VOCAB_SIZE, dtype=torch.bfloat16, device=device).normal_()
    requests = torch.arange(num_requests, device=device)
    ids = torch.randint(0, VOCAB_SIZE, (num_requests, num_drafts), device=device)
    return SimpleNamespace(
        logits=logits,
        temperature=torch.full((num_requests,), 0.8, device=device),
        slots=requests,
        cu_num_logits=torch.arange(num_requests + 1, device=device) * (num_drafts + 1),
        batch_rows=torch.arange(num_rows, device=device),
        token_ids=ids,
        is_delta=torch.zeros_like(ids, dtype=torch.bool),
        num_drafts=torch.full_like(requests, num_drafts),
        keys=SimpleNamespace(seeds=requests * 7919, round_start=requests + 100),
    )


def _draft_dist(step: SimpleNamespace, width: int, device: torch.device) -> SimpleNamespace:
    num_requests, num_drafts = step.token_ids.shape
    logits = torch.empty(num_requests, num_drafts, width, dtype=torch.bfloat16, device=device)
    logits.normal_()
    vocab_map = None
    if width < VOCAB_SIZE:
        d2t = torch.randperm(VOCAB_SIZE, device=device)[:width].sort().values
        t2d = torch.full((VOCAB_SIZE,), -1, device=device)
        t2d[d2t] = torch.arange(width, device=device)
        vocab_map = SimpleNamespace(d2t=d2t, t2d=t2d)
        step.token_ids = d2t[step.token_ids % width]
    top = logits.amax(-1).float()
    scaled = (logits.float() - top[..., None]) / 0.8
    return SimpleNamespace(
        logits=logits,
        max=top,
        cutoff=torch.full_like(top, -torch.inf),
        lse=scaled.logsumexp(-1),
        inv_temperature=torch.full((num_requests,), 1.25, device=device),
        slots=step.slots,
        vocab_map=vocab_map,
    )


def _dist(step: SimpleNamespace, all_greedy: bool) -> SimpleNamespace:
    stats = row_stats(
        step.logits,
        step.temperature,
        all_greedy=all_greedy,
        slots=step.slots,
        cu_num_logits=step.cu_num_logits,
        **KNOWN,
    )
    return SimpleNamespace(
        logits=step.logits,
        cu_num_logits=step.cu_num_logits,
        batch_rows=step.batch_rows,
        vocab_size=VOCAB_SIZE,
        **stats._asdict(),
    )


def _drafts(step: SimpleNamespace, q: Any) -> SimpleNamespace:
    return SimpleNamespace(
        token_ids=step.token_ids, is_delta=step.is_delta, num_drafts=step.num_drafts, q=q
    )


def _greedy(step: SimpleNamespace) -> tuple[Tensor, ...]:
    dist = _dist(step, all_greedy=True)
    return launch.match(dist, _drafts(step, None), dist.argmax)


def _rejection(step: SimpleNamespace, q: Any) -> tuple[Tensor, ...]:
    return launch.rejection(_dist(step, all_greedy=False), _drafts(step, q), step.keys, PURPOSES)


def _gumbel(step: SimpleNamespace) -> tuple[Tensor, ...]:
    dist = _dist(step, all_greedy=False)
    tokens = race(
        dist.logits,
        dist.max,
        dist.inv_temperature,
        dist.cutoff,
        dist.greedy,
        dist.argmax,
        vocab_size=VOCAB_SIZE,
        seeds=step.keys.seeds,
        round_start=step.keys.round_start,
        purpose=4,
        cu_num_logits=dist.cu_num_logits,
    )
    return launch.match(dist, _drafts(step, None), tokens)
