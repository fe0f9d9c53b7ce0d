"""The parameters of a draft head: their tree, where a checkpoint has them, and fresh ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.models.axes import EAGLE_LLAMA, FAMILIES, HeadAxes, HeadNames
from specdec.models.blocks import BLOCKS, Place
from specdec.models.parts import Part, map_parts, part

ZEROED = ("o_proj.weight", "down_proj.weight", "down_proj", "bias")  # a fresh block adds nothing


@dataclass(frozen=True)
class EagleConfig:
    block: Any  # the config of the axes' block; num_layers of them; vocab_size is the embedding's
    axes: HeadAxes = EAGLE_LLAMA
    family: str = "llama_eagle"  # which checkpoint names, of `axes.FAMILIES`
    first_layer: int = 0  # number of the head's first layer in the whole model
    aux_layers: tuple[int, ...] = ()  # boundaries of the target whose streams are the features
    aux_size: int = 0  # their width each, the target's hidden size


class EagleHead(NamedTuple):
    """A head's own parameters: all that is trained and exported besides an own vocabulary.

    `fc` to `norm` are one tensor, or a tuple of one a layer where the axes say depth_owns=all.
    """

    fc: Any  # [H, 2 H]; None with fusion wide
    fc_bias: Any
    embed_norm: Any  # [H]; None with fusion cat
    hidden_norm: Any  # [H]; None with fusion cat
    layers: tuple[Any, ...]  # of the axes' block
    norm: Any  # [H]; None without a final norm
    aux_fc: Tensor | None = None  # [H, A * H_target]
    aux_norm: Any = None  # [A * H_target] jointly, or A of [H_target]


def owned(field: Any, layer: int) -> Any:
    """The layer's own tensor of a field that has one a layer, else the one that all share."""
    return field[layer] if isinstance(field, tuple) else field


def head_layout(
    config: EagleConfig, *, fc_bias: bool = False, fused_experts: bool = False
) -> EagleHead:
    """Where a checkpoint has a head's parameters: a tree of parts."""
    axes, block, names = config.axes, config.block, FAMILIES[config.family].names
    hidden, wide = block.hidden_size, config.axes.fusion == "wide"

    def own(name: str, *shape: int) -> Any:
        """One part, or one a layer."""
        count = block.num_layers if axes.depth_owns == "all" else 1
        made = tuple(
            part(f"{name.format(i=i, n=config.first_layer + i)}", *shape) for i in range(count)
        )
        return made if axes.depth_owns == "all" else made[0]

    normed = axes.fusion != "cat"
    aux = axes.input_features == "aux"
    aux_width = len(config.aux_layers) * config.aux_size
    return EagleHead(
        fc=None if wide else own(f"{names.fc}.weight", hidden, 2 * hidden),
        fc_bias=own(f"{names.fc}.bias", hidden) if fc_bias and not wide else None,
        embed_norm=own(f"{names.embed_norm}.weight", hidden) if normed else None,
        hidden_norm=own(f"{names.hidden_norm}.weight", hidden) if normed else None,
        layers=tuple(
            _layer_layout(config, names, i, fused_experts) for i in range(block.num_layers)
        ),
        norm=own(f"{names.norm}.weight", hidden) if axes.final_norm else None,
        aux_fc=part(f"{names.aux_fc}.weight", hidden, aux_width) if aux else None,
        aux_norm=_aux_norm_layout(config, names),
    )


def repeated_names(config: EagleConfig) -> list[str]:
    """Tables of the target that a checkpoint of the family may hold once more."""
    return [
        f"{name.format(i=i, n=config.first_layer + i)}.weight"
        for name in FAMILIES[config.family].names.repeated
        for i in range(config.block.num_layers)
    ]


def init_head(
    block: Any,
    axes: HeadAxes = EAGLE_LLAMA,
    *,
    aux_layers: tuple[int, ...] = (),
    aux_size: int = 0,
    first_layer: int = 0,
    seed: int = 0,
    std: float = 0.02,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> EagleHead:
    """A head to train, `block.num_layers` deep, whose first logits are the target's own head's.

    fc = [0 | I] passes the hidden state on (the last auxiliary stream, where there are several),
    and zero output projections make the block add nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    neutral_norm = float(not BLOCKS[axes.block].block.zero_centred)

    def fresh(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return torch.full(shape, neutral_norm)
        if name.endswith(ZEROED):
            return torch.zeros(shape)
        return torch.randn(shape, generator=generator) * std

    def make(described: Part) -> Tensor:
        stacked = torch.cat([fresh(*item) for item in described.names.items()])
        return stacked.view(described.full_shape).to(device, described.dtype or dtype)

    def pass_last(described: Part) -> Tensor:
        rows, columns = described.full_shape
        eye = torch.cat((torch.zeros(rows, columns - rows), torch.eye(rows)), dim=1)
        return eye.to(device, dtype)

    layout = head_layout(
        EagleConfig(block, axes, first_layer=first_layer, aux_layers=aux_layers, aux_size=aux_size)
    )
    head = map_parts(make, layout)._replace(fc=map_parts(pass_last, layout.fc))
    if aux_size == block.hidden_size:
        head = head._replace(aux_fc=map_parts(pass_last, layout.aux_fc))
    return head


def _layer_layout(config: EagleConfig, names: HeadNames, index: int, fused_experts: bool) -> Any:
    axes, block = config.axes, config.block
    number = config.first_layer + index
    prefix = names.layer.format(i=index, n=number)
    wide = axes.fusion == "wide" and index == 0
    input_norm = not wide and (index > 0 or axes.first_input_norm)
    place = Place(prefix, number, input_norm, fused_experts)
    layout = BLOCKS[axes.block].layout(block, place)
    if names.interleaved:
        return layout._replace(qkv=replace(layout.qkv, order=partial(_halves, block)))
    if not wide:
        return layout
    widened = {name: (rows, 2 * columns) for name, (rows, columns) in layout.qkv.names.items()}
    return layout._replace(qkv=Part(widened))


def _halves(block: Any) -> Tensor:
    """Rows of q, k, v with the rotary pairs of each q and k head brought to its halves."""
    heads, kv_heads, size = block.num_heads, block.num_kv_heads, block.head_dim
    rows = torch.arange((heads + 2 * kv_heads) * size).view(-1, size // 2, 2)
    rotated = rows[: heads + kv_heads].transpose(1, 2).flatten()
    return torch.cat((rotated, rows[heads + kv_heads :].flatten()))


def _aux_norm_layout(config: EagleConfig, names: HeadNames) -> Any:
    joint, each = names.aux_norms
    count, size = len(config.aux_layers), config.aux_size
    if config.axes.aux_norm == "joint":
        return part(f"{joint}.weight", count * size)
    if config.axes.aux_norm == "each":
        return tuple(part(f"{each.format(j=j)}.weight", size) for j in range(count))
    return None
