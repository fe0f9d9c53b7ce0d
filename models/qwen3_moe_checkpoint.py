"""The Qwen3-MoE checkpoint layout: settings and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.decoder import DecoderParams, decoder_layout, load_decoder
from specdec.models.moe import SoftmaxMoe, experts_layout, has_fused_experts
from specdec.models.parts import part
from specdec.models.qwen3 import Qwen3Layer, pack_layer
from specdec.models.qwen3_checkpoint import layer_layout, qwen3_config, qwen3_config_json
from specdec.models.qwen3_moe import Qwen3MoeConfig


def qwen3_moe_config(config: Mapping[str, Any]) -> Qwen3MoeConfig:
    """The fields of a Hugging Face config.json. Raises CheckpointError naming what is wrong."""
    num_experts = config.get("num_experts", config.get("num_local_experts"))
    for name, value in (
        ("num_experts", num_experts),
        ("num_experts_per_tok", config.get("num_experts_per_tok")),
        ("moe_intermediate_size", config.get("moe_intermediate_size")),
    ):
        if value is None:
            raise CheckpointError(f"config.json lacks {name!r}")
    top_k = config["num_experts_per_tok"]
    if num_experts and not 0 < top_k <= num_experts:
        raise CheckpointError(f"num_experts_per_tok={top_k} is not within {num_experts} experts")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (hidden and heads and hidden // heads)
    dense = qwen3_config({**config, "head_dim": head_dim})
    return Qwen3MoeConfig(
        **{field.name: getattr(dense, field.name) for field in fields(dense)},
        moe_intermediate_size=config["moe_intermediate_size"],
        num_experts=num_experts,
        top_k=top_k,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        decoder_sparse_step=config.get("decoder_sparse_step") or 1,
        mlp_only_layers=tuple(config.get("mlp_only_layers") or ()),
    )


def qwen3_moe_config_json(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The config.json that `qwen3_moe_config` reads back, in the published checkpoints' layout."""
    return {
        **qwen3_config_json(config),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": config.decoder_sparse_step,
        "mlp_only_layers": list(config.mlp_only_layers),
    }


def moe_layer_layout(
    config: Qwen3MoeConfig, prefix: str, *, experts: bool, fused: bool, input_norm: bool = True
) -> Qwen3Layer:
    """Layout of one block with or without experts; `prefix` ends in a dot."""
    feed_forward = None
    if experts:
        feed_forward = SoftmaxMoe(
            gate=part(f"{prefix}mlp.gate.weight", config.num_experts, config.hidden_size),
            experts=experts_layout(
                f"{prefix}mlp.experts.",
                config.num_experts,
                config.hidden_size,
                config.moe_intermediate_size,
                fused=fused,
            ),
        )
    return layer_layout(config, prefix, input_norm, feed_forward)


def qwen3_moe_layout(config: Qwen3MoeConfig, *, fused: bool = False) -> DecoderParams:
    """Layout of a whole model; see `experts_layout` about `fused`."""
    stack = [
        moe_layer_layout(
            config, f"model.layers.{index}.", experts=config.has_experts(index), fused=fused
        )
        for index in range(config.num_layers)
    ]
    return decoder_layout(config, stack)


def load_qwen3_moe_params(
    checkpoint: Checkpoint, config: Qwen3MoeConfig, device: torch.device | str, dtype: torch.dtype
) -> DecoderParams:
    """Every parameter of a Qwen3-MoE model, its layers packed; see `load_decoder`."""
    layout = qwen3_moe_layout(config, fused=has_fused_experts(checkpoint))
    return load_decoder(checkpoint, layout, device, dtype, pack_layer)
