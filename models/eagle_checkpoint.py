"""The published Eagle layout: a head read from it, and written to it.

`fc.weight [H, 2H]` (and `fc.bias`), `layers.N.{self_attn,mlp,post_attention_layernorm}`, optional
`embed_tokens.weight` and `lm_head.weight`, optional `d2t` (target id = i + d2t[i]) and `t2d`.
Beside it may lie `target_rows.safetensors`: one tensor `target_rows` [N] int32, target ids from the
most frequent down, any prefix of which is a reduced vocabulary over the target's own lm_head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError, ConfigError
from specdec.models.axes import EAGLE_LLAMA, HeadAxes
from specdec.models.batch import Draft, Target
from specdec.models.checkpoint import (
    SINGLE,
    Checkpoint,
    check_names,
    read_part,
    safetensors_file,
)
from specdec.models.eagle import EagleConfig, EagleHead, eagle_draft
from specdec.models.llama_checkpoint import (
    Parts,
    layer_parts,
    layer_tensors,
    llama_config,
    llama_config_json,
    read_layer,
)

TARGET_ROWS = "target_rows.safetensors"
OWN_EMBED, OWN_HEAD = "embed_tokens.weight", "lm_head.weight"


def head_parts(config: EagleConfig, fc_bias: bool) -> tuple[Parts, list[Parts]]:
    """Checkpoint tensors of an `EagleHead`: its own fields, then those of each layer."""
    hidden, axes = config.block.hidden_size, config.axes
    top: Parts = {"fc": {"fc.weight": (hidden, 2 * hidden)}}
    if fc_bias:
        top["fc_bias"] = {"fc.bias": (hidden,)}
    if axes.fusion == "norm_cat":
        top["embed_norm"] = {"embed_norm.weight": (hidden,)}
        top["hidden_norm"] = {"hidden_norm.weight": (hidden,)}
    if axes.final_norm:
        top["norm"] = {"norm.weight": (hidden,)}
    stack = [
        layer_parts(config.block, f"layers.{index}.", index > 0 or axes.first_input_norm)
        for index in range(config.block.num_layers)
    ]
    return top, stack


def read_eagle(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    target: Target,
    axes: HeadAxes,
    *,
    num_draft_rows: int | None = None,
    ranking: Tensor | None = None,
) -> Draft:
    """A head bound to its target; `ranking` as `read_target_rows` gives it.

    Own weights win, absent ones are shared with the target when the sizes match. Raises
    CheckpointError on anything missing, misshapen, unknown, or that cannot be shared.
    """
    checkpoint = _plain_names(checkpoint)
    where = checkpoint.path.parent
    config = EagleConfig(llama_config({**settings, "tie_word_embeddings": False}), axes)
    if config.block.hidden_size != target.embed.shape[1]:
        raise CheckpointError(
            f"{where}: the head's hidden_size={config.block.hidden_size} is not the target's "
            f"{target.embed.shape[1]}"
        )
    top, stack = head_parts(config, "fc.bias" in checkpoint)
    vocabulary, head_size = _vocabulary(checkpoint, settings, target, config)
    check_names(checkpoint, [top, *stack, vocabulary], ["d2t", "t2d"])

    device, dtype = target.embed.device, target.embed.dtype
    read = {field: read_part(checkpoint, names, device, dtype) for field, names in top.items()}
    head = EagleHead(
        fc=read["fc"],
        fc_bias=read.get("fc_bias"),
        embed_norm=read.get("embed_norm"),
        hidden_norm=read.get("hidden_norm"),
        layers=tuple(read_layer(checkpoint, parts, device, dtype) for parts in stack),
        norm=read.get("norm"),
    )
    own = {f: read_part(checkpoint, names, device, dtype) for f, names in vocabulary.items()}
    if axes.logits_from == "target_rows":
        d2t = _chosen_rows(checkpoint, ranking, num_draft_rows, target)
    else:
        d2t = _mapped_rows(checkpoint, head_size, target)
    marked = checkpoint["t2d"].nonzero().flatten() if "t2d" in checkpoint else d2t
    if d2t is not None and not torch.equal(marked, d2t):
        raise CheckpointError(f"{where}: t2d does not mark the ids that d2t lists")
    return eagle_draft(head, config, target, d2t=d2t, **own)


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
    of an own `lm_head`. Raises ConfigError when the head is not an Eagle of the published layout.
    """
    from safetensors.torch import save_file

    published = replace(config.axes, logits_from=EAGLE_LLAMA.logits_from)
    if published != EAGLE_LLAMA:
        raise ConfigError(f"the Eagle layout holds the axes {EAGLE_LLAMA}, not {config.axes}")
    if d2t is not None and lm_head is None:
        raise ConfigError("d2t belongs to an own lm_head; target rows are chosen by a ranking")
    top, stack = head_parts(config, head.fc_bias is not None)
    tensors = {name: getattr(head, field) for field, names in top.items() for name in names}
    for layer, parts in zip(head.layers, stack, strict=True):
        tensors |= layer_tensors(layer, parts)
    tensors |= {OWN_EMBED: embed} if embed is not None else {}
    tensors |= {OWN_HEAD: lm_head} if lm_head is not None else {}
    stored = {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    settings = llama_config_json(config.block) | {"bias": head.fc_bias is not None}
    if d2t is not None:
        stored["d2t"] = d2t.cpu() - torch.arange(d2t.numel())
        settings["draft_vocab_size"] = d2t.numel()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def read_target_rows(path: Path) -> Tensor | None:
    """The ranking beside a checkpoint, [N] int64 target ids, most frequent first; None without."""
    file = (path if path.is_dir() else path.parent) / TARGET_ROWS
    if not file.exists():
        return None
    tensors = safetensors_file(file)
    if list(tensors) != ["target_rows"]:
        raise CheckpointError(f"{file} must hold one tensor, target_rows, not {sorted(tensors)}")
    return tensors["target_rows"][1]().to(torch.int64)


def save_target_rows(path: str | Path, ranking: Tensor) -> None:
    """Writes a ranking of target ids, most frequent first, beside the checkpoint in `path`."""
    from safetensors.torch import save_file

    Path(path).mkdir(parents=True, exist_ok=True)
    save_file({"target_rows": ranking.to("cpu", torch.int32)}, Path(path) / TARGET_ROWS)


def _plain_names(checkpoint: Checkpoint) -> Checkpoint:
    """Names without `model.`, and `midlayer.` (Eagle-3's word) as `layers.0.`."""

    def plain(name: str) -> str:
        name = name.removeprefix("model.")
        return (
            f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name
        )

    return checkpoint.renamed(plain)


def _vocabulary(
    checkpoint: Checkpoint, settings: Mapping[str, Any], target: Target, config: EagleConfig
) -> tuple[Parts, int]:
    """Own tables as parts, and the rows of the head; checks that absent ones can be shared."""
    axes, hidden = config.axes, config.block.hidden_size
    where, widths = checkpoint.path.parent, (target.vocab_size, target.embed.shape[0])
    rows = int(settings.get("draft_vocab_size") or config.block.vocab_size)
    parts: Parts = {}
    for name, policy, size in (
        (OWN_EMBED, axes.embed, config.block.vocab_size),
        (OWN_HEAD, axes.lm_head, rows),
    ):
        label = name.removesuffix(".weight")
        if name in checkpoint:
            if policy == "shared":
                raise CheckpointError(f"{where} has its own {name}, but the axis {label} is shared")
            if name == OWN_HEAD and axes.logits_from == "target_rows":
                raise CheckpointError(
                    f"{where} has its own {name}, which logits_from=target_rows would ignore; "
                    "use logits_from=shared"
                )
            field = "embed" if name == OWN_EMBED else "lm_head"
            parts[field] = {name: (size, hidden)}
            if name == OWN_EMBED and size < target.vocab_size:
                raise CheckpointError(
                    f"{where}: {name} has {size} rows for a target of {target.vocab_size} ids"
                )
        elif size not in widths and not (name == OWN_HEAD and axes.logits_from == "target_rows"):
            raise CheckpointError(
                f"{where} lacks {name}, and the target's of {widths[1]} rows cannot stand in for "
                f"{size}" + ("; use logits_from=target_rows" if name == OWN_HEAD else "")
            )
    return parts, rows


def _mapped_rows(checkpoint: Checkpoint, rows: int, target: Target) -> Tensor | None:
    """Absolute target ids of the checkpoint's `d2t`, or None when draft ids are target ids."""
    if "d2t" not in checkpoint:
        return None
    offsets = checkpoint["d2t"].to(torch.int64)
    where = checkpoint.path.parent
    if offsets.shape != (rows,):
        raise CheckpointError(f"{where}: d2t has {offsets.numel()} entries for {rows} draft ids")
    return _increasing(offsets + torch.arange(rows), target, f"{where}: d2t")


def _chosen_rows(
    checkpoint: Checkpoint, ranking: Tensor | None, num_rows: int | None, target: Target
) -> Tensor:
    """Absolute target ids, increasing: the checkpoint's d2t, or the first of the ranking."""
    where = checkpoint.path.parent
    if "d2t" in checkpoint:
        rows = checkpoint["d2t"].to(torch.int64)
        rows = rows + torch.arange(rows.numel())
        if num_rows not in (None, rows.numel()):
            raise CheckpointError(
                f"{where}: num_draft_rows={num_rows}, but its d2t lists {rows.numel()} rows"
            )
    elif ranking is None:
        raise CheckpointError(
            f"logits_from=target_rows needs d2t or {TARGET_ROWS} in {where}; use logits_from=shared"
        )
    else:
        ranking = ranking[(ranking >= 0) & (ranking < target.vocab_size)]
        if num_rows is not None and not 0 < num_rows <= ranking.numel():
            raise CheckpointError(
                f"num_draft_rows={num_rows} is not within the {ranking.numel()} ids that "
                f"{where / TARGET_ROWS} ranks"
            )
        rows = ranking[:num_rows].sort().values
    return _increasing(rows, target, f"{where}: the draft vocabulary")


def _increasing(rows: Tensor, target: Target, what: str) -> Tensor:
    ordered = bool((rows[1:] > rows[:-1]).all()) and rows.numel() > 0
    if not ordered or rows[0] < 0 or rows[-1] >= target.lm_head.shape[0]:
        raise CheckpointError(f"{what} must list increasing ids of the target, one each")
    return rows
