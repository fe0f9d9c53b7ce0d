"""Published names and shapes of draft heads, and of the targets they go with, from config.json.

Written out on their own: nothing here asks the code under test what a checkpoint holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.models.checkpoint import Checkpoint

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 12,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_NEXT = QWEN3_MOE | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 4,
    "shared_expert_intermediate_size": 24,
}
QWEN3_5 = {
    name: value
    for name, value in QWEN3_NEXT.items()
    if name not in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
} | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "mtp_num_hidden_layers": 1,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ERNIE = LLAMA | {
    "model_type": "ernie4_5_moe",
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "num_nextn_predict_layers": 1,
    "use_bias": False,
}


def mlp(prefix: str, hidden: int, inner: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def attention(prefix: str, c: Config, *, width: int = 1, gated: bool = False) -> Shapes:
    """Llama's and Qwen's; `width`: how many hidden sizes feed q, k and v."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    kv, size = c["num_key_value_heads"], c.get("head_dim") or hidden // heads
    return {
        f"{prefix}q_proj.weight": (heads * size * (1 + gated), hidden * width),
        f"{prefix}k_proj.weight": (kv * size, hidden * width),
        f"{prefix}v_proj.weight": (kv * size, hidden * width),
        f"{prefix}o_proj.weight": (hidden, heads * size),
    }


def head_norms(prefix: str, c: Config) -> Shapes:
    return {f"{prefix}{name}_norm.weight": (c["head_dim"],) for name in "qk"}


def latent(prefix: str, c: Config) -> Shapes:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    plain, rotary, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return {
        f"{prefix}q_a_proj.weight": (c["q_lora_rank"], hidden),
        f"{prefix}q_a_layernorm.weight": (c["q_lora_rank"],),
        f"{prefix}q_b_proj.weight": (heads * (plain + rotary), c["q_lora_rank"]),
        f"{prefix}kv_a_proj_with_mqa.weight": (rank + rotary, hidden),
        f"{prefix}kv_a_layernorm.weight": (rank,),
        f"{prefix}kv_b_proj.weight": (heads * (plain + value), rank),
        f"{prefix}o_proj.weight": (hidden, heads * value),
    }


def norms(prefix: str, c: Config, *names: str) -> Shapes:
    return {f"{prefix}{name}.weight": (c["hidden_size"],) for name in names}


def experts(prefix: str, c: Config, count: int) -> Shapes:
    hidden, shapes = c["hidden_size"], {f"{prefix}gate.weight": (count, c["hidden_size"])}
    for e in range(count):
        shapes |= mlp(f"{prefix}experts.{e}.", hidden, c["moe_intermediate_size"])
    return shapes


def layer(prefix: str, c: Config, *, input_norm: bool = True, width: int = 1) -> Shapes:
    """A decoder layer of a Llama, Qwen3, Qwen3-MoE, Qwen3-Next (full attention) or DeepSeek."""
    kind, hidden = c["model_type"], c["hidden_size"]
    gated = kind.startswith(("qwen3_next", "qwen3_5"))
    shapes = attention(f"{prefix}self_attn.", c, width=width, gated=gated)
    if kind.startswith("qwen3"):
        shapes |= head_norms(f"{prefix}self_attn.", c)
    shapes |= norms(prefix, c, "post_attention_layernorm", *["input_layernorm"] * input_norm)
    if c.get("num_experts"):
        shapes |= experts(f"{prefix}mlp.", c, c["num_experts"])
        if "shared_expert_intermediate_size" in c:
            shapes |= mlp(
                f"{prefix}mlp.shared_expert.", hidden, c["shared_expert_intermediate_size"]
            )
            shapes[f"{prefix}mlp.shared_expert_gate.weight"] = (1, hidden)
        return shapes
    return shapes | mlp(f"{prefix}mlp.", hidden, c["intermediate_size"])


def deepseek_layer(prefix: str, c: Config, number: int) -> Shapes:
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    shapes = latent(f"{prefix}self_attn.", c)
    shapes |= norms(prefix, c, "post_attention_layernorm", "input_layernorm")
    if number < c["first_k_dense_replace"]:
        return shapes | mlp(f"{prefix}mlp.", hidden, c["intermediate_size"])
    shapes |= experts(f"{prefix}mlp.", c, c["n_routed_experts"])
    shapes[f"{prefix}mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
    return shapes | mlp(f"{prefix}mlp.shared_experts.", hidden, inner * c["n_shared_experts"])


def tables(c: Config) -> Shapes:
    table = (c["vocab_size"], c["hidden_size"])
    shapes = {"model.embed_tokens.weight": table, "model.norm.weight": table[1:]}
    return shapes if c["tie_word_embeddings"] else shapes | {"lm_head.weight": table}


def target(c: Config) -> Shapes:
    """A whole target; Qwen3-Next's DeltaNet layers included."""
    shapes, every = tables(c), c.get("full_attention_interval")
    for i in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        if c["model_type"] == "deepseek_v3":
            shapes |= deepseek_layer(prefix, c, i)
            continue
        shapes |= layer(prefix, c)
        if every and (i + 1) % every:
            shapes = {n: s for n, s in shapes.items() if f"layers.{i}.self_attn." not in n}
            shapes |= delta_net(f"{prefix}linear_attn.", c)
    return shapes


def delta_net(prefix: str, c: Config) -> Shapes:
    heads, keys = c["linear_num_value_heads"], c["linear_num_key_heads"]
    values, key = heads * c["linear_value_head_dim"], keys * c["linear_key_head_dim"]
    channels, hidden = 2 * key + values, c["hidden_size"]
    rows = {"qkvz": channels + values, "ba": 2 * heads}
    if c["model_type"].startswith("qwen3_5"):
        rows = {"qkv": channels, "z": values, "b": heads, "a": heads}
    return {
        **{f"{prefix}in_proj_{name}.weight": (size, hidden) for name, size in rows.items()},
        f"{prefix}conv1d.weight": (channels, 1, c["linear_conv_kernel_dim"]),
        f"{prefix}dt_bias": (heads,),
        f"{prefix}A_log": (heads,),
        f"{prefix}norm.weight": (c["linear_value_head_dim"],),
        f"{prefix}out_proj.weight": (hidden, values),
    }


def eagle(c: Config) -> Shapes:
    """yuhuili/EAGLE-LLaMA3.1-Instruct-8B without its own embedding."""
    shapes = {"fc.weight": (c["hidden_size"], 2 * c["hidden_size"])}
    for i in range(c["num_hidden_layers"]):
        shapes |= layer(f"layers.{i}.", c, input_norm=i > 0)
    return shapes


def eagle_qwen3(c: Config) -> Shapes:
    """The seed text's Qwen3-MoE Eagle; dense with a dense config."""
    shapes = {"eh_proj.weight": (c["hidden_size"], 2 * c["hidden_size"])}
    shapes |= norms("", c, "e_norm", "h_norm", "norm")
    for i in range(c["num_hidden_layers"]):
        shapes |= layer(f"layers.{i}.", c)
    return shapes


def eagle3(c: Config, target_hidden: int, num_streams: int = 3) -> Shapes:
    """yuhuili/EAGLE3-LLaMA3.1-Instruct-8B without d2t and t2d."""
    hidden = c["hidden_size"]
    shapes = {"fc.weight": (hidden, num_streams * target_hidden)}
    shapes |= layer("midlayer.", c, width=2) | norms("midlayer.", c, "hidden_norm")
    for i in range(1, c["num_hidden_layers"]):
        shapes |= layer(f"layers.{i}.", c)
    shapes |= norms("", c, "norm")
    return shapes | {"lm_head.weight": (c["draft_vocab_size"], hidden)}


def qwen_mtp(c: Config) -> Shapes:
    """The mtp.* tensors of Qwen3-Next and Qwen3.5."""
    shapes = {"mtp.fc.weight": (c["hidden_size"], 2 * c["hidden_size"])}
    shapes |= norms("mtp.", c, "norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    count = c.get("num_nextn_predict_layers", c.get("mtp_num_hidden_layers", 1))
    for i in range(count):
        shapes |= layer(f"mtp.layers.{i}.", c)
    return shapes


def deepseek_mtp(c: Config) -> Shapes:
    """model.layers.<L>.* of DeepSeek-V3, its copies of the target's tables included."""
    hidden, shapes = c["hidden_size"], {}
    first = c["num_hidden_layers"]
    for number in range(first, first + c["num_nextn_predict_layers"]):
        prefix = f"model.layers.{number}."
        shapes |= deepseek_layer(prefix, c, number)
        shapes |= norms(prefix, c, "enorm", "hnorm", "shared_head.norm")
        shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        for name in ("embed_tokens", "shared_head.head"):
            shapes[f"{prefix}{name}.weight"] = (c["vocab_size"], hidden)
    return shapes


def ernie_mtp(c: Config) -> Shapes:
    hidden, shapes = c["hidden_size"], {}
    dense = c | {"model_type": "llama"}
    for i in range(c["num_nextn_predict_layers"]):
        shapes |= layer(f"model.mtp_block.{i}.", dense)
        shapes |= norms("model.", c, f"mtp_emb_norm.{i}", f"mtp_hidden_norm.{i}")
        shapes[f"model.mtp_linear_proj.{i}.weight"] = (hidden, 2 * hidden)
    return shapes


def random_state(shapes: Shapes, seed: int = 0, *, zero_centred: bool = False) -> dict[str, Tensor]:
    """Random fp32 tensors of sizes that make every part matter."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        state[name] = torch.randn(shape, generator=generator) * 0.3
        if "norm" in name and (not zero_centred or "linear_attn" in name):
            state[name] += 1
        if name.endswith("A_log"):
            state[name] = torch.rand(shape, generator=generator) * 4 - 3
    return state


def checkpoint(state: dict[str, Tensor]) -> Checkpoint:
    """An open checkpoint of tensors in memory."""
    return Checkpoint(
        Path("memory/model.safetensors"),
        {name: (tuple(t.shape), lambda t=t: t) for name, t in state.items()},
    )


def on_meta(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
