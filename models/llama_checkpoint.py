"""The Llama checkpoint layout: settings and tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint
from specdec.models.decoder import DecoderConfig, DecoderParams, decoder_layout, load_decoder
from specdec.models.llama import LlamaConfig, LlamaLayer, pack_layer
from specdec.models.parts import Part, part
from specdec.models.rope import read_rope, rope_settings


def llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The fields of a Hugging Face config.json. Raises CheckpointError naming what is missing."""
    return LlamaConfig(**decoder_fields(config), mlp_bias=bool(config.get("mlp_bias", False)))


def decoder_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `DecoderConfig`, which Llama-like families name alike in their config.json.

    Raises CheckpointError naming what is missing.
    """

    def need(name: str) -> Any:
        if config.get(name) in (None, 0):
            raise CheckpointError(f"config.json lacks {name!r}")
        return config[name]

    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act={config['hidden_act']!r} is not supported; only silu is")
    num_heads = need("num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads={num_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return {
        "vocab_size": need("vocab_size"),
        "hidden_size": need("hidden_size"),
        "intermediate_size": need("intermediate_size"),
        "num_layers": need("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": config.get("head_dim") or need("hidden_size") // num_heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope": read_rope(config),
        "max_position": config.get("max_position_embeddings", 2048),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "attention_bias": bool(config.get("attention_bias", False)),
    }


def llama_config_json(config: LlamaConfig) -> dict[str, Any]:
    """The config.json that `llama_config` reads back, in the layout of published checkpoints."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **decoder_config_json(config),
        "mlp_bias": config.mlp_bias,
    }


def decoder_config_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json entries that `decoder_fields` reads back."""
    return {
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        **rope_settings(config.rope),
    }


def layer_layout(config: LlamaConfig, prefix: str, input_norm: bool = True) -> LlamaLayer:
    """Layout of one block; `prefix` ends in a dot."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    out, down = {"self_attn.o_proj": hidden}, {"mlp.down_proj": hidden}

    def weight(rows: dict[str, int], columns: int) -> Part:
        return Part({f"{prefix}{name}.weight": (size, columns) for name, size in rows.items()})

    def bias(rows: dict[str, int], present: bool) -> Part | None:
        names = {f"{prefix}{name}.bias": (size,) for name, size in rows.items()}
        return Part(names) if present else None

    return LlamaLayer(
        input_norm=part(f"{prefix}input_layernorm.weight", hidden) if input_norm else None,
        qkv=weight(qkv, hidden),
        qkv_bias=bias(qkv, config.attention_bias),
        out=weight(out, q),
        out_bias=bias(out, config.attention_bias),
        post_norm=part(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=weight(gate_up, hidden),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=weight(down, inner),
        down_bias=bias(down, config.mlp_bias),
    )


def llama_layout(config: LlamaConfig) -> DecoderParams:
    """Layout of a whole model."""
    stack = [layer_layout(config, f"model.layers.{index}.") for index in range(config.num_layers)]
    return decoder_layout(config, stack)


def load_llama_params(
    checkpoint: Checkpoint, config: LlamaConfig, device: torch.device | str, dtype: torch.dtype
) -> DecoderParams:
    """Every parameter of a Llama model, its layers packed; see `load_decoder`."""
    return load_decoder(checkpoint, llama_layout(config), device, dtype, pack_layer)
