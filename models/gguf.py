"""GGUF files of the Llama architecture: metadata and tensors under their Hugging Face names."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

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


SCALARS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))  # GGUF type -> struct
STRING, ARRAY = 8, 9

Shape = tuple[int, ...]


class _Stored(NamedTuple):
    shape: Shape
    kind: Any  # gguf.GGMLQuantizationType
    rows: np.ndarray  # [..., bytes of a row] uint8


class _Header(NamedTuple):
    fields: dict[str, Any]
    tensors: dict[str, _Stored]


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The model's settings under the key names of a Hugging Face config.json.

    Raises CheckpointError on another architecture or a missing key, naming it.
    """
    fields, tensors = _header(path)
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{path.name}: architecture {arch!r} is not supported; known: {list(ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in fields:
            raise CheckpointError(f"{path.name}: metadata lacks {arch}.{key}")
        return fields[f"{arch}.{key}"]

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
        "rope_parameters": _rope_parameters(fields, arch, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


def gguf_tensors(path: Path) -> dict[str, tuple[Shape, Callable[[], Tensor]]]:
    """Hugging Face name -> (shape, function that returns the dequantised tensor).

    llama.cpp stores q and k with each head's rows interleaved for its rotary kernel; here they
    are put back in halves.
    """
    config = read_gguf_config(path)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for stored_name, tensor in _header(path).tensors.items():
        if stored_name == FREQ_FACTORS:
            continue
        name, part = _hugging_face_name(stored_name)
        tensors[name] = (tensor.shape, partial(_dequantise, tensor, heads.get(part)))
    return tensors


def metadata(path: Path) -> Mapping[str, Any]:
    """Every metadata key of the file."""
    return _header(path).fields


@lru_cache(maxsize=2)
def _header(path: Path) -> _Header:
    """Everything but the tensor data, which stays on disk (gguf's own reader takes seconds)."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(memoryview(data))
        if bytes(data[:4]) != b"GGUF" or cursor.number("xxxxI") not in (2, 3):
            raise ValueError("it does not start as GGUF version 2 or 3")
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        fields = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(num_fields)}
        described = [
            (cursor.string(), cursor.shape(), cursor.number("I"), cursor.number("Q"))
            for _ in range(num_tensors)
        ]
        alignment = fields.get("general.alignment", 32)
        start = -(-cursor.offset // alignment) * alignment
        tensors = {
            name: _stored(data, name, shape, kind, start + offset)
            for name, shape, kind, offset in described
        }
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from error
    return _Header(fields, tensors)


def _stored(data: np.ndarray, name: str, shape: Shape, kind: int, start: int) -> _Stored:
    import gguf

    kind = gguf.GGMLQuantizationType(kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = shape[-1] // block_size * block_bytes
    end = start + row_bytes * math.prod(shape[:-1])
    if end > data.size:
        raise ValueError(f"the file ends within {name}")
    return _Stored(shape, kind, data[start:end].reshape(*shape[:-1], row_bytes))


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: memoryview):
        self.data, self.offset = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        start = self.offset + 8
        self.offset = start + self.number("Q")
        return str(self.data[start : self.offset], "utf-8")

    def shape(self) -> Shape:
        return tuple(reversed([self.number("Q") for _ in range(self.number("I"))]))

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise ValueError(f"metadata type {kind} is unknown")
            return self.number(SCALARS[kind])
        item, count = self.number("I"), self.number("Q")
        return [self.value(item) for _ in range(count)]


def _hugging_face_name(name: str) -> tuple[str, str]:
    """(Hugging Face name, part of the block); an unknown name is kept, to be reported later."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name], ""
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in BLOCK:
        return f"model.layers.{pieces[1]}.{BLOCK[pieces[2]]}.{pieces[3]}", pieces[2]
    return name, ""


def _dequantise(tensor: _Stored, num_heads: int | None) -> Tensor:
    from gguf.quants import dequantize

    array = dequantize(tensor.rows, tensor.kind)
    if num_heads is not None:  # [heads, D / 2, 2, ...] -> [heads, 2, D / 2, ...]
        rows = array.shape[0]
        pairs = array.reshape(num_heads, rows // num_heads // 2, 2, *array.shape[1:])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _rope_parameters(
    fields: Mapping[str, Any], arch: str, tensors: Mapping[str, _Stored]
) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": fields.get(f"{arch}.rope.freq_base", 10000.0)}
    if FREQ_FACTORS in tensors:
        factors = _dequantise(tensors[FREQ_FACTORS], None).tolist()
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
