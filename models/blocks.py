"""The decoder blocks that a draft head can be made of, by the name in its axes.

A family of targets brings its block; here is what a head needs besides it: how a config.json and a
checkpoint describe such a block outside of a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from specdec.models import layers, llama, qwen3
from specdec.models.decoder import Block, paged_attentions
from specdec.models.llama_checkpoint import layer_parts, llama_config, llama_config_json
from specdec.models.parts import Part
from specdec.models.qwen3_checkpoint import layer_layout as qwen3_layer_layout
from specdec.models.qwen3_checkpoint import qwen3_config, qwen3_config_json


class HeadBlock(NamedTuple):
    """A decoder block as part of a head."""

    block: Block
    config: Callable[[Mapping[str, Any]], Any]  # config.json -> the block's config
    config_json: Callable[[Any], dict[str, Any]]  # and back
    layout: Callable[[Any, str, int, bool], Any]
    # (config, prefix, number in the whole model, has an input norm) -> the layer's layout
    norm: Callable[[Tensor, Tensor, float], Tensor] = layers.rms_norm  # all norms of the head
    zero_centred: bool = False  # a norm's neutral weight is 0, not 1


def head_block(name: str) -> HeadBlock:
    """The block of `HeadAxes.block`."""
    return BLOCKS[name]


def _llama_layout(config: Any, prefix: str, number: int, input_norm: bool) -> llama.LlamaLayer:
    parts = {field: Part(names) for field, names in layer_parts(config, prefix, input_norm).items()}
    return llama.LlamaLayer(*(parts.get(field) for field in llama.LlamaLayer._fields))


def _qwen3_layout(config: Any, prefix: str, number: int, input_norm: bool) -> qwen3.Qwen3Layer:
    return qwen3_layer_layout(config, prefix, input_norm)


LLAMA = Block(llama.llama_layer, paged_attentions, llama.new_cache, llama.pack_layer)

BLOCKS: dict[str, HeadBlock] = {
    "llama": HeadBlock(LLAMA, llama_config, llama_config_json, _llama_layout),
    "qwen3": HeadBlock(qwen3.QWEN3, qwen3_config, qwen3_config_json, _qwen3_layout),
}
