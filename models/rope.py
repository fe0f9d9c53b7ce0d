"""Rotary position settings: read in every published layout, turned into frequencies in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError

DEFAULT_THETA = 10000.0  # what a config that names no theta means, as in transformers


@dataclass(frozen=True)
class Rope:
    """One model's rotary settings. `kind`: default, linear, llama3, yarn or freq_factors.

    Fields that a kind does not use keep their neutral values.
    """

    theta: float = DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: scales cos and sin
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    freq_factors: tuple[float, ...] = ()  # GGUF: a divisor for each frequency


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Rotary settings of a config.json.

    `rope_parameters` (transformers 5), then `rope_scaling` and top-level `rope_theta` (earlier
    versions). Raises CheckpointError on a scaling type that is not implemented or lacks a value.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [name for name, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointError(
            f"rope_parameters has one entry a layer type ({', '.join(nested)}); "
            "only one setting for all layers is supported"
        )
    if config.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported")
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "freq_factors":
        return Rope(theta, kind, freq_factors=tuple(settings["freq_factors"]))
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            f"rope scaling type {kind!r} is not supported; known: default, linear, llama3, yarn"
        )

    def value(name: str) -> float:
        if settings.get(name) is None:
            raise CheckpointError(f"rope scaling type {kind!r} needs {name!r} in the config")
        return float(settings[name])

    factor = value("factor")
    if kind == "linear":
        return Rope(theta, kind, factor)
    original = int(
        settings.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config.get("max_position_embeddings")
        or value("original_max_position_embeddings")
    )
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            factor,
            low_freq_factor=value("low_freq_factor"),
            high_freq_factor=value("high_freq_factor"),
            original_max_position=original,
        )
    return Rope(
        theta,
        kind,
        factor,
        original_max_position=original,
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(settings, factor),
        truncate=bool(settings.get("truncate", True)),
    )


def rope_settings(rope: Rope) -> dict[str, Any]:
    """The config.json entries that `read_rope` reads back: `rope_theta` and `rope_scaling`."""
    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        "freq_factors": ("freq_factors",),
    }[rope.kind]
    scaling: dict[str, Any] = {"rope_type": rope.kind}
    scaling |= {name: getattr(rope, name) for name in names}
    if rope.original_max_position:
        scaling["original_max_position_embeddings"] = rope.original_max_position
    return {"rope_theta": rope.theta, "rope_scaling": scaling if names else None}


def inv_freq(rope: Rope, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angles a position, [head_dim / 2] fp32; pair i is dimensions i and i + head_dim / 2.

    Llama 3's scaling keeps short wavelengths, divides long ones by `factor`, and blends between;
    yarn (arXiv 2309.00071) blends by dimension. Raises CheckpointError for an odd number of
    dimensions, or none.
    """
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(
            f"rotary positions turn pairs of a head's dimensions, and {head_dim} are no pairs; "
            "check head_dim, hidden_size and num_attention_heads in the config"
        )
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freq = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / freq
        span = rope.high_freq_factor - rope.low_freq_factor
        blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / span
        blend = blend.clamp(0, 1)  # 1 keeps, 0 divides
        freq = (1 - blend) * freq / rope.factor + blend * freq
    elif rope.kind == "yarn":
        keep = _yarn_keep(rope, head_dim)
        freq = (1 - keep) * freq / rope.factor + keep * freq
    elif rope.kind == "freq_factors":
        if len(rope.freq_factors) != freq.numel():
            raise CheckpointError(
                f"{len(rope.freq_factors)} rope frequency factors for {freq.numel()} frequencies"
            )
        freq = freq / torch.tensor(rope.freq_factors)
    return freq.to(device)


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale(float(settings["mscale"])) / scale(float(settings["mscale_all_dim"]))
    return scale(1.0)


def _yarn_keep(rope: Rope, head_dim: int) -> Tensor:
    """Share of each unscaled frequency, [head_dim / 2]: 1 for fast dimensions, 0 for slow ones."""

    def dimension(rotations: float) -> float:
        periods = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(periods) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
    return 1 - ramp.clamp(0, 1)
