"""The Llama checkpoint layout: settings and tensor names, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.checkpoint import Checkpoint, check_names, read_part
from specdec.models.llama import LlamaConfig, LlamaLayer, LlamaParams
from specdec.models.rope import read_rope, rope_settings

Parts = dict[str, dict[str, tuple[int, ...]]]  # field -> checkpoint name -> shape


def llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The fields of a Hugging Face config.json. Raises CheckpointError naming what is missing."""

    def need(name: str) -> Any:
        if config.get(name) is None:
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
    return LlamaConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.get("head_dim") or need("hidden_size") // num_heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=read_rope(config),
        max_position=config.get("max_position_embeddings", 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def llama_config_json(config: LlamaConfig) -> dict[str, Any]:
    """The config.json that `llama_config` reads back, in the layout of published checkpoints."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
        "mlp_bias": config.mlp_bias,
        **rope_settings(config.rope),
    }


def layer_parts(config: LlamaConfig, prefix: str, input_norm: bool = True) -> Parts:
    """For each field of a `LlamaLayer`: the checkpoint tensors (name: shape) stacked into it.

    `prefix` ends in a dot. A bias that the config does not have is left out.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    parts: Parts = {
        "qkv": {
            f"{attn}q_proj.weight": (q, hidden),
            f"{attn}k_proj.weight": (kv, hidden),
            f"{attn}v_proj.weight": (kv, hidden),
        },
        "out": {f"{attn}o_proj.weight": (hidden, q)},
        "post_norm": {f"{prefix}post_attention_layernorm.weight": (hidden,)},
        "gate_up": {
            f"{mlp}gate_proj.weight": (inner, hidden),
            f"{mlp}up_proj.weight": (inner, hidden),
        },
        "down": {f"{mlp}down_proj.weight": (hidden, inner)},
    }
    if input_norm:
        parts["input_norm"] = {f"{prefix}input_layernorm.weight": (hidden,)}
    biased = ["qkv", "out"] * config.attention_bias + ["gate_up", "down"] * config.mlp_bias
    for field in biased:
        parts[f"{field}_bias"] = {
            name.removesuffix("weight") + "bias": shape[:1] for name, shape in parts[field].items()
        }
    return parts


def read_layer(
    checkpoint: Checkpoint, parts: Parts, device: torch.device | str, dtype: torch.dtype
) -> LlamaLayer:
    """One block, its projections stacked; fields without parts are None."""
    read = {field: read_part(checkpoint, names, device, dtype) for field, names in parts.items()}
    return LlamaLayer(**{field: read.get(field) for field in LlamaLayer._fields})


def layer_tensors(layer: LlamaLayer, parts: Parts) -> dict[str, Tensor]:
    """The inverse of `read_layer` for a block of plain tensors: checkpoint name -> tensor."""
    tensors = {}
    for field, names in parts.items():
        stacked = getattr(layer, field)
        pieces = stacked.split([shape[0] for shape in names.values()])
        tensors |= dict(zip(names, pieces, strict=True))
    return tensors


def load_llama_params(
    checkpoint: Checkpoint,
    config: LlamaConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    prepare: Callable[[LlamaLayer], LlamaLayer] = lambda layer: layer,
) -> LlamaParams:
    """Every parameter of a Llama model; raises CheckpointError as `load_target`.

    `prepare` is applied to each layer before the next is read (`pack_layer`), so that plain and
    packed matrices of the whole model never exist together.
    """
    table = (config.vocab_size, config.hidden_size)
    top = {"embed": {"model.embed_tokens.weight": table}}
    top["norm"] = {"model.norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings:
        top["lm_head"] = {"lm_head.weight": table}
    stack = [layer_parts(config, f"model.layers.{index}.") for index in range(config.num_layers)]
    redundant = ["lm_head.weight"] if config.tie_word_embeddings else []
    check_names(checkpoint, [top, *stack], redundant)
    read = {field: read_part(checkpoint, parts, device, dtype) for field, parts in top.items()}
    return LlamaParams(
        embed=read["embed"],
        layers=tuple(prepare(read_layer(checkpoint, parts, device, dtype)) for parts in stack),
        norm=read["norm"],
        lm_head=read.get("lm_head", read["embed"]),
    )
