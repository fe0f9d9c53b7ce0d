"""GGUF files of the Llama architecture: metadata and tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.errors import CheckpointError

ARCHITECTURES = ("llama",)

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQ_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, read into the config


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The model's settings under the key names of a Hugging Face config.json.

    Raises CheckpointError on another architecture or a missing key, naming it.
    """
    fields, reader = metadata(path), _reader(path)
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{path.name}: architecture {arch!r} is not supported; known: {list(ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in fields:
            raise CheckpointError(f"{path.name}: metadata lacks {arch}.{key}")
        return fields[f"{arch}.{key}"]

    names = {tensor.name for tensor in reader.tensors}
    num_heads = need("attention.head_count")
    tokens = fields.get("tokenizer.ggml.tokens") or ()
    return {
        "model_type": arch,
        "vocab_size": fields.get(f"{arch}.vocab_size") or len(tokens),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": fields.get(f"{arch}.attention.key_length")
        or need("embedding_length") // num_heads,
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_parameters": _rope_parameters(fields, arch, reader),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


def gguf_tensors(path: Path) -> dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]:
    """Hugging Face name -> (shape, function that returns the dequantised tensor).

    llama.cpp stores q and k with each head's rows interleaved for its rotary kernel; here they
    are put back in halves.
    """
    config = read_gguf_config(path)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in _reader(path).tensors:
        if tensor.name == FREQ_FACTORS:
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))
        name, part = _hugging_face_name(tensor.name)
        tensors[name] = (shape, partial(_dequantise, tensor, heads.get(part)))
    return tensors


@lru_cache(maxsize=4)
def metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file."""
    return {name: field.contents() for name, field in _reader(path).fields.items()}


@lru_cache(maxsize=4)
def _reader(path: Path):
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error


def _hugging_face_name(name: str) -> tuple[str, str]:
    """(Hugging Face name, part of the block); an unknown name is kept, to be reported later."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name], ""
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in BLOCK:
        return f"model.layers.{pieces[1]}.{BLOCK[pieces[2]]}.{pieces[3]}", pieces[2]
    return name, ""


def _dequantise(tensor: Any, num_heads: int | None) -> Tensor:
    from gguf.quants import dequantize

    array = dequantize(tensor.data, tensor.tensor_type)
    if num_heads is not None:  # [heads, D / 2, 2, ...] -> [heads, 2, D / 2, ...]
        rows = array.shape[0]
        pairs = array.reshape(num_heads, rows // num_heads // 2, 2, *array.shape[1:])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _rope_parameters(fields: dict[str, Any], arch: str, reader: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": fields.get(f"{arch}.rope.freq_base", 10000.0)}
    for tensor in reader.tensors:
        if tensor.name == FREQ_FACTORS:
            factors = [float(x) for x in tensor.data]
            return {**rope, "rope_type": "freq_factors", "freq_factors": factors}
    kind = fields.get(f"{arch}.rope.scaling.type", "none")
    if kind != "none":
        rope["rope_type"] = kind
        rope["factor"] = fields.get(f"{arch}.rope.scaling.factor")
        original = fields.get(f"{arch}.rope.scaling.original_context_length")
        if original:
            rope["original_max_position_embeddings"] = original
    return rope


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same fp32: 9.999999747e-06 becomes 1e-05."""
    return float(str(np.float32(value)))
