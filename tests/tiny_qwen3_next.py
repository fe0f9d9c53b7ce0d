"""Tiny random Qwen3-Next and Qwen3.5 models, for tests."""

from __future__ import annotations

from typing import Any

import torch
from tiny import InMemory
from torch import Tensor

from specdec.models.batch import Target
from specdec.models.parts import shapes_of
from specdec.models.qwen3_next import qwen3_next_target
from specdec.models.qwen3_next_checkpoint import (
    load_qwen3_next_params,
    qwen3_next_config,
    qwen3_next_layout,
)

TINY = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
EXPERTS += ("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers")


QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


def settings(**overrides: Any) -> dict[str, Any]:
    """A config.json of a tiny model; overrides by Hugging Face key names."""
    return {**TINY, **overrides}


def dense_settings(**overrides: Any) -> dict[str, Any]:
    """A config.json of a tiny Qwen3.5 text model."""
    plain = {name: value for name, value in TINY.items() if name not in EXPERTS}
    family = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    return {**plain, **family, **overrides}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
ODD = {
    "vocab_size": 67,
    "hidden_size": 28,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "partial_rotary_factor": 0.3,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 9,
    "shared_expert_intermediate_size": 11,
}
VARIANTS = {
    "published_shape": settings(),
    "odd": settings(**ODD, norm_topk_prob=False),
    "mixed": settings(
        layer_types=["full_attention", "linear_attention", "full_attention"],
        num_hidden_layers=3,
        mlp_only_layers=[0],
        partial_rotary_factor=1.0,
        tie_word_embeddings=True,
    ),
    "yarn": settings(
        num_hidden_layers=2, full_attention_interval=2, rope_parameters=YARN, decoder_sparse_step=2
    ),
    "qwen3_5": dense_settings(),
}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random fp32 tensors for checkpoint names, of sizes that make every part matter."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(s, generator=generator) * 0.3 for name, s in shapes.items()}
    for name in state:
        if name.endswith("linear_attn.norm.weight"):
            state[name] += 1
        if name.endswith("A_log"):
            state[name] = torch.rand(shapes[name], generator=generator) * 4 - 3
    return state


def state_of(config: dict[str, Any], seed: int = 0) -> InMemory:
    """A random checkpoint in memory."""
    return InMemory(random_tensors(shapes_of(qwen3_next_layout(qwen3_next_config(config))), seed))


def tiny_target(
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Target:
    """A tiny random target; overrides by Hugging Face key names."""
    config = settings(**overrides) if config is None else config
    read = qwen3_next_config(config)
    return qwen3_next_target(
        load_qwen3_next_params(state_of(config, seed), read, "cpu", dtype), read
    )
