"""A draft head of any family as training sees it: over packed rows, its parameters by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.experiments.targets import block_name, leaf_names, packed_forward, rebuild
from specdec.models import layers
from specdec.models.axes import FAMILIES, head_axes
from specdec.models.batch import Draft, Target, TargetOutput
from specdec.models.capture import check_layer_ids
from specdec.models.eagle import (
    EagleConfig,
    EagleHead,
    eagle_block,
    eagle_draft,
    features,
    init_head,
)
from specdec.models.eagle_checkpoint import save_head, save_target_rows
from specdec.models.head import head_layout
from specdec.models.qwen3_next import Qwen3NextConfig
from specdec.models.rope import inv_freq
from specdec.training.packing import Row
from specdec.training.unroll import unroll

LM_HEAD = "lm_head"  # name of an own vocabulary's matrix among the parameters
BY_BLOCK = {
    "llama": "llama_eagle",
    "qwen3": "qwen3_eagle",
    "qwen3_moe": "qwen3_moe_eagle",
    "qwen3_next": "qwen3_next_mtp",
    "deepseek": "deepseek_mtp",
}  # the head of a target's block, where none is named


class TrainedHead(NamedTuple):
    """A head's functions over a mapping of its parameters by name."""

    config: EagleConfig
    params: dict[str, Tensor]  # fp32, by path in the tree: "fc", "layers.0.qkv", ...
    unroll: Callable[[Mapping[str, Tensor], TargetOutput, Row, int], Tensor]
    # (params, the target's output over the row, row, steps) -> [K, T, H]
    lm_head: Callable[[Mapping[str, Tensor]], Tensor | None]  # own matrix [V_draft, H], cast
    draft: Callable[..., Draft]  # (params, *, d2t=None) -> Draft to decode with
    save: Callable[..., None]  # (folder, params, *, ranking=None, d2t=None)


@torch.no_grad()
def target_output(target: Target, row: Row, aux_layers: tuple[int, ...] = ()) -> TargetOutput:
    """What a target gives to its head over a packed row: hidden [T, H] after the final norm, and
    the auxiliary streams."""
    return packed_forward(target.params, target.config, row, aux_layers)


def head_config(
    target: Target,
    family: str | None = None,
    *,
    num_layers: int = 1,
    aux_layers: tuple[int, ...] | None = None,
    axes: Mapping[str, Any] | None = None,
) -> EagleConfig:
    """The config of a new head of the target's width.

    Args:
        family: a name in `axes.FAMILIES`; None: the usual one of the target's block.
        aux_layers: of Eagle-3; None: (2, L // 2, L - 3).
        axes: changes to the family's row.

    Raises:
        ConfigError: no such family, or its block is not the target's.
        CheckpointError: the auxiliary layers are not boundaries of the target.
    """
    config, own = target.config, block_name(target.config)
    name = family or BY_BLOCK[own]
    if name not in FAMILIES:
        raise ConfigError(f"draft.family={name} is not one of {', '.join(FAMILIES)}")
    row = head_axes(axes or {}, FAMILIES[name].axes)
    if row.block != own:
        raise ConfigError(
            f"draft.family={name} is made of {row.block} blocks and the target of {own} ones; "
            f"use {BY_BLOCK[own]}, or set draft.axes.block={own}"
        )
    if row.depth_rule == "cycle" and num_layers > 1:
        raise ConfigError(
            f"head.num_layers={num_layers}: layers that take turns (draft.family={name}) are "
            "trained one at a time; use 1"
        )
    changes: dict[str, Any] = {"tie_word_embeddings": False}
    if isinstance(config, Qwen3NextConfig):
        changes |= {
            "is_attention": (True,) * num_layers,
            "is_moe": (config.num_experts > 0,) * num_layers,
        }
    else:
        changes["num_layers"] = num_layers
    block = replace(config, **changes)
    first_layer = config.num_layers if FAMILIES[name].method == "mtp" else 0
    if row.input_features == "last_hidden":
        if aux_layers is not None:
            raise ConfigError(
                f"head.aux_layers={list(aux_layers)} are of Eagle-3 heads, and draft.family={name} "
                "reads the last hidden state alone; leave it null"
            )
        return EagleConfig(block, row, name, first_layer)
    count = config.num_layers
    ids = (2, count // 2, count - 3) if aux_layers is None else tuple(aux_layers)
    return EagleConfig(
        block, row, name, first_layer, check_layer_ids(ids, count), target.embed.shape[1]
    )


def trained_head(
    target: Target,
    config: EagleConfig | None = None,
    *,
    seed: int = 0,
    start: Draft | None = None,
    num_rows: int | None = None,
    ranking: Tensor | None = None,
) -> TrainedHead:
    """A head, new or as `start` left it, its parameters in fp32.

    The target's embedding and lm_head are used and never written. An embedding of `start`'s own is
    used in the target's place, kept as it is and saved with the head.

    Args:
        config: of a new head; None: `head_config`'s default.
        num_rows: size of an own lm_head over the first ids of `ranking`, which is trained too and
            begins as the target's rows; None: the target's lm_head is used. Not with `start`.
    """
    device, dtype = target.embed.device, target.embed.dtype
    own_head: Tensor | None = None
    own_embed = own_embedding(start, target)
    embed = target.embed if own_embed is None else own_embed
    if start is None:
        config = config or head_config(target)
        tree = init_head(
            config.block,
            config.axes,
            aux_layers=config.aux_layers,
            aux_size=config.aux_size,
            first_layer=config.first_layer,
            seed=seed,
            device=device,
        )
        if num_rows is not None:
            own_head = target.lm_head[own_ids(ranking, num_rows).to(device)].float()
    else:
        config = start.config
        tree = layers.map_tree(lambda p: layers.unpack(p).float(), start.params)
        if config.axes.logits_from == "shared":
            own_head = own_lm_head(start, target)
    layout = head_layout(config, fc_bias=tree.fc_bias is not None)
    params = dict(zip(leaf_names(tree), layers.tree_leaves(tree), strict=True))
    if own_head is not None:
        params[LM_HEAD] = own_head.contiguous()
    block = config.block
    freq = inv_freq(block.rope, block.rotary_dim, device)

    def build(values: Mapping[str, Tensor], dtype: torch.dtype) -> EagleHead:
        return rebuild(tree, layout, values, dtype)

    def lm_head(values: Mapping[str, Tensor]) -> Tensor | None:
        return values[LM_HEAD].to(dtype) if LM_HEAD in values else None

    def run(values: Mapping[str, Tensor], out: TargetOutput, row: Row, num_steps: int) -> Tensor:
        head = build(values, dtype)

        def one_pass(embeds, hidden, positions, attention, step):
            return eagle_block(head, config, embeds, hidden, positions, attention, step, freq)

        hidden = features(head, config, out)
        return unroll(one_pass, embed, hidden, row, num_steps, block.attention_scale)

    @torch.no_grad()
    def draft(values: Mapping[str, Tensor], *, d2t: Tensor | None = None) -> Draft:
        built = build(values, dtype)
        own = {"embed": own_embed, "lm_head": lm_head(values)}
        return eagle_draft(built, config, target, **own, d2t=d2t)

    @torch.no_grad()
    def save(
        folder: str | Path,
        values: Mapping[str, Tensor],
        *,
        ranking: Tensor | None = None,
        d2t: Tensor | None = None,
    ) -> None:
        own = values.get(LM_HEAD)
        save_head(
            folder,
            build(values, torch.float32),
            config,
            embed=own_embed,
            lm_head=own,
            d2t=None if own is None else d2t,
        )
        if ranking is not None and own is None:
            save_target_rows(folder, ranking)

    return TrainedHead(config, params, run, lm_head, draft, save)


def own_embedding(draft: Draft | None, target: Target) -> Tensor | None:
    """A head's own table [V, H]; None where it is the target's."""
    if draft is None or draft.embed is None or torch.equal(draft.embed, target.embed):
        return None
    return draft.embed


def own_lm_head(draft: Draft, target: Target) -> Tensor | None:
    """A head's own lm_head [V_draft, H] in fp32; None where it is the target's.

    Raises ConfigError for one of other ids than the target's that no map names.
    """
    hidden = draft.config.block.hidden_size
    unit = torch.eye(hidden, device=target.embed.device, dtype=target.embed.dtype)
    own = draft.logits(unit, 0)
    if draft.vocab_map is None:
        if own.shape[1] == len(target.lm_head) and torch.equal(own, target.logits(unit)):
            return None
        if own.shape[1] != target.vocab_size:
            raise ConfigError(
                f"the head's own lm_head has {own.shape[1]} rows and the target "
                f"{target.vocab_size} ids; it cannot be trained further"
            )
    return own.T.float()


def own_ids(ranking: Tensor | None, num_rows: int) -> Tensor:
    """The most frequent ids in increasing order: [V_draft] int64."""
    if ranking is None or not 0 < num_rows <= len(ranking):
        have = 0 if ranking is None else len(ranking)
        raise ConfigError(f"head.num_rows={num_rows} must be from 1 to the {have} ids of the data")
    return ranking[:num_rows].sort().values
