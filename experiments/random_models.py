"""Models of a named shape with random weights made on the device: a checkpoint without a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError, ConfigError
from specdec.experiments.targets import initialiser, target_layout
from specdec.models.axes import FAMILIES as HEAD_FAMILIES
from specdec.models.axes import HeadAxes
from specdec.models.batch import Draft, Target
from specdec.models.checkpoint import Checkpoint
from specdec.models.draft_vocab import OWN_HEAD
from specdec.models.eagle3 import eagle3_axes, flat_settings
from specdec.models.head import head_layout
from specdec.models.heads import detect_head, head_config, read_draft
from specdec.models.load import FAMILIES, build_target
from specdec.models.parts import shapes_of
from specdec.models.settings import check_settings

Shapes = Mapping[str, tuple[int, ...]]


def random_target(
    settings: Mapping[str, Any],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    **options: Any,
) -> Target:
    """A target of the shape that a config.json describes.

    Args:
        options: further keywords of `build_target`.

    Raises:
        ConfigError: the family is not known, or the shape says no vocabulary.
    """
    config = _target_config(settings)
    checkpoint = _random_checkpoint(config, shapes_of(target_layout(config)), device, seed)
    return build_target(checkpoint, settings, device=device, dtype=dtype, **options)


def num_parameters(settings: Mapping[str, Any]) -> int:
    """Of the target of that shape, without making it. Raises what `random_target` raises."""
    shapes = shapes_of(target_layout(_target_config(settings)))
    return sum(math.prod(shape) for shape in shapes.values())


def _target_config(settings: Mapping[str, Any]) -> Any:
    family = FAMILIES.get(settings.get("model_type", ""))
    if family is None:
        raise ConfigError(
            f"shape.model_type={settings.get('model_type')!r} is not one of {', '.join(FAMILIES)}"
        )
    if settings.get("vocab_size") is None:
        raise ConfigError("the shape has no vocabulary of its own; set vocab_size")
    check_settings(settings)
    return family.config(settings)


def random_draft(settings: Mapping[str, Any], target: Target, *, seed: int = 1) -> Draft:
    """A head of the shape that a config.json describes, in the target's dtype, on its device.

    With `draft_vocab_size` it has an lm_head of its own over that many ids, else the target's.
    """
    settings = flat_settings(settings)
    nothing = Checkpoint(Path("random/head"), {})
    name = settings.get("head_family") or detect_head(settings, nothing)
    if name not in HEAD_FAMILIES:
        known = ", ".join(HEAD_FAMILIES)
        raise ConfigError(f"draft_shape.head_family={name!r} is not one of {known}")
    axes: HeadAxes = HEAD_FAMILIES[name].axes
    if HEAD_FAMILIES[name].method == "eagle3":
        axes = eagle3_axes(settings, axes)
    try:
        config = head_config(settings, name, axes, target)
    except CheckpointError as error:
        raise ConfigError(
            f"draft_shape does not fit this shape: {error}, or name another "
            "(draft_shape=eagle3_tiny)"
        ) from error
    shapes, given = dict(shapes_of(head_layout(config))), {}
    rows = settings.get("draft_vocab_size")
    if rows:
        if rows > target.vocab_size:
            raise ConfigError(
                f"draft_shape.draft_vocab_size={rows} exceeds the target's vocabulary of "
                f"{target.vocab_size}; lower it, or null for all of it"
            )
        shapes[OWN_HEAD] = (rows, config.block.hidden_size)
        order = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(seed))
        given["d2t"] = order[:rows].sort().values - torch.arange(rows)
    checkpoint = _random_checkpoint(config.block, shapes, target.embed.device, seed, given)
    return read_draft(checkpoint, settings, target, family=name)


def _random_checkpoint(
    config: Any,
    shapes: Shapes,
    device: torch.device | str,
    seed: int,
    given: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Tensors that are drawn as they are read, in whatever order: names do not share a stream."""
    numbers = {name: index for index, name in enumerate(shapes)}

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            generator = torch.Generator(device).manual_seed((seed << 32) + numbers[name])
            return initialiser(config, generator)(name, shapes[name])

        return read

    tensors = {name: (shape, reader(name)) for name, shape in shapes.items()}
    for name, tensor in (given or {}).items():
        tensors[name] = (tuple(tensor.shape), lambda tensor=tensor: tensor)
    return Checkpoint(Path("random/model"), tensors)
