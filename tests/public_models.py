"""Configs of public checkpoints, and the tensors that those checkpoints hold.

Names and shapes are written out here from the published layouts, apart from the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.models.checkpoint import Checkpoint
from specdec.models.fp8 import dequantised

Stored = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype on disk)

LLAMA_3_1_8B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "max_window_layers": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def llama_tensors(config: Mapping[str, Any]) -> Stored:
    """Llama and, with its two head norms, Qwen3."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    stored = _top(config)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        stored |= _grouped_attention(config, layer)
        stored |= _gated_mlp(f"{layer}.mlp", hidden, inner)
        stored |= _block_norms(layer, hidden)
    return stored


def qwen3_moe_tensors(config: Mapping[str, Any]) -> Stored:
    """Qwen3-MoE with experts in every block, one by one."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    stored = _top(config)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        stored |= _grouped_attention(config, layer)
        stored |= _plain({f"{layer}.mlp.gate.weight": (config["num_experts"], hidden)})
        for expert in range(config["num_experts"]):
            stored |= _gated_mlp(f"{layer}.mlp.experts.{expert}", hidden, inner)
        stored |= _block_norms(layer, hidden)
    return stored


def deepseek_tensors(config: Mapping[str, Any], *, mtp: bool = True) -> Stored:
    """DeepSeek-V3 in fp8 blocks, with the MTP layers after the last one."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    stored, depth = _top(config), config["num_hidden_layers"]
    for index in range(depth + config["num_nextn_predict_layers"] * mtp):
        layer = f"model.layers.{index}"
        stored |= _latent_attention(config, layer)
        if index < config["first_k_dense_replace"]:
            stored |= _fp8(_gated_mlp(f"{layer}.mlp", hidden, config["intermediate_size"]))
        else:
            stored |= _deepseek_experts(config, f"{layer}.mlp")
        stored |= _block_norms(layer, hidden)
        if index >= depth:
            stored |= _plain(
                {
                    f"{layer}.embed_tokens.weight": (vocab, hidden),
                    f"{layer}.enorm.weight": (hidden,),
                    f"{layer}.hnorm.weight": (hidden,),
                    f"{layer}.eh_proj.weight": (hidden, 2 * hidden),
                    f"{layer}.shared_head.norm.weight": (hidden,),
                    f"{layer}.shared_head.head.weight": (vocab, hidden),
                }
            )
    return stored


class Reads:
    """A checkpoint on the `meta` device, and which of its tensors were read."""

    def __init__(self, stored: Stored, config: Mapping[str, Any]):
        self.stored, self.names = stored, set()

        def reader(name: str):
            def read() -> Tensor:
                self.names.add(name)
                shape, dtype = stored[name]
                return torch.empty(shape, dtype=dtype, device="meta")

            return read

        tensors = {name: (shape, reader(name)) for name, (shape, _) in stored.items()}
        where = Path("public/model.safetensors.index.json")
        self.checkpoint = Checkpoint(where, dequantised(tensors, where, config))


def num_elements(stored: Stored) -> int:
    """Numbers in the weights, without the factors of quantised blocks."""
    sizes = {n: torch.Size(s).numel() for n, (s, _) in stored.items()}
    return sum(size for name, size in sizes.items() if not name.endswith("_scale_inv"))


def _plain(shapes: Mapping[str, tuple[int, ...]]) -> Stored:
    return {name: (shape, torch.bfloat16) for name, shape in shapes.items()}


def _fp8(stored: Stored) -> Stored:
    out: Stored = {}
    for name, ((rows, columns), _) in stored.items():
        out[name] = ((rows, columns), torch.float8_e4m3fn)
        blocks = ((rows + 127) // 128, (columns + 127) // 128)
        out[name + "_scale_inv"] = (blocks, torch.float32)
    return out


def _top(config: Mapping[str, Any]) -> Stored:
    table = (config["vocab_size"], config["hidden_size"])
    names = {"model.embed_tokens.weight": table, "lm_head.weight": table}
    return _plain(names | {"model.norm.weight": table[1:]})


def _block_norms(layer: str, hidden: int) -> Stored:
    names = ("input_layernorm", "post_attention_layernorm")
    return _plain({f"{layer}.{name}.weight": (hidden,) for name in names})


def _gated_mlp(prefix: str, hidden: int, inner: int) -> Stored:
    return _plain(
        {
            f"{prefix}.gate_proj.weight": (inner, hidden),
            f"{prefix}.up_proj.weight": (inner, hidden),
            f"{prefix}.down_proj.weight": (hidden, inner),
        }
    )


def _grouped_attention(config: Mapping[str, Any], layer: str) -> Stored:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    kv = config["num_key_value_heads"] * dim
    shapes = {
        "q_proj": (heads * dim, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, heads * dim),
    }
    if config["model_type"].startswith("qwen3"):
        shapes |= {"q_norm": (dim,), "k_norm": (dim,)}
    return _plain({f"{layer}.self_attn.{name}.weight": s for name, s in shapes.items()})


def _latent_attention(config: Mapping[str, Any], layer: str) -> Stored:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    low, rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value, attention = config["v_head_dim"], f"{layer}.self_attn"
    matrices = {
        "q_a_proj": (low, hidden),
        "q_b_proj": (heads * (nope + rope), low),
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), rank),
        "o_proj": (hidden, heads * value),
    }
    norms = {"q_a_layernorm": (low,), "kv_a_layernorm": (rank,)}
    return _fp8(_plain({f"{attention}.{name}.weight": s for name, s in matrices.items()})) | _plain(
        {f"{attention}.{name}.weight": s for name, s in norms.items()}
    )


def _deepseek_experts(config: Mapping[str, Any], mlp: str) -> Stored:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["n_routed_experts"]
    stored = _plain({f"{mlp}.gate.weight": (experts, hidden)})
    stored[f"{mlp}.gate.e_score_correction_bias"] = ((experts,), torch.float32)
    for expert in range(experts):
        stored |= _fp8(_gated_mlp(f"{mlp}.experts.{expert}", hidden, inner))
    shared = config["n_shared_experts"] * inner
    return stored | _fp8(_gated_mlp(f"{mlp}.shared_experts", hidden, shared))
