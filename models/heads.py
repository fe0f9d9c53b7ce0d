"""Which head a checkpoint holds, and how to read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.axes import FAMILIES, HeadAxes, head_axes
from specdec.models.batch import Draft, Target
from specdec.models.checkpoint import Checkpoint
from specdec.models.eagle3 import eagle3_axes, eagle3_config, flat_settings
from specdec.models.eagle_checkpoint import eagle_config, plain_names, read_head
from specdec.models.head import EagleConfig
from specdec.models.mtp import mtp_config, mtp_tensors
from specdec.models.settings import check_settings

MODEL_TYPES = {
    "qwen3_next": "qwen3_next_mtp",
    "qwen3_5": "qwen_mtp",
    "deepseek": "deepseek_mtp",
    "ernie": "ernie_mtp",
}  # beginnings of the model_type of targets whose checkpoints may carry a head
ARCHITECTURES = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "qwen3nextmtp": "qwen3_next_mtp",
    "qwen3_5": "qwen_mtp",
    "deepseekmtp": "deepseek_mtp",
    "erniemtp": "ernie_mtp",
}  # parts of `architectures`, lower case, first match first


def detect_head(settings: Mapping[str, Any], checkpoint: Checkpoint) -> str:
    """The name in `FAMILIES` of the head in a checkpoint.

    By `speculators_model_type`, by `architectures` where they name a head, by the `model_type` of a
    target that carries one, else by what the tensors are (published Eagle heads call themselves
    LlamaForCausalLM). Raises CheckpointError when nothing fits.
    """
    declared = settings.get("speculators_model_type")
    if declared not in (None, "eagle", "eagle3"):
        raise CheckpointError(
            f"{checkpoint.path}: speculators_model_type={declared!r} is not supported; "
            "known: eagle, eagle3"
        )
    architecture = " ".join(settings.get("architectures") or ()).lower()
    found = declared or next((v for k, v in ARCHITECTURES.items() if k in architecture), None)
    kind = str(settings.get("model_type", "")).lower()
    if found is None:
        found = next((v for k, v in MODEL_TYPES.items() if kind.startswith(k)), None)
    names = plain_names(checkpoint)
    if found is None:
        found = _by_tensors(names)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.path} holds no draft head that is known (architectures="
            f"{settings.get('architectures')}, model_type={settings.get('model_type')}); "
            f"name its family: {', '.join(FAMILIES)}"
        )
    if found in FAMILIES:
        return found
    return f"{_block(architecture, kind, settings, names)}_{found}"


def read_draft(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    target: Target,
    *,
    family: str | None = None,
    axes: HeadAxes | Mapping[str, Any] | None = None,
    logits_from: str | None = None,
    num_draft_rows: int | None = None,
    ranking: Tensor | None = None,
) -> Draft:
    """The head of a checkpoint bound to its target; see `load.load_draft`."""
    settings = flat_settings(settings)
    name = family or detect_head(settings, checkpoint)
    if name not in FAMILIES:
        raise CheckpointError(f"unknown head family {name!r}; known: {', '.join(FAMILIES)}")
    method, row = FAMILIES[name].method, FAMILIES[name].axes
    try:
        if method == "eagle3":
            row = eagle3_axes(settings, row)
        row = axes if isinstance(axes, HeadAxes) else head_axes(axes or {}, row)
        if logits_from is not None:
            row = head_axes({"logits_from": logits_from}, row)
        config = head_config(settings, name, row, target)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    checkpoint = mtp_tensors(checkpoint, config) if method == "mtp" else plain_names(checkpoint)
    return read_head(
        checkpoint, settings, target, config, num_draft_rows=num_draft_rows, ranking=ranking
    )


def head_config(
    settings: Mapping[str, Any], family: str, axes: HeadAxes, target: Target
) -> EagleConfig:
    """The config of a head of a family in `FAMILIES`, from its flat config.json."""
    check_settings(settings)
    method = FAMILIES[family].method
    if method == "mtp":
        return mtp_config(settings, family, axes)
    if method == "eagle3":
        return eagle3_config(settings, family, axes, target)
    return eagle_config(settings, family, axes)


def _by_tensors(names: Checkpoint) -> str | None:
    if any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    if "fc.weight" in names:
        rows, columns = names.shape("fc.weight")
        return "eagle" if columns == 2 * rows else "eagle3"
    layer = {name for name in names if name.startswith("layers.0.")}
    unnormed = layer and "layers.0.input_layernorm.weight" not in layer
    return "eagle" if unnormed or "eh_proj.weight" in names else None


def _block(architecture: str, kind: str, settings: Mapping[str, Any], names: Checkpoint) -> str:
    """The family's word for the block of an Eagle or Eagle-3 head."""
    kind = str(settings.get("transformer_layer_config", {}).get("model_type", kind)).lower()
    if "llama" in architecture and "qwen3" not in architecture:
        qwen = "eh_proj.weight" in names
    else:
        qwen = "qwen3" in architecture or kind.startswith("qwen3")
    if not qwen:
        return "llama"
    sparse = any(".mlp.experts." in name for name in names)
    return "qwen3_moe" if sparse else "qwen3"
