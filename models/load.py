"""Models from checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.errors import CheckpointError
from specdec.models.axes import HeadAxes
from specdec.models.batch import Draft, Target
from specdec.models.checkpoint import (
    Checkpoint,
    as_dtype,
    open_checkpoint,
    read_config,
    resolve_path,
)
from specdec.models.deepseek import deepseek_target
from specdec.models.deepseek_checkpoint import deepseek_config, load_deepseek_params
from specdec.models.draft_vocab import OWN_HEAD, read_target_rows
from specdec.models.heads import read_draft
from specdec.models.llama import llama_target
from specdec.models.llama_checkpoint import llama_config, load_llama_params
from specdec.models.quantize import quantising
from specdec.models.qwen3 import qwen3_target
from specdec.models.qwen3_checkpoint import load_qwen3_params, qwen3_config
from specdec.models.qwen3_moe import qwen3_moe_target
from specdec.models.qwen3_moe_checkpoint import load_qwen3_moe_params, qwen3_moe_config
from specdec.models.qwen3_next import qwen3_next_target
from specdec.models.qwen3_next_checkpoint import load_qwen3_next_params, qwen3_next_config
from specdec.models.settings import check_settings
from specdec.models.tokenizer import real_vocab_size

__all__ = [
    "CheckpointError",
    "as_dtype",
    "build_target",
    "load_draft",
    "load_target",
    "open_checkpoint",
    "read_config",
    "resolve_path",
]


class Family(NamedTuple):
    """What a target family gives to its loader."""

    architecture: str
    config: Callable[[Mapping[str, Any]], Any]
    params: Callable[[Checkpoint, Any, torch.device | str, torch.dtype], Any]  # layers packed
    target: Callable[[Any, Any, int | None], Target]


AUTO_ROWS = 8192  # target rows that logits_from=auto drafts over

FAMILIES = {
    "llama": Family("LlamaForCausalLM", llama_config, load_llama_params, llama_target),
    "qwen3": Family("Qwen3ForCausalLM", qwen3_config, load_qwen3_params, qwen3_target),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qwen3_moe_config, load_qwen3_moe_params, qwen3_moe_target
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", deepseek_config, load_deepseek_params, deepseek_target
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", qwen3_next_config, load_qwen3_next_params, qwen3_next_target
    ),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        qwen3_next_config,
        load_qwen3_next_params,
        qwen3_next_target,
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM", qwen3_next_config, load_qwen3_next_params, qwen3_next_target
    ),
}


def load_target(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    family: str | None = None,
    vocab_size: int | None = None,
    quantize: str = "none",
) -> Target:
    """Loads a target model.

    Args:
        path: see `resolve_path`.
        family: overrides the config's model_type; one of `FAMILIES`.
        vocab_size: real ids; by default counted in tokenizer.json, else the config's.
        quantize: what the matrices of its layers are kept in, one of `quantize.KINDS`.

    Raises:
        CheckpointError: nothing there, another family, a tensor missing, misshapen or unknown.
    """
    return build_target(
        open_checkpoint(path),
        read_config(path),
        device=device,
        dtype=dtype,
        family=family,
        vocab_size=vocab_size or real_vocab_size(resolve_path(path)),
        quantize=quantize,
    )


def build_target(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    family: str | None = None,
    vocab_size: int | None = None,
    quantize: str = "none",
) -> Target:
    """`load_target` from an open checkpoint and the settings of its config.json."""
    known = FAMILIES[family_of(settings, family, checkpoint.path)]
    method = (settings.get("quantization_config") or {}).get("quant_method")
    if method not in (None, "fp8"):
        raise CheckpointError(
            f"{checkpoint.path}: quant_method={method!r} is not supported; known: 'fp8' in blocks"
        )
    try:
        check_settings(settings)
        config = known.config(settings)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    with quantising(quantize):
        params = known.params(checkpoint, config, device, as_dtype(dtype))
    return known.target(params, config, min(vocab_size or config.vocab_size, config.vocab_size))


def family_of(settings: Mapping[str, Any], family: str | None, where: Any) -> str:
    """The family's name in `FAMILIES`: as asked, by `model_type`, else `architectures`."""
    name = family or settings.get("model_type")
    if name is None:
        declared = settings.get("architectures") or ()
        known = (name for name, family in FAMILIES.items() if family.architecture in declared)
        return next(known, "llama")
    if name not in FAMILIES:
        options = ", ".join(map(repr, FAMILIES))
        raise CheckpointError(f"{where}: family {name!r} is not supported; known: {options}")
    return name


def load_draft(
    path: str | Path,
    target: Target,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    family: str | None = None,
    logits_from: str = "shared",
    num_draft_rows: int | None = None,
    axes: HeadAxes | Mapping[str, Any] | None = None,
) -> Draft:
    """Loads a draft head: Eagle, Eagle-3, or the MTP layers that a target's checkpoint carries.

    Args:
        path: of the head's checkpoint, or of the target's own where that holds the head.
        device, dtype: must be the target's when given; the head reads its hidden states.
        family: a name in `axes.FAMILIES`; None: as `heads.detect_head` finds.
        logits_from: "shared": the checkpoint's own lm_head, else the target's;
            "target_rows": a reduced vocabulary over rows of the target's lm_head;
            "auto": target_rows where a ranking lies beside a head without its own lm_head.
        num_draft_rows: with target_rows, how many of the stored ranking's first ids (None: all;
            with auto at most 8192, which costs 1% of acceptance and most of the head's time less).
        axes: changes to the family's row of `axes`, or a whole row.

    Raises:
        CheckpointError: no head, another family's, or a tensor that is missing, misshapen, unknown
            or not shareable.
    """
    where = resolve_path(path)
    for name, mine, theirs in (
        ("device", device and torch.device(device).type, target.embed.device.type),
        ("dtype", dtype and as_dtype(dtype), target.embed.dtype),
    ):
        if mine and mine != theirs:
            raise CheckpointError(f"the draft's {name} {mine} differs from the target's {theirs}")
    checkpoint = open_checkpoint(where)
    ranking = read_target_rows(where) if logits_from in ("auto", "target_rows") else None
    if logits_from == "auto":
        picked = ranking is not None and OWN_HEAD not in checkpoint
        logits_from = "target_rows" if picked else "shared"
        if picked and num_draft_rows is None:
            num_draft_rows = min(AUTO_ROWS, len(ranking))
    if logits_from == "shared" and num_draft_rows is not None:
        raise CheckpointError(
            f"{where}: num_draft_rows={num_draft_rows} are of the target's lm_head, which is not "
            "reduced here; leave it null, or use logits_from=target_rows"
        )
    return read_draft(
        checkpoint,
        read_config(where),
        target,
        family=family,
        axes=axes,
        logits_from=logits_from,
        num_draft_rows=num_draft_rows,
        ranking=ranking if logits_from == "target_rows" else None,
    )
