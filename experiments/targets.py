"""Targets as training sees them: packed rows without a cache, parameters by name, files to load."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import ConfigError
from specdec.models import deltanet, layers
from specdec.models.batch import Target, TargetOutput
from specdec.models.blocks import BLOCKS, Place
from specdec.models.capture import run_stack
from specdec.models.decoder import Block, DecoderParams, decoder_layout, final_norm
from specdec.models.deepseek import DeepseekConfig
from specdec.models.llama import LlamaConfig
from specdec.models.load import FAMILIES
from specdec.models.moe import ObserveFn
from specdec.models.parts import Part, map_parts, named_tensors, parts_of
from specdec.models.qwen3 import Qwen3Config
from specdec.models.qwen3_moe import Qwen3MoeConfig
from specdec.models.qwen3_next import QWEN3_NEXT, Qwen3NextConfig
from specdec.models.qwen3_next_checkpoint import qwen3_next_layout
from specdec.models.rope import inv_freq
from specdec.models.settings import check_settings
from specdec.training.attention import row_attention
from specdec.training.packing import Row

BLOCK_NAMES: dict[type, str] = {
    LlamaConfig: "llama",
    Qwen3Config: "qwen3",
    Qwen3MoeConfig: "qwen3_moe",
    Qwen3NextConfig: "qwen3_next",
    DeepseekConfig: "deepseek",
}  # in `blocks.BLOCKS`, by a target's config
STD = 0.02  # of fresh matrices
STEP_RANGE = (1e-3, 1e-1)  # of fresh DeltaNet steps, log-uniform
RATE_RANGE = (1.0, 16.0)  # of fresh DeltaNet decay rates


def block_name(config: Any) -> str:
    """Which of `blocks.BLOCKS` a target is made of."""
    return BLOCK_NAMES[type(config)]


def target_block(config: Any) -> Block:
    return QWEN3_NEXT if isinstance(config, Qwen3NextConfig) else BLOCKS[block_name(config)].block


def target_layout(config: Any) -> DecoderParams:
    """Where a checkpoint has each parameter of a target of any family."""
    if isinstance(config, Qwen3NextConfig):
        return qwen3_next_layout(config)
    block = BLOCKS[block_name(config)]
    places = (Place(f"model.layers.{i}.", i, True, False) for i in range(config.num_layers))
    return decoder_layout(config, [block.layout(config, place) for place in places])


def packed_forward(
    params: Any,
    config: Any,
    row: Row,
    capture: tuple[int, ...] = (),
    observe: ObserveFn | None = None,
) -> TargetOutput:
    """A target over a packed row: hidden [T, H] after the final norm, and the captured streams.

    Args:
        params: plain ones have gradients.
        observe: sees every routing of the layers with experts, in order.
    """
    block = target_block(config)
    hidden = F.embedding(row.input_ids, params.embed)
    freq = inv_freq(config.rope, config.rotary_dim, hidden.device)
    rotation = layers.rotary(freq, row.positions, hidden.dtype, config.rope.attention_factor)
    attention = partial(row_attention, row=row, scale=config.attention_scale)
    mixings: list[Callable] = [attention] * config.num_layers
    if isinstance(config, Qwen3NextConfig):
        recurrence = partial(deltanet.packed_texts, config.delta, row.cu_seqlens, row.max_len)
        mixings = [attention if full else recurrence for full in config.is_attention]
    watched = {} if observe is None else {"observe": observe}
    blocks = [
        partial(block.layer, layer, config, rotation=rotation, attention=mixing, **watched)
        for layer, mixing in zip(params.layers, mixings, strict=True)
    ]
    return run_stack(blocks, hidden, capture, final_norm(block, config, params.norm))


class TrainedTarget(NamedTuple):
    """A target's functions over a mapping of its parameters by name."""

    config: Any
    params: dict[str, Tensor]  # fp32, by path in the tree: "embed", "layers.0.qkv", ...
    tree: Callable[..., DecoderParams]  # (params, dtype) -> the tree, cast
    target: Callable[..., Target]  # (params, dtype, vocab_size) -> Target to decode with
    save: Callable[..., None]  # (folder, params, settings)


def new_target(
    settings: Mapping[str, Any], *, seed: int = 0, device: torch.device | str = "cpu"
) -> TrainedTarget:
    """A fresh target of the shape that a config.json describes.

    Raises:
        ConfigError: the family is not known.
    """
    family = FAMILIES.get(settings.get("model_type", ""))
    if family is None:
        raise ConfigError(
            f"shape.model_type={settings.get('model_type')!r} is not one of {', '.join(FAMILIES)}"
        )
    check_settings(settings)
    config = family.config(settings)
    layout = target_layout(config)
    fresh = init_params(config, layout, seed=seed)
    names = leaf_names(fresh)
    leaves = [leaf.to(device) for leaf in layers.tree_leaves(fresh)]
    params = dict(zip(names, leaves, strict=True))
    tied = layout.lm_head is None

    def tree(values: Mapping[str, Tensor], dtype: torch.dtype) -> DecoderParams:
        built = rebuild(fresh, layout, values, dtype)
        return built._replace(lm_head=built.embed) if tied else built

    @torch.no_grad()
    def target(values: Mapping[str, Tensor], dtype: torch.dtype, vocab_size: int) -> Target:
        return family.target(tree(values, dtype), config, vocab_size)

    def save(folder: str | Path, values: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        stored = rebuild(fresh, layout, values, torch.float32)
        save_target(folder, named_tensors(stored, layout), layout, settings)

    return TrainedTarget(config, params, tree, target, save)


def init_params(config: Any, layout: DecoderParams, *, seed: int = 0) -> DecoderParams:
    """Fresh fp32 parameters: output projections smaller with depth, the rest as the field does."""
    fresh = initialiser(config, torch.Generator().manual_seed(seed))

    def make(part: Part) -> Tensor:
        stacked = torch.cat([fresh(*item) for item in part.names.items()])
        if part.order is not None:
            stacked = stacked.index_select(0, part.order())
        return stacked.view(part.full_shape)

    return map_parts(make, layout)


def initialiser(
    config: Any, generator: torch.Generator
) -> Callable[[str, tuple[int, ...]], Tensor]:
    """(checkpoint name, shape) -> a fresh fp32 tensor on the generator's device."""
    neutral = 0.0 if isinstance(config, Qwen3NextConfig) else 1.0
    output_std = STD / math.sqrt(2 * config.num_layers)
    place = {"generator": generator, "device": generator.device}

    def uniform(shape: tuple[int, ...], low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, **place)

    def fresh(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("linear_attn.norm.weight"):
            return torch.ones(shape, device=generator.device)
        if "norm" in name:
            return torch.full(shape, neutral, device=generator.device)
        if name.endswith("A_log"):
            return uniform(shape, *RATE_RANGE).log()
        if name.endswith("dt_bias"):  # softplus of it is the step
            step = uniform(shape, *map(math.log, STEP_RANGE)).exp()
            return step + torch.log(-torch.expm1(-step))
        if name.endswith("conv1d.weight"):
            return uniform(shape, -1.0, 1.0) / math.sqrt(shape[-1])
        if name.endswith("bias"):
            return torch.zeros(shape, device=generator.device)
        outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
        std = output_std if name.endswith(outputs) else STD
        return torch.randn(shape, **place) * std

    return fresh


def save_target(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    layout: DecoderParams,
    settings: Mapping[str, Any],
) -> None:
    """Writes `model.safetensors` in bf16 (what a layout keeps in fp32 aside) and `config.json`."""
    from safetensors.torch import save_file

    own = {name: part.dtype for part in parts_of(layout) for name in part.names}
    stored = {
        name: tensor.detach().to("cpu", own[name] or torch.bfloat16, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**settings, "dtype": "bfloat16"}, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def leaf_names(tree: Any, prefix: str = "") -> list[str]:
    """Dotted paths of a parameter tree's tensors, in the order of `layers.tree_leaves`."""
    if isinstance(tree, Tensor):
        return [prefix.removesuffix(".")]
    if isinstance(tree, tuple):
        fields = getattr(tree, "_fields", range(len(tree)))
        return [
            name
            for field, item in zip(fields, tree, strict=True)
            for name in leaf_names(item, f"{prefix}{field}.")
        ]
    return []


def rebuild(tree: Any, layout: Any, values: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """`tree` with the tensors of `values`, cast to `dtype` where the layout names no other."""
    order = iter(zip(leaf_names(tree), parts_of(layout), strict=True))

    def take(_: Tensor) -> Tensor:
        name, part = next(order)
        return values[name].to(part.dtype or dtype)

    return layers.map_tree(take, tree)
