"""The shapes of conf/shape made smaller, by family."""

from pathlib import Path
from typing import Any

import yaml

import specdec.conf

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 4}
MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen3_next": {
        **MOE,
        "shared_expert_intermediate_size": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
    },
    "deepseek": {
        "moe_intermediate_size": 16,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 8,
    },
}
HEADS = {
    "llama": ("llama_eagle3", {"aux_layers": (0, 1, 3)}),
    "qwen3": ("qwen3_eagle", {}),
    "qwen3_moe": ("qwen3_moe_eagle", {}),
    "qwen3_next": ("qwen3_next_mtp", {}),
    "deepseek": ("deepseek_mtp", {}),
}


def small_changes(family: str) -> dict[str, Any]:
    return SMALL | MORE[family]


def small_shape(family: str, vocab_size: int = 101) -> dict[str, Any]:
    """The settings of a small target's config.json."""
    file = Path(specdec.conf.__file__).parent / "shape" / f"{family}_tiny.yaml"
    settings = yaml.safe_load(file.read_text()) | small_changes(family)
    return settings | {"vocab_size": vocab_size, "eos_token_id": 2, "pad_token_id": 2}
