"""Experts of Qwen3-30B-A3B for few rows, against torch's grouped product."""

from __future__ import annotations

from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.bench import Case
from specdec.kernels.gated_act.kernel import gated_act
from specdec.kernels.moe import kernel, reference

ROWS = (1, 4, 8, 16, 64)
EXPERTS, TOP_K, SIZE, INNER = 128, 8, 2048, 768
TURNS = 8  # choices in turn, so that few weights are found in the cache


def cases(device: torch.device) -> list[Case]:
    """`moe` and `softmax_topk` in bf16; bytes count each chosen expert once."""
    gate_up = torch.randn(EXPERTS, 2 * INNER, SIZE, device=device, dtype=torch.bfloat16) / 45
    down = torch.randn(EXPERTS, SIZE, INNER, device=device, dtype=torch.bfloat16) / 28
    made = []
    for rows in ROWS:
        hidden = torch.randn(rows, SIZE, device=device).bfloat16()
        weights = torch.rand(rows, TOP_K, device=device)
        scores = torch.rand(TURNS, rows, EXPERTS, device=device)
        choices = list(scores.topk(TOP_K).indices)
        chosen = sum(choice.unique().numel() for choice in choices) / TURNS
        size = int(chosen * 3 * SIZE * INNER * 2) + 2 * hidden.nbytes
        run, baseline = (
            _in_turn(partial(fn, hidden, gate_up, down), choices, weights)
            for fn in (kernel.moe, _grouped)
        )
        made.append(Case(f"experts, {rows} rows", run, size, baseline))
        logits = torch.randn(rows, EXPERTS, device=device).bfloat16()
        made.append(
            Case(
                f"softmax_topk, {rows} rows",
                partial(kernel.softmax_topk, logits, TOP_K, True),
                logits.nbytes * 3 + rows * TOP_K * 12,
                partial(reference.softmax_topk, logits, TOP_K, True),
            )
        )
    return made


def _in_turn(fn, choices: list[Tensor], weights: Tensor):
    turns = cycle(choices)
    return lambda: fn(next(turns), weights)


def _grouped(hidden: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor):
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(down), dtype=torch.int64, device=flat.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0, dtype=torch.int32)
    rows = hidden.index_select(0, order // experts.shape[1])
    inner = gated_act(F.grouped_mm(rows, gate_up.transpose(-1, -2), offs=ends))
    out = F.grouped_mm(inner, down.transpose(-1, -2), offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=flat.device))
    out = out.index_select(0, back).view(*experts.shape, -1)
    return (out * weights.unsqueeze(-1)).sum(dim=-2).to(hidden.dtype)
