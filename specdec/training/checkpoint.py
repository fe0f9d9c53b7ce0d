"""What a run needs to go on as if it had never stopped."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from specdec.errors import ConfigError
from specdec.training.packing import Cursor

STATE = "state.pt"


class Progress(NamedTuple):
    """How far a run is."""

    step: int  # optimiser steps done
    cursor: Cursor  # the next window of data
    tokens: int  # token-passes done
    seconds: float  # spent training, over all sessions
    best_step: int | None = None  # of the checkpoint chosen so far
    best: float | None = None  # its acceptance length


def save_state(
    folder: Path,
    progress: Progress,
    params: Mapping[str, Tensor],
    average: Mapping[str, Tensor],
    optimizers: list[Optimizer],
) -> None:
    """Write the state whole or not at all."""
    state = {
        "progress": {**progress._asdict(), "cursor": tuple(progress.cursor)},
        "params": {name: p.detach() for name, p in params.items()},
        "average": dict(average),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    part = folder / f"{STATE}.part"
    torch.save(state, part)
    os.replace(part, folder / STATE)


@torch.no_grad()
def load_state_(
    folder: Path,
    params: Mapping[str, Tensor],
    average: Mapping[str, Tensor],
    optimizers: list[Optimizer],
) -> Progress:
    """Fill parameters, average and optimisers from a run folder; no code in the file is run.

    Raises:
        ConfigError: there is no state, or it belongs to another head or optimiser.
    """
    path = Path(folder) / STATE
    if not path.is_file():
        raise ConfigError(f"resume={folder} has no {STATE}; give the folder of an earlier run")
    device = next(iter(params.values())).device
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    shapes = {name: p.shape for name, p in params.items()}
    stored = {name: p.shape for name, p in state["params"].items()}
    if stored != shapes or len(state["optimizers"]) != len(optimizers):
        raise ConfigError(f"resume={folder} holds another head or optimiser than this run's")
    for name, param in params.items():
        param.copy_(state["params"][name])
        average[name].copy_(state["average"][name])
    for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    progress = Progress(**state["progress"])
    return progress._replace(cursor=Cursor(*progress.cursor))
