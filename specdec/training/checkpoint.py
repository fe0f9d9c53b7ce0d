"""What a run needs to go on as if it had never stopped."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from specdec.errors import ConfigError
from specdec.training.packing import Cursor
from specdec.training.settings import Settings, check_same, settings_of

STATE = "state.pt"


class Progress(NamedTuple):
    """How far a run is."""

    step: int = 0  # optimiser steps done
    cursor: Cursor = Cursor(0, 0)  # the next window of data
    tokens: int = 0  # token-passes done
    seconds: float = 0.0  # spent training, over all sessions
    evaluated_step: int | None = None  # of the last evaluation
    best_step: int | None = None  # of the checkpoint chosen so far
    best: float | None = None  # its acceptance length
    dev: Mapping[str, Any] = {}  # all that was measured of it


class Weights(NamedTuple):
    """What training changes."""

    params: Mapping[str, Tensor]  # also those that no optimiser knows: they need no gradient
    average: Mapping[str, Tensor]  # of each of them
    optimizers: list[Optimizer]


def state_file(folder: str | Path) -> Path:
    """Where a run folder keeps its state; raises ConfigError when there is none."""
    path = Path(folder) / STATE
    if not path.is_file():
        raise ConfigError(
            f"resume={folder} has no {STATE}; give the folder of a run that ended or that saved "
            f"its state on the way (save_every=STEPS)"
        )
    return path


def save_state(folder: Path, progress: Progress, weights: Weights, settings: Settings) -> None:
    """Write the state whole or not at all."""
    state = {
        "settings": settings._asdict(),
        "progress": {
            **progress._asdict(),
            "cursor": tuple(progress.cursor),
            "dev": dict(progress.dev),
        },
        "params": {name: p.detach() for name, p in weights.params.items()},
        "average": dict(weights.average),
        "optimizers": [optimizer.state_dict() for optimizer in weights.optimizers],
    }
    part = folder / f"{STATE}.part"
    torch.save(state, part)
    os.replace(part, folder / STATE)


def check_state(folder: str | Path, config: Mapping[str, Any], *, free: Sequence[str]) -> None:
    """Before anything is loaded: raises ConfigError where a plain configuration differs from the
    state's outside of `free`. What only files can tell is left to `load_state_`."""
    saved = _settings(_read(folder, map_location="cpu", mmap=True), folder)
    later = ("dtype", *saved.contents)
    check_same(saved, settings_of(config, {}), free=(*free, *later), run=folder)


def _read(folder: str | Path, **keywords: Any) -> dict[str, Any]:
    """The file's contents; no code in it is run."""
    path = state_file(folder)
    try:
        return torch.load(path, weights_only=True, **keywords)
    except (RuntimeError, EOFError, OSError, UnpicklingError) as error:
        if getattr(error, "filename", None):
            raise  # one that cannot be opened
        raise ConfigError(f"resume={folder}: its {STATE} is damaged; start a new run") from error


def _settings(state: Mapping[str, Any], folder: str | Path) -> Settings:
    if not isinstance(state, Mapping) or "settings" not in state:
        raise ConfigError(
            f"resume={folder}: its {STATE} is of an earlier version, which did not keep the run's "
            "settings; start a new run"
        )
    return Settings(**state["settings"])


@torch.no_grad()
def load_state_(
    folder: str | Path, weights: Weights, settings: Settings, *, free: Sequence[str]
) -> tuple[Progress, Settings]:
    """Fill the weights from a run folder.

    Args:
        settings: of the run that is to go on.
        free: keys, or parents of keys, that may differ from the saved ones.

    Returns:
        How far that run was, and its settings.

    Raises:
        ConfigError: there is no state, or it belongs to another head or optimiser, or to settings
            that differ where they must not.
    """
    device = next(iter(weights.params.values())).device
    state = _read(folder, map_location=device)
    saved = _settings(state, folder)
    check_same(saved, settings, free=free, run=folder)
    shapes = {name: p.shape for name, p in weights.params.items()}
    stored = {name: p.shape for name, p in state["params"].items()}
    if stored != shapes or len(state["optimizers"]) != len(weights.optimizers):
        raise ConfigError(f"resume={folder} holds another head or optimiser than this run's")
    for name, param in weights.params.items():
        param.copy_(state["params"][name])
        weights.average[name].copy_(state["average"][name])
    for optimizer, values in zip(weights.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    progress = Progress(**state["progress"])
    return progress._replace(cursor=Cursor(*progress.cursor)), saved
