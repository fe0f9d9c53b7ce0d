"""What the values of a config.json may be, whichever family reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import CheckpointError

AT_LEAST_ONE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
    *("n_group", "topk_group", "decoder_sparse_step", "full_attention_interval"),
)
NOT_NEGATIVE = (  # sizes of what a model need not have are among them
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "first_k_dense_replace"),
    *("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    *("draft_vocab_size", "target_hidden_size"),
)
NUMBERS = (
    *("rms_norm_eps", "routed_scaling_factor", "partial_rotary_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("original_max_position_embeddings", "mscale", "mscale_all_dim"),
)
ABOVE_ZERO = ("rope_theta", "factor")
SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "use_sliding_window"),
    *("norm_topk_prob", "rope_interleave", "norm_before_residual", "norm_output"),
    *("norm_before_fc", "fc_norm", "use_aux_hidden_state"),
)
NAME_LISTS = ("architectures", "layer_types")
INDEX_LISTS = ("mlp_only_layers", "eagle_aux_hidden_state_layer_ids")
OBJECTS = (
    *("rope_parameters", "rope_scaling", "text_config", "eagle_config"),
    *("transformer_layer_config", "quantization_config"),
)
NEVER_NULL = ("rms_norm_eps", "max_position_embeddings")  # what has a default when it is absent


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises CheckpointError naming the first value that is not of its key's kind.

    Null stands for an absent value, except where a family would take it for a number. Keys that no
    family reads are not looked at; objects are, at every depth.
    """
    for key, value in settings.items():
        if value is None:
            if key in NEVER_NULL:
                raise CheckpointError(f"{key}=null must be a number; give one, or leave it out")
            continue
        for keys, holds, what in KINDS:
            if key in keys and not holds(value):
                raise CheckpointError(f"{key}={value!r} must be {what}")
        if key in OBJECTS:
            check_settings(value)


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and value >= 0


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, of) for item in value)


KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (AT_LEAST_ONE, lambda v: _is_integer(v, 1), "a number: an integer of at least 1"),
    (NOT_NEGATIVE, lambda v: _is_integer(v, 0), "a number: an integer of at least 0"),
    (NUMBERS, _is_number, "a finite number of at least 0"),
    (ABOVE_ZERO, lambda v: _is_number(v) and v > 0, "a finite number above 0"),
    (SWITCHES, lambda v: v in (True, False), "true or false"),
    (NAME_LISTS, lambda v: _is_list(v, str), "a list of names"),
    (INDEX_LISTS, lambda v: _is_list(v, int), "a list of integers"),
    (OBJECTS, lambda v: isinstance(v, Mapping), "an object"),
)
