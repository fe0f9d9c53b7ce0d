"""The decoder blocks that a draft head can be made of, by the name in its axes.

A family of targets brings its block; here is what a head needs besides it: how a config.json and a
checkpoint describe layers that are not a target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from specdec.models.decoder import Block
from specdec.models.deepseek import DEEPSEEK
from specdec.models.deepseek_checkpoint import (
    deepseek_config,
    deepseek_config_json,
    deepseek_layer_layout,
)
from specdec.models.llama import LLAMA
from specdec.models.llama_checkpoint import layer_layout as llama_layer_layout
from specdec.models.llama_checkpoint import llama_config, llama_config_json
from specdec.models.qwen3 import QWEN3
from specdec.models.qwen3_checkpoint import layer_layout as qwen3_layer_layout
from specdec.models.qwen3_checkpoint import qwen3_config, qwen3_config_json
from specdec.models.qwen3_moe import QWEN3_MOE
from specdec.models.qwen3_moe_checkpoint import (
    moe_layer_layout,
    qwen3_moe_config,
    qwen3_moe_config_json,
)
from specdec.models.qwen3_next import QWEN3_NEXT_ATTENTION
from specdec.models.qwen3_next_checkpoint import layer_layout as qwen3_next_layer_layout
from specdec.models.qwen3_next_checkpoint import qwen3_next_config, qwen3_next_config_json


class Place(NamedTuple):
    """Where a layer of a head stands."""

    prefix: str  # of its checkpoint names, ends in a dot
    number: int  # counted through the target's layers
    input_norm: bool  # False: it takes its input as it is
    fused_experts: bool  # see `moe.experts_layout`


class HeadBlock(NamedTuple):
    """A decoder block as part of a head."""

    block: Block
    config: Callable[[Mapping[str, Any], int], Any]  # (config.json, layers) -> the block's config
    config_json: Callable[[Any], dict[str, Any]]  # and back
    layout: Callable[[Any, Place], Any]  # (config, place) -> where a checkpoint has the layer


def _counted(read: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any], int], Any]:
    return lambda settings, count: replace(read(settings), num_layers=count)


def _llama_layout(config: Any, place: Place) -> Any:
    return llama_layer_layout(config, place.prefix, place.input_norm)


def _qwen3_layout(config: Any, place: Place) -> Any:
    return qwen3_layer_layout(config, place.prefix, place.input_norm)


def _qwen3_moe_layout(config: Any, place: Place) -> Any:
    return moe_layer_layout(
        config,
        place.prefix,
        experts=config.has_experts(place.number),
        fused=place.fused_experts,
        input_norm=place.input_norm,
    )


def _qwen3_next_config(settings: Mapping[str, Any], count: int) -> Any:
    """Full attention in every layer; experts where the target's layers have them."""
    config = qwen3_next_config(settings)
    return replace(config, is_attention=(True,) * count, is_moe=(config.num_experts > 0,) * count)


def _qwen3_next_layout(config: Any, place: Place) -> Any:
    return qwen3_next_layer_layout(
        config,
        place.prefix,
        attention=True,
        moe=config.num_experts > 0,
        fused=place.fused_experts,
        input_norm=place.input_norm,
    )


def _deepseek_layout(config: Any, place: Place) -> Any:
    return deepseek_layer_layout(
        config,
        place.prefix,
        experts=config.has_experts(place.number),
        fused=place.fused_experts,
        input_norm=place.input_norm,
    )


BLOCKS: dict[str, HeadBlock] = {
    "llama": HeadBlock(LLAMA, _counted(llama_config), llama_config_json, _llama_layout),
    "qwen3": HeadBlock(QWEN3, _counted(qwen3_config), qwen3_config_json, _qwen3_layout),
    "qwen3_moe": HeadBlock(
        QWEN3_MOE, _counted(qwen3_moe_config), qwen3_moe_config_json, _qwen3_moe_layout
    ),
    "qwen3_next": HeadBlock(
        QWEN3_NEXT_ATTENTION,
        _qwen3_next_config,
        qwen3_next_config_json,
        _qwen3_next_layout,
    ),
    "deepseek": HeadBlock(
        DEEPSEEK, _counted(deepseek_config), deepseek_config_json, _deepseek_layout
    ),
}
