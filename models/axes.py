"""What differs between families of draft heads, as data (DESIGN.md section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from specdec.errors import ConfigError


@dataclass(frozen=True)
class HeadAxes:
    """One row of the table of families; the defaults are the published Eagle for Llama."""

    fusion: str = "cat"  # cat(embed, hidden), or "norm_cat": each through its own norm first
    position0_embedding: str = "kept"  # or "zeroed"
    depth_rule: str = "stack"  # draft step i runs all layers, or "cycle": layer i mod n
    first_input_norm: bool = False  # False: the first block takes the fused input un-normed
    final_norm: bool = False  # a norm before the logits
    recycle: str = "pre_norm"  # hidden of the next step; or "post_norm", "pinned" (the input's)
    logits_from: str = "shared"  # own lm_head else the target's; or "target_rows": some of its rows
    embed: str = "own_or_shared"  # or "shared": an own table in the checkpoint is an error
    lm_head: str = "own_or_shared"  # or "shared"
    input_features: str = "last_hidden"  # the target's hidden after its final norm


CHOICES: dict[str, tuple[Any, ...]] = {
    "fusion": ("cat", "norm_cat"),
    "position0_embedding": ("kept", "zeroed"),
    "depth_rule": ("stack", "cycle"),
    "first_input_norm": (False, True),
    "final_norm": (False, True),
    "recycle": ("pre_norm", "post_norm", "pinned"),
    "logits_from": ("shared", "target_rows"),
    "embed": ("own_or_shared", "shared"),
    "lm_head": ("own_or_shared", "shared"),
    "input_features": ("last_hidden",),
}

EAGLE_LLAMA = HeadAxes()


def head_axes(values: Mapping[str, Any], base: HeadAxes = EAGLE_LLAMA) -> HeadAxes:
    """`base` with some axes set; ConfigError names the known ones on an unknown axis or value."""
    known = [field.name for field in fields(HeadAxes)]
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"unknown head axis {name!r}; known: {', '.join(known)}")
        if value not in CHOICES[name]:
            options = ", ".join(map(str, CHOICES[name]))
            raise ConfigError(f"head axis {name}={value!r} is not one of: {options}")
    axes = replace(base, **values)
    if axes.recycle == "post_norm" and not axes.final_norm:
        raise ConfigError("head axis recycle='post_norm' needs final_norm=true")
    return axes
