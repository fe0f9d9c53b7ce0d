"""What differs between families of draft heads, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from specdec.errors import ConfigError


@dataclass(frozen=True)
class HeadAxes:
    """One row of the table of families; the defaults are the published Eagle for Llama."""

    fusion: str = "cat"  # fc(cat(embed, hidden)); "norm_cat": each through its own norm first;
    # "wide": both normed and concatenated, no fc: the first block's q, k, v are 2 H wide
    block: str = "llama"  # the decoder block; its family's norms are the head's norms too
    residual: str = "hidden"  # with "wide", the first residual: the hidden, or "normed"
    position0_embedding: str = "kept"  # or "zeroed"
    depth_rule: str = "stack"  # draft step i runs all layers, or "cycle": layer i mod n
    depth_owns: str = "block"  # with "cycle", a layer has its own block, or "all": fusion and norm
    first_input_norm: bool = False  # False: the first block takes the fused input un-normed
    final_norm: bool = False  # a norm before the logits
    recycle: str = "pre_norm"  # hidden of the next step; or "post_norm", "pinned" (the input's)
    logits_from: str = "shared"  # own lm_head else the target's; or "target_rows": some of its rows
    embed: str = "own_or_shared"  # or "shared": an own table in the checkpoint is an error
    lm_head: str = "own_or_shared"  # or "shared"
    input_features: str = "last_hidden"  # after the target's final norm; "aux": fc(cat(streams))
    aux_norm: str = "none"  # with "aux", before fc: one norm over all of it "joint", or of "each"


CHOICES: dict[str, tuple[Any, ...]] = {
    "block": ("llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek"),
    "fusion": ("cat", "norm_cat", "wide"),
    "residual": ("hidden", "normed"),
    "position0_embedding": ("kept", "zeroed"),
    "depth_rule": ("stack", "cycle"),
    "depth_owns": ("block", "all"),
    "first_input_norm": (False, True),
    "final_norm": (False, True),
    "recycle": ("pre_norm", "post_norm", "pinned"),
    "logits_from": ("shared", "target_rows"),
    "embed": ("own_or_shared", "shared"),
    "lm_head": ("own_or_shared", "shared"),
    "input_features": ("last_hidden", "aux"),
    "aux_norm": ("none", "joint", "each"),
}

NEEDS: tuple[tuple[str, Any, str, Any], ...] = (
    ("recycle", "post_norm", "final_norm", True),
    ("residual", "normed", "fusion", "wide"),
    ("depth_owns", "all", "depth_rule", "cycle"),
    ("aux_norm", "joint", "input_features", "aux"),
    ("aux_norm", "each", "input_features", "aux"),
)  # an axis at a value needs another axis at a value

WIDE_BLOCKS = ("llama", "qwen3")  # whose attention takes an input of another width

EAGLE_LLAMA = HeadAxes()
EAGLE_QWEN3 = HeadAxes(
    block="qwen3",
    fusion="norm_cat",
    first_input_norm=True,
    final_norm=True,
    recycle="post_norm",
)
EAGLE3 = HeadAxes(fusion="wide", final_norm=True, input_features="aux")
MTP_QWEN = HeadAxes(
    block="qwen3_next",
    fusion="norm_cat",
    depth_rule="cycle",
    first_input_norm=True,
    final_norm=True,
    recycle="post_norm",
    embed="shared",
    lm_head="shared",
)
MTP_DEEPSEEK = replace(MTP_QWEN, block="deepseek", position0_embedding="zeroed", depth_owns="all")
MTP_ERNIE = replace(MTP_DEEPSEEK, block="llama", final_norm=False, recycle="pre_norm")


class HeadNames(NamedTuple):
    """Checkpoint names without their `.weight`; {i} numbers the head's layers from 0, {n} from the
    target's last layer on, {j} the auxiliary streams."""

    layer: str = "layers.{i}."
    fc: str = "fc"
    embed_norm: str = "embed_norm"
    hidden_norm: str = "hidden_norm"
    norm: str = "norm"
    aux_fc: str = "fc"
    aux_norms: tuple[str, str] = ("input_norm", "fc_norm.{j}")  # joint, each
    repeated: tuple[str, ...] = ()  # tables of the target that the checkpoint holds once more
    interleaved: bool = False  # rotary pairs are rows (0, 1), (2, 3).. of a head, not its halves


class HeadFamily(NamedTuple):
    """A published kind of head."""

    method: str  # eagle, eagle3 or mtp
    axes: HeadAxes
    names: HeadNames
    architecture: str  # what an exported config.json says
    count_keys: tuple[str, ...] = ("num_hidden_layers",)  # config keys of the number of layers


_EAGLE_QWEN3_NAMES = HeadNames(fc="eh_proj", embed_norm="e_norm", hidden_norm="h_norm")
_EAGLE3_NAMES = HeadNames(embed_norm="layers.0.input_layernorm", hidden_norm="layers.0.hidden_norm")
_QWEN_NAMES = HeadNames(
    layer="mtp.layers.{i}.",
    fc="mtp.fc",
    embed_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
)
_DEEPSEEK_NAMES = HeadNames(
    layer="model.layers.{n}.",
    fc="model.layers.{n}.eh_proj",
    embed_norm="model.layers.{n}.enorm",
    hidden_norm="model.layers.{n}.hnorm",
    norm="model.layers.{n}.shared_head.norm",
    repeated=("model.layers.{n}.embed_tokens", "model.layers.{n}.shared_head.head"),
)
_ERNIE_NAMES = HeadNames(
    layer="model.mtp_block.{i}.",
    fc="model.mtp_linear_proj.{i}",
    embed_norm="model.mtp_emb_norm.{i}",
    hidden_norm="model.mtp_hidden_norm.{i}",
    interleaved=True,
)
_MTP_COUNT = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

FAMILIES: dict[str, HeadFamily] = {
    "llama_eagle": HeadFamily("eagle", EAGLE_LLAMA, HeadNames(), "EagleLlamaForCausalLM"),
    "qwen3_eagle": HeadFamily("eagle", EAGLE_QWEN3, _EAGLE_QWEN3_NAMES, "EagleQwen3ForCausalLM"),
    "qwen3_moe_eagle": HeadFamily(
        "eagle",
        replace(EAGLE_QWEN3, block="qwen3_moe"),
        _EAGLE_QWEN3_NAMES,
        "EagleQwen3MoeForCausalLM",
    ),
    "llama_eagle3": HeadFamily("eagle3", EAGLE3, _EAGLE3_NAMES, "LlamaForCausalLMEagle3"),
    "qwen3_eagle3": HeadFamily(
        "eagle3", replace(EAGLE3, block="qwen3"), _EAGLE3_NAMES, "Eagle3Qwen3ForCausalLM"
    ),
    "qwen3_next_mtp": HeadFamily("mtp", MTP_QWEN, _QWEN_NAMES, "Qwen3NextMTP", _MTP_COUNT),
    "qwen_mtp": HeadFamily("mtp", MTP_QWEN, _QWEN_NAMES, "Qwen3_5MTP", _MTP_COUNT),
    "deepseek_mtp": HeadFamily(
        "mtp", MTP_DEEPSEEK, _DEEPSEEK_NAMES, "DeepSeekMTPModel", _MTP_COUNT
    ),
    "ernie_mtp": HeadFamily("mtp", MTP_ERNIE, _ERNIE_NAMES, "ErnieMTPModel", _MTP_COUNT),
}


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
    for name, value, other, needed in NEEDS:
        if getattr(axes, name) == value and getattr(axes, other) != needed:
            wanted = str(needed).lower() if isinstance(needed, bool) else needed
            raise ConfigError(f"head axis {name}={value!r} needs {other}={wanted}")
    if axes.fusion == "wide" and axes.block not in WIDE_BLOCKS:
        options = " or ".join(WIDE_BLOCKS)
        raise ConfigError(f"head axis fusion='wide' needs block={options}, not {axes.block}")
    return axes
