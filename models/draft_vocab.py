"""A draft head's tables: its own, or shared with the target, whole or some rows of it.

`d2t` holds offsets: draft id i stands for target id i + d2t[i]; `t2d` marks those target ids.
Beside a checkpoint may lie `target_rows.safetensors`: one tensor `target_rows` [N] int32, target
ids from the most frequent down, any prefix of which is a reduced vocabulary over the target's own
lm_head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.axes import HeadAxes
from specdec.models.batch import Target
from specdec.models.checkpoint import Checkpoint, safetensors_file
from specdec.models.parts import Part, part

TARGET_ROWS = "target_rows.safetensors"
OWN_EMBED, OWN_HEAD = "embed_tokens.weight", "lm_head.weight"


class OwnTables(NamedTuple):
    """Where the checkpoint has its own tables; None: the target's are shared."""

    embed: Part | None
    lm_head: Part | None


def own_tables(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    target: Target,
    axes: HeadAxes,
    vocab_size: int,
    hidden_size: int,
) -> tuple[OwnTables, int]:
    """Own tables, and the rows of the head.

    Raises CheckpointError for an own table that the axes exclude, and for an absent one in whose
    place the target's cannot stand.
    """
    where, (width, target_hidden) = checkpoint.path.parent, target.embed.shape
    rows = int(settings.get("draft_vocab_size") or vocab_size)
    picked = axes.logits_from == "target_rows"
    parts: list[Part | None] = []
    for name, policy, size in (
        (OWN_EMBED, axes.embed, vocab_size),
        (OWN_HEAD, axes.lm_head, rows),
    ):
        own = name in checkpoint
        parts.append(part(name, size, hidden_size) if own else None)
        if own and policy == "shared":
            label = name.removesuffix(".weight")
            raise CheckpointError(f"{where} has its own {name}, but the axis {label} is shared")
        if own and name == OWN_HEAD and picked:
            raise CheckpointError(
                f"{where} has its own {name}, which logits_from=target_rows would ignore; "
                "use logits_from=shared"
            )
        if own and name == OWN_EMBED and size < target.vocab_size:
            raise CheckpointError(
                f"{where}: {name} has {size} rows for a target of {target.vocab_size} ids"
            )
        if own or policy == "shared":
            continue
        if hidden_size != target_hidden:
            raise CheckpointError(
                f"{where} lacks {name}, and the target's of width {target_hidden} cannot stand in "
                f"for {hidden_size}"
            )
        if size not in (target.vocab_size, width) and not (name == OWN_HEAD and picked):
            raise CheckpointError(
                f"{where} lacks {name}, and the target's of {width} rows cannot stand in for "
                f"{size}" + ("; use logits_from=target_rows" if name == OWN_HEAD else "")
            )
    return OwnTables(*parts), rows


def draft_ids(
    checkpoint: Checkpoint,
    target: Target,
    axes: HeadAxes,
    head_size: int,
    *,
    num_draft_rows: int | None,
    ranking: Tensor | None,
) -> Tensor | None:
    """Target id of each draft id, increasing [V_draft] int64; None when they are the same ids."""
    if axes.logits_from == "target_rows":
        ids = _chosen_rows(checkpoint, ranking, num_draft_rows, target)
    else:
        ids = _mapped_rows(checkpoint, head_size, target)
    if "t2d" in checkpoint:
        listed = torch.arange(head_size) if ids is None else ids
        if not torch.equal(checkpoint["t2d"].nonzero().flatten(), listed):
            raise CheckpointError(
                f"{checkpoint.path.parent}: t2d does not mark the ids that d2t lists"
            )
    return ids


def read_target_rows(path: Path) -> Tensor | None:
    """The ranking beside a checkpoint, [N] int64 target ids, most frequent first; None without."""
    file = (path if path.is_dir() else path.parent) / TARGET_ROWS
    if not file.exists():
        return None
    tensors = safetensors_file(file)
    if list(tensors) != ["target_rows"]:
        raise CheckpointError(f"{file} must hold one tensor, target_rows, not {sorted(tensors)}")
    shape, read = tensors["target_rows"]
    if len(shape) != 1 or shape[0] == 0:
        raise CheckpointError(f"{file}: target_rows is {list(shape)}, not a list of ids")
    return read().to(torch.int64)


def save_target_rows(path: str | Path, ranking: Tensor) -> None:
    """Writes a ranking of target ids, most frequent first, beside the checkpoint in `path`."""
    from safetensors.torch import save_file

    Path(path).mkdir(parents=True, exist_ok=True)
    save_file({"target_rows": ranking.to("cpu", torch.int32)}, Path(path) / TARGET_ROWS)


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
