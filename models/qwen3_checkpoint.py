"""The Qwen3 checkpoint layout: settings and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.decoder import DecoderParams, decoder_layout, load_decoder
from specdec.models.llama_checkpoint import decoder_config_json, decoder_fields
from specdec.models.moe import mlp_layout
from specdec.models.parts import Part, part
from specdec.models.qwen3 import Qwen3Config, Qwen3Layer, pack_layer

DEFAULT_HEAD_DIM = 128  # of a config.json that names none, as in transformers


def qwen3_config(config: Mapping[str, Any]) -> Qwen3Config:
    """The fields of a Hugging Face config.json. Raises CheckpointError naming what is missing."""
    if config.get("use_sliding_window"):
        raise CheckpointError("use_sliding_window=true is not supported; only full attention is")
    head_dim = config.get("head_dim") or DEFAULT_HEAD_DIM
    return Qwen3Config(**decoder_fields({**config, "head_dim": head_dim}))


def qwen3_config_json(config: Any) -> dict[str, Any]:
    """The config.json that `qwen3_config` reads back, in the layout of published checkpoints."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **decoder_config_json(config),
    }


def layer_layout(
    config: Any, prefix: str, input_norm: bool = True, feed_forward: Any = None
) -> Qwen3Layer:
    """Layout of one block; `prefix` ends in a dot.

    `feed_forward` is the layout of another family's part below `mlp.`.
    """
    hidden, dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    attn = f"{prefix}self_attn."
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    bias = config.attention_bias
    return Qwen3Layer(
        input_norm=part(f"{prefix}input_layernorm.weight", hidden) if input_norm else None,
        qkv=Part({f"{attn}{name}.weight": (size, hidden) for name, size in rows.items()}),
        qkv_bias=Part({f"{attn}{name}.bias": (size,) for name, size in rows.items()})
        if bias
        else None,
        q_norm=part(f"{attn}q_norm.weight", dim),
        k_norm=part(f"{attn}k_norm.weight", dim),
        out=part(f"{attn}o_proj.weight", hidden, q),
        out_bias=part(f"{attn}o_proj.bias", hidden) if bias else None,
        post_norm=part(f"{prefix}post_attention_layernorm.weight", hidden),
        mlp=feed_forward or mlp_layout(f"{prefix}mlp.", hidden, config.intermediate_size),
    )


def qwen3_layout(config: Qwen3Config) -> DecoderParams:
    """Layout of a whole model."""
    stack = [layer_layout(config, f"model.layers.{index}.") for index in range(config.num_layers)]
    return decoder_layout(config, stack)


def load_qwen3_params(
    checkpoint: Checkpoint, config: Qwen3Config, device: torch.device | str, dtype: torch.dtype
) -> DecoderParams:
    """Every parameter of a Qwen3 model, its layers packed; see `load_decoder`."""
    return load_decoder(checkpoint, qwen3_layout(config), device, dtype, pack_layer)
