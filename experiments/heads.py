"""The Eagle head as training sees it: a target over packed rows, a head by its leaves' names."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models import layers
from specdec.models.axes import HeadAxes
from specdec.models.batch import Draft, Target
from specdec.models.eagle import EagleConfig, EagleHead, eagle_block, eagle_draft, init_head
from specdec.models.eagle_checkpoint import save_head, save_target_rows
from specdec.models.llama import llama_layer
from specdec.models.rope import inv_freq
from specdec.training.attention import row_attention
from specdec.training.packing import Row
from specdec.training.unroll import unroll


class TrainedHead(NamedTuple):
    """A head's functions over a mapping of its parameters by name."""

    config: EagleConfig
    params: dict[str, Tensor]  # fp32, by path in the tree: "fc", "layers.0.qkv", ...
    unroll: Callable[[Mapping[str, Tensor], Tensor, Row, int], Tensor]
    # (params, target hidden [T, H], row, steps) -> [K, T, H]
    draft: Callable[..., Draft]  # (params, *, d2t=None) -> Draft to decode with
    save: Callable[..., None]  # (folder, params, *, ranking=None)


def target_hidden(target: Target, row: Row) -> Tensor:
    """Features [T, H] of a packed row: the target's hidden states after its final norm."""
    config, params = target.config, target.params
    hidden = F.embedding(row.input_ids, target.embed)
    freq = inv_freq(config.rope, config.head_dim, hidden.device)
    scale = config.rope.attention_factor
    rotation = layers.rotary(freq, row.positions, hidden.dtype, scale)
    attention = partial(row_attention, row=row, scale=config.attention_scale)
    residual = None
    for layer in params.layers:
        hidden, residual = llama_layer(layer, config, hidden, residual, rotation, attention)
    return layers.rms_norm(hidden + residual, params.norm, config.rms_norm_eps)


def eagle_head(
    target: Target, *, seed: int = 0, num_layers: int = 1, start: Draft | None = None
) -> TrainedHead:
    """An Eagle head of the target's width, new or as `start` left it, its parameters in fp32.

    The target's embedding and lm_head are used and never written.
    """
    device, dtype = target.embed.device, target.embed.dtype
    if start is None:
        block = replace(target.config, num_layers=num_layers, tie_word_embeddings=False)
        config = EagleConfig(block, HeadAxes())
        tree = init_head(block, config.axes, seed=seed, device=device)
    else:
        config = start.config
        tree = layers.map_tree(lambda p: _plain(p).float(), start.params)
    names = leaf_names(tree)
    params = dict(zip(names, layers.tree_leaves(tree), strict=True))
    freq = inv_freq(config.block.rope, config.block.head_dim, device)

    def rebuild(values: Mapping[str, Tensor], dtype: torch.dtype) -> EagleHead:
        order = iter(names)
        return layers.map_tree(lambda _: values[next(order)].to(dtype), tree)

    def run(values: Mapping[str, Tensor], hidden: Tensor, row: Row, num_steps: int) -> Tensor:
        head = rebuild(values, dtype)

        def block(embeds, hidden, positions, attention, step):
            return eagle_block(head, config, embeds, hidden, positions, attention, step, freq)

        scale = config.block.attention_scale
        return unroll(block, target.embed, hidden, row, num_steps, scale)

    def draft(values: Mapping[str, Tensor], *, d2t: Tensor | None = None) -> Draft:
        detached = {name: value.detach() for name, value in values.items()}
        return eagle_draft(rebuild(detached, dtype), config, target, d2t=d2t)

    def save(
        folder: str | Path, values: Mapping[str, Tensor], *, ranking: Tensor | None = None
    ) -> None:
        detached = {name: value.detach() for name, value in values.items()}
        save_head(folder, rebuild(detached, torch.float32), config)
        if ranking is not None:
            save_target_rows(folder, ranking)

    return TrainedHead(config, params, run, draft, save)


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


def _plain(weight: Tensor) -> Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight
