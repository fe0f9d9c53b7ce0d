"""Multi-token prediction heads: layers that a checkpoint carries past its target's last one.

Qwen3-Next and Qwen3.5 have them as `mtp.*`, DeepSeek-V3 as `model.layers.<L>.*` on from the
target's L layers, Ernie as `model.mtp_*`. They lie in the target's own checkpoint, or alone. Their
embedding and lm_head are always the target's; where the file repeats one, it is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import CheckpointError
from specdec.models.axes import FAMILIES, HeadAxes
from specdec.models.blocks import BLOCKS
from specdec.models.checkpoint import Checkpoint
from specdec.models.head import EagleConfig

ERNIE = "model.mtp_"


def mtp_config(settings: Mapping[str, Any], family: str, axes: HeadAxes) -> EagleConfig:
    """The config of the head that goes with a target's config.json."""
    settings = {**settings, **(settings.get("text_config") or {})}
    names = FAMILIES[family].count_keys
    count = next((settings[name] for name in names if settings.get(name) is not None), 1)
    if count < 1:
        raise CheckpointError(f"config.json says {names[0]}={count}: the checkpoint has no head")
    if family == "ernie_mtp":
        bias = bool(settings.get("use_bias", False))
        settings |= {"attention_bias": bias, "mlp_bias": bias}
    block = BLOCKS[axes.block].config(settings, count)
    return EagleConfig(block, axes, family, first_layer=settings.get("num_hidden_layers", 0))


def mtp_tensors(checkpoint: Checkpoint, config: EagleConfig) -> Checkpoint:
    """The head's part of a checkpoint."""
    first = config.first_layer

    def mine(name: str) -> bool:
        if config.family == "deepseek_mtp":
            number = name.removeprefix("model.layers.").partition(".")[0]
            return name.startswith("model.layers.") and number.isdigit() and int(number) >= first
        return name.startswith(ERNIE if config.family == "ernie_mtp" else "mtp.")

    return checkpoint.only(mine)
