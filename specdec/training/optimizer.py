"""Optimisers over a named set of parameters, learning-rate schedules, and the weights' average."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer


def adamw(
    params: Mapping[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> list[Optimizer]:
    """AdamW over every parameter; one fused kernel on a GPU."""
    tensors = list(params.values())
    return [
        torch.optim.AdamW(
            tensors,
            lr=lr,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            fused=tensors[0].is_cuda or None,
        )
    ]


def muon(
    params: Mapping[str, Tensor],
    *,
    lr: float,
    matrix_lr: float = 0.02,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> list[Optimizer]:
    """Muon (torch.optim.Muon) for matrices at `matrix_lr`, AdamW at `lr` for what is left."""
    matrices = {name: p for name, p in params.items() if p.dim() == 2}
    others = {name: p for name, p in params.items() if name not in matrices}
    optimizers: list[Optimizer] = [
        torch.optim.Muon(
            list(matrices.values()), lr=matrix_lr, momentum=momentum, weight_decay=weight_decay
        )
    ]
    if others:
        optimizers += adamw(others, lr=lr, betas=betas, weight_decay=weight_decay)
    return optimizers


def set_lr_(optimizers: list[Optimizer], factor: float) -> None:
    """Set every group's rate to its configured one times `factor`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("configured_lr", group["lr"])
            group["lr"] = group["configured_lr"] * factor


def cosine(progress: float, *, warmup: float = 0.02, final: float = 0.0) -> float:
    """Linear warm-up over the share `warmup` of the run, then half a cosine down to `final`.

    Args:
        progress: share of the run that is done, in [0, 1].
    """
    if progress < warmup:
        return max(progress / warmup, 0.01)
    turn = min((progress - warmup) / (1 - warmup), 1.0)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * turn))


def linear(progress: float, *, warmup: float = 0.02, final: float = 0.0) -> float:
    """Linear warm-up, then a line down to `final`; arguments as in `cosine`."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return final + (1 - final) * (1 - min((progress - warmup) / (1 - warmup), 1.0))


def constant(progress: float, *, warmup: float = 0.02) -> float:
    """Linear warm-up, then 1."""
    return max(min(progress / warmup, 1.0), 0.01) if warmup else 1.0


def clip_(params: Mapping[str, Tensor], max_norm: float) -> Tensor:
    """Scale gradients down to a global norm of `max_norm`; returns the norm before it."""
    return torch.nn.utils.clip_grad_norm_(list(params.values()), max_norm)


@torch.no_grad()
def update_average_(
    average: Mapping[str, Tensor], params: Mapping[str, Tensor], step: int, decay: float
) -> None:
    """Exponential average of the weights; early steps weigh more, so that the start is forgotten.

    Args:
        step: optimiser steps done, from 1.
        decay: of a long run; the n-th step uses min(decay, n / (n + 10)).
    """
    weight = 1 - min(decay, step / (step + 10))
    torch._foreach_lerp_([average[name] for name in params], list(params.values()), weight)
