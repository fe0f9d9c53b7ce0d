"""The Qwen3-Next and Qwen3.5 (dense, text) checkpoint layouts: settings and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.decoder import DecoderParams, decoder_layout, load_decoder
from specdec.models.deltanet import DeltaNet, DeltaNetConfig
from specdec.models.moe import experts_layout, has_fused_experts, mlp_layout
from specdec.models.parts import Part, part
from specdec.models.qwen3_next import (
    GatedAttention,
    Qwen3NextConfig,
    Qwen3NextLayer,
    SharedExpertMoe,
    pack_layer,
)
from specdec.models.rope import read_rope, rope_settings

ATTENTION, LINEAR = "full_attention", "linear_attention"
SPLIT_FAMILIES = ("qwen3_5", "qwen3_5_text")
ROTARY_SHARE = 0.25  # of a head, where the config names none
NESTED = "model.language_model."  # Qwen3.5's text model beside a vision tower


def qwen3_next_config(config: Mapping[str, Any]) -> Qwen3NextConfig:
    """The fields of a Hugging Face config.json. Raises CheckpointError naming what is missing."""
    config = {**config, **(config.get("text_config") or {})}

    def need(name: str) -> Any:
        if config.get(name) is None:
            raise CheckpointError(f"config.json lacks {name!r}")
        return config[name]

    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act={config['hidden_act']!r} is not supported; only silu is")
    if config.get("attention_bias"):
        raise CheckpointError("attention_bias=true is not supported in this family")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    share = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    share = ROTARY_SHARE if share is None else share
    if not 0 < share <= 1:
        raise CheckpointError(f"partial_rotary_factor={share} must be above 0 and at most 1")
    heads, kv_heads = need("num_attention_heads"), need("num_key_value_heads")
    key_heads, value_heads = need("linear_num_key_heads"), need("linear_num_value_heads")
    for many, few, names in (
        (heads, kv_heads, ("num_attention_heads", "num_key_value_heads")),
        (value_heads, key_heads, ("linear_num_value_heads", "linear_num_key_heads")),
    ):
        if many % few:
            raise CheckpointError(f"{names[0]}={many} is not a multiple of {names[1]}={few}")
    head_dim = config.get("head_dim") or need("hidden_size") // heads
    kinds, is_moe = _layer_kinds(config, need("num_hidden_layers"))
    sparse, dense = any(is_moe), not all(is_moe)
    if sparse and not 0 < need("num_experts_per_tok") <= need("num_experts"):
        raise CheckpointError(
            f"num_experts_per_tok={config['num_experts_per_tok']} is not within "
            f"{config['num_experts']} experts"
        )
    return Qwen3NextConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        is_attention=tuple(kind == ATTENTION for kind in kinds),
        is_moe=is_moe,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=int(head_dim * share),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=read_rope({**config, "rope_parameters": rope, "partial_rotary_factor": 1.0}),
        max_position=config.get("max_position_embeddings", 32768),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        delta=DeltaNetConfig(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_dim=need("linear_key_head_dim"),
            value_dim=need("linear_value_head_dim"),
            conv_width=need("linear_conv_kernel_dim"),
            norm_eps=config.get("rms_norm_eps", 1e-6),
        ),
        split_projections=config.get("model_type") in SPLIT_FAMILIES,
        intermediate_size=need("intermediate_size") if dense else 0,
        num_experts=need("num_experts") if sparse else 0,
        experts_per_token=need("num_experts_per_tok") if sparse else 0,
        expert_size=need("moe_intermediate_size") if sparse else 0,
        shared_expert_size=need("shared_expert_intermediate_size") if sparse else 0,
        normalise_weights=bool(config.get("norm_topk_prob", True)),
    )


def _layer_kinds(
    config: Mapping[str, Any], num_layers: int
) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """The mixer's kind of each layer, and whether it has experts."""
    every = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        LINEAR if (index + 1) % every else ATTENTION for index in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= {ATTENTION, LINEAR}:
        raise CheckpointError(
            f"layer_types must name {num_layers} layers, each {LINEAR} or {ATTENTION}; "
            f"it has {len(kinds)}: {', '.join(sorted(set(kinds)))}"
        )
    plain, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    sparse = (config.get("num_experts") or 0) > 0
    return tuple(kinds), tuple(
        sparse and index not in plain and (index + 1) % step == 0 for index in range(num_layers)
    )


def qwen3_next_config_json(config: Qwen3NextConfig) -> dict[str, Any]:
    """The config.json that `qwen3_next_config` reads back, in the layout of published checkpoints.

    Experts, when any layer has them, are listed for all of Qwen3-Next's fields.
    """
    delta, sparse = config.delta, any(config.is_moe)
    split = config.split_projections
    model_type, name = ("qwen3_5_text", "Qwen3_5") if split else ("qwen3_next", "Qwen3Next")
    settings = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "layer_types": [ATTENTION if kind else LINEAR for kind in config.is_attention],
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.rotary_dim / config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "linear_conv_kernel_dim": delta.conv_width,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "intermediate_size": config.intermediate_size,
        **rope_settings(config.rope),
    }
    if sparse:
        settings |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_size,
            "shared_expert_intermediate_size": config.shared_expert_size,
            "norm_topk_prob": config.normalise_weights,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, sparse in enumerate(config.is_moe) if not sparse],
        }
    return settings


def layer_layout(
    config: Qwen3NextConfig,
    prefix: str,
    *,
    attention: bool,
    moe: bool,
    fused: bool = False,
    input_norm: bool = True,
) -> Qwen3NextLayer:
    """Layout of one block; `prefix` ends in a dot.

    Args:
        attention: full attention, else DeltaNet.
        moe: experts, else a dense part.
        fused: see `experts_layout`.
    """
    hidden = config.hidden_size
    mixer = _attention_layout(config, f"{prefix}self_attn.") if attention else None
    return Qwen3NextLayer(
        input_norm=part(f"{prefix}input_layernorm.weight", hidden) if input_norm else None,
        mixer=mixer or _delta_layout(config, f"{prefix}linear_attn."),
        post_norm=part(f"{prefix}post_attention_layernorm.weight", hidden),
        mlp=_moe_layout(config, f"{prefix}mlp.", fused)
        if moe
        else mlp_layout(f"{prefix}mlp.", hidden, config.intermediate_size),
    )


def _attention_layout(config: Qwen3NextConfig, prefix: str) -> GatedAttention:
    hidden, dim = config.hidden_size, config.head_dim
    rows = {"q": 2 * config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    return GatedAttention(
        in_proj=Part(
            {f"{prefix}{name}_proj.weight": (size * dim, hidden) for name, size in rows.items()},
            order=partial(_attention_order, config),
        ),
        q_norm=part(f"{prefix}q_norm.weight", dim),
        k_norm=part(f"{prefix}k_norm.weight", dim),
        out=part(f"{prefix}o_proj.weight", hidden, config.num_heads * dim),
    )


def _delta_layout(config: Qwen3NextConfig, prefix: str) -> DeltaNet:
    delta, hidden = config.delta, config.hidden_size
    heads, channels = delta.num_value_heads, delta.num_channels
    values = heads * delta.value_dim
    rows = {"qkvz": channels + values, "ba": 2 * heads}
    if config.split_projections:
        rows = {"qkv": channels, "b": heads, "a": heads, "z": values}
    return DeltaNet(
        in_proj=Part(
            {f"{prefix}in_proj_{name}.weight": (size, hidden) for name, size in rows.items()},
            order=None if config.split_projections else partial(_delta_order, delta),
        ),
        conv=Part(
            {f"{prefix}conv1d.weight": (channels, 1, delta.conv_width)},
            shape=(channels, delta.conv_width),
        ),
        decay_log=part(f"{prefix}A_log", heads),
        step_bias=part(f"{prefix}dt_bias", heads),
        norm=part(f"{prefix}norm.weight", delta.value_dim),
        out=part(f"{prefix}out_proj.weight", hidden, values),
    )


def _moe_layout(config: Qwen3NextConfig, prefix: str, fused: bool) -> SharedExpertMoe:
    hidden, count = config.hidden_size, config.num_experts
    return SharedExpertMoe(
        gate=part(f"{prefix}gate.weight", count, hidden),
        experts=experts_layout(f"{prefix}experts.", count, hidden, config.expert_size, fused=fused),
        shared=mlp_layout(f"{prefix}shared_expert.", hidden, config.shared_expert_size),
        shared_gate=part(f"{prefix}shared_expert_gate.weight", 1, hidden),
    )


def _attention_order(config: Qwen3NextConfig) -> Tensor:
    """The checkpoint has the query and the gate of each head together, then keys and values."""
    query, gate = _by_head(config.num_heads, [config.head_dim, config.head_dim], 0)
    first = 2 * config.num_heads * config.head_dim
    others = torch.arange(first, first + 2 * config.num_kv_heads * config.head_dim)
    return torch.cat((query, others, gate))


def _delta_order(delta: DeltaNetConfig) -> Tensor:
    """The checkpoint has query, key, value and output gate of each key head together, and in
    another tensor strength and step."""
    heads, each = delta.num_key_heads, delta.num_value_heads // delta.num_key_heads
    values = each * delta.value_dim
    query, key, value, gate = _by_head(heads, [delta.key_dim, delta.key_dim, values, values], 0)
    first = delta.num_channels + delta.num_value_heads * delta.value_dim
    strength, step = _by_head(heads, [each, each], first)
    return torch.cat((query, key, value, strength, step, gate))


def _by_head(num_heads: int, sizes: list[int], first: int) -> list[Tensor]:
    """Row numbers of each kind, where rows of all kinds stand together head by head."""
    rows = torch.arange(num_heads * sum(sizes)).view(num_heads, -1) + first
    return [kind.flatten() for kind in rows.split(sizes, dim=1)]


def qwen3_next_layout(config: Qwen3NextConfig, fused: bool = False) -> DecoderParams:
    """Layout of a whole model."""
    kinds = zip(config.is_attention, config.is_moe, strict=True)
    return decoder_layout(
        config,
        [
            layer_layout(config, f"model.layers.{i}.", attention=attention, moe=moe, fused=fused)
            for i, (attention, moe) in enumerate(kinds)
        ],
    )


def load_qwen3_next_params(
    checkpoint: Checkpoint, config: Qwen3NextConfig, device: torch.device | str, dtype: torch.dtype
) -> DecoderParams:
    """Every parameter of a target, its layers packed; see `load_decoder`.

    The MTP head's tensors (`mtp.*`) and a vision tower's are left alone.
    """
    if any(name.startswith(NESTED) for name in checkpoint):
        checkpoint = checkpoint.renamed(lambda name: name.replace(NESTED, "model."))
    others = [name for name in checkpoint if name.startswith(("mtp.", "model.visual."))]
    layout = qwen3_next_layout(config, fused=has_fused_experts(checkpoint))
    return load_decoder(checkpoint, layout, device, dtype, pack_layer, others)
