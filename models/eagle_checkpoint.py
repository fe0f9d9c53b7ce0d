"""Checkpoints of draft heads: a head read from one, and written to one.

The published Eagle layout is `fc.weight [H, 2H]` (and `fc.bias`), `layers.N.{self_attn,mlp,
post_attention_layernorm}`, optional `embed_tokens.weight` and `lm_head.weight`, optional `d2t` and
`t2d`; other families' names are in `axes.FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError, ConfigError
from specdec.models.axes import FAMILIES, HeadAxes
from specdec.models.batch import Draft, Target
from specdec.models.blocks import BLOCKS
from specdec.models.checkpoint import SINGLE, Checkpoint
from specdec.models.draft_vocab import (
    OWN_EMBED,
    OWN_HEAD,
    draft_ids,
    own_tables,
    read_target_rows,
    save_target_rows,
)
from specdec.models.eagle import eagle_draft
from specdec.models.head import EagleConfig, EagleHead, head_layout, repeated_names
from specdec.models.moe import has_fused_experts
from specdec.models.parts import check_layout, named_tensors, parts_of, read_layout

SPELLINGS = (
    ("midlayer.", "layers.0."),  # yuhuili/EAGLE3-*
    ("transformer.", "layers.0."),  # vllm-project/speculators, Eagle
    ("fusion_fc.", "fc."),
)

__all__ = ["eagle_config", "read_head", "read_target_rows", "save_head", "save_target_rows"]


def eagle_config(settings: Mapping[str, Any], family: str, axes: HeadAxes) -> EagleConfig:
    """The config of a head with a config.json of its own."""
    settings = {**settings, "tie_word_embeddings": False}
    if settings.get("num_hidden_layers") is None:
        raise CheckpointError("config.json lacks 'num_hidden_layers'")
    block = BLOCKS[axes.block].config(settings, settings["num_hidden_layers"])
    return EagleConfig(block, axes, family)


def plain_names(checkpoint: Checkpoint) -> Checkpoint:
    """The names of Eagle heads in one spelling: without `model.`, other words as `SPELLINGS` has
    them."""

    def plain(name: str) -> str:
        name = name.removeprefix("model.")
        for other, own in SPELLINGS:
            if name.startswith(other):
                return own + name.removeprefix(other)
        return name

    return checkpoint.renamed(plain)


def read_head(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    target: Target,
    config: EagleConfig,
    *,
    num_draft_rows: int | None = None,
    ranking: Tensor | None = None,
) -> Draft:
    """A head bound to its target; `ranking` as `read_target_rows` gives it.

    Own weights win, absent ones are shared with the target when the sizes match. Raises
    CheckpointError on anything missing, misshapen, unknown, or that cannot be shared.
    """
    where, axes, block = checkpoint.path.parent, config.axes, config.block
    if axes.input_features == "last_hidden" and block.hidden_size != target.embed.shape[1]:
        raise CheckpointError(
            f"{where}: the head's hidden_size={block.hidden_size} is not the target's "
            f"{target.embed.shape[1]}; give the head of this target (model=NAME sets both)"
        )
    layout = head_layout(
        config,
        fc_bias=f"{FAMILIES[config.family].names.fc}.bias" in checkpoint,
        fused_experts=has_fused_experts(checkpoint),
    )
    tables, head_size = own_tables(
        checkpoint, settings, target, axes, block.vocab_size, block.hidden_size
    )
    repeated = repeated_names(config)
    check_layout(checkpoint, (layout, tables), [*repeated, "d2t", "t2d"])
    _check_repeated(checkpoint, repeated, target)

    device, dtype = target.embed.device, target.embed.dtype
    head = read_layout(checkpoint, layout, device, dtype)
    own = read_layout(checkpoint, tables, device, dtype)
    d2t = draft_ids(
        checkpoint, target, axes, head_size, num_draft_rows=num_draft_rows, ranking=ranking
    )
    return eagle_draft(head, config, target, embed=own.embed, lm_head=own.lm_head, d2t=d2t)


def save_head(
    path: str | Path,
    head: EagleHead,
    config: EagleConfig,
    *,
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
    d2t: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a head of plain tensors as `model.safetensors` and `config.json` in folder `path`.

    Tensors shared with the target are not passed and so not written. `d2t` are absolute target ids
    of an own `lm_head`. Raises ConfigError when the head's axes are not its family's.
    """
    from safetensors.torch import save_file

    check_published(config)
    if d2t is not None and lm_head is None:
        raise ConfigError("d2t belongs to an own lm_head; target rows are chosen by a ranking")
    layout = head_layout(config, fc_bias=head.fc_bias is not None)
    tensors = named_tensors(head, layout)
    tensors |= {OWN_EMBED: embed} if embed is not None else {}
    tensors |= {OWN_HEAD: lm_head} if lm_head is not None else {}
    own_dtypes = {name: part.dtype for part in parts_of(layout) for name in part.names}
    stored = {
        name: tensor.detach().to("cpu", own_dtypes.get(name) or dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    settings = head_settings(config) | {"bias": head.fc_bias is not None}
    if d2t is not None:
        stored["d2t"] = d2t.cpu() - torch.arange(d2t.numel())
        settings["draft_vocab_size"] = d2t.numel()
    if FAMILIES[config.family].method == "eagle3":
        stored = {_first_as_midlayer(name): tensor for name, tensor in stored.items()}
        if d2t is not None:
            marked = torch.zeros(config.block.vocab_size, dtype=torch.bool)
            stored["t2d"] = marked.index_fill(0, d2t.cpu(), True)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def check_published(config: EagleConfig) -> None:
    """Raises ConfigError unless the family's config.json can say what the axes are."""
    family = FAMILIES[config.family]
    told = {"logits_from": family.axes.logits_from}
    if family.method == "eagle3":
        told |= {name: getattr(family.axes, name) for name in ("residual", "recycle", "aux_norm")}
    axes = replace(config.axes, **told)
    for field in fields(axes):
        value, fixed = getattr(axes, field.name), getattr(family.axes, field.name)
        if value != fixed:
            raise ConfigError(
                f"the {config.family} layout holds heads with {field.name}={fixed}, not {value}"
            )


def head_settings(config: EagleConfig) -> dict[str, Any]:
    """The config.json of a head's own checkpoint."""
    family, axes = FAMILIES[config.family], config.axes
    settings = BLOCKS[axes.block].config_json(config.block)
    if config.family != "llama_eagle":  # published as a LlamaForCausalLM
        settings["architectures"] = [family.architecture]
    if family.method == "mtp":  # the other numbers are the target's
        settings.pop("layer_types", None)
        settings["num_hidden_layers"] = config.first_layer or config.block.num_layers
        settings[family.count_keys[0]] = config.block.num_layers
    if family.method == "eagle3":
        settings |= {
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
            "target_hidden_size": config.aux_size,
            "norm_before_residual": axes.residual == "normed",
            "norm_output": axes.recycle == "post_norm",
            "norm_before_fc": axes.aux_norm == "joint",
            "fc_norm": axes.aux_norm == "each",
        }
    return settings


def _first_as_midlayer(name: str) -> str:
    rest = name.removeprefix("layers.0.")
    return name if rest == name else f"midlayer.{rest}"


def _check_repeated(checkpoint: Checkpoint, names: list[str], target: Target) -> None:
    """A table that is the target's own must have its shape."""
    width, hidden = target.embed.shape
    for name in names:
        if name not in checkpoint:
            continue
        rows, columns = checkpoint.shape(name)
        if columns != hidden or rows < target.vocab_size:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is [{rows}, {columns}], but it repeats the target's "
                f"table of {[width, hidden]}"
            )
