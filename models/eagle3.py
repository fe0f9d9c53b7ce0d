"""Eagle-3 (arXiv 2503.01840): a head on several of the target's residual streams.

Its features are fc(cat(streams)); its first block's q, k, v read cat[input_layernorm(embedding),
hidden_norm(hidden)], and the residual is the hidden as it is; it is recycled before the final norm,
and its own lm_head covers a reduced vocabulary. Layout of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B:
`midlayer.*` (or `layers.0.*`), `fc.weight [H, 3H]`, `norm.weight`, `lm_head.weight [V_draft, H]`,
`d2t`, `t2d`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.errors import CheckpointError
from specdec.models.axes import HeadAxes
from specdec.models.batch import Target
from specdec.models.blocks import BLOCKS
from specdec.models.capture import check_layer_ids
from specdec.models.head import EagleConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def eagle3_axes(settings: Mapping[str, Any], base: HeadAxes) -> HeadAxes:
    """The row that a config.json describes; its switches may also lie in its `eagle_config`."""

    def on(name: str, default: bool = False) -> bool:
        return bool(_setting(settings, name, default))

    if on("norm_before_fc") and on("fc_norm"):
        raise CheckpointError("config.json has both norm_before_fc and fc_norm; a head has one")
    aux_norm = "joint" if on("norm_before_fc") else "each" if on("fc_norm") else "none"
    uses_aux = on("use_aux_hidden_state", True)
    # speculators' config class writes the switch; where it is missing its engines read it as on
    normed = on("norm_before_residual", "speculators_model_type" in settings)
    return replace(
        base,
        residual="normed" if normed else "hidden",
        recycle="post_norm" if on("norm_output") else "pre_norm",
        input_features="aux" if uses_aux else "last_hidden",
        aux_norm=aux_norm if uses_aux else "none",
    )


def aux_layer_ids(settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The boundaries of a target of L layers whose streams feed the head.

    Id i is the residual stream after i layers (0: the embeddings; L: after the last block, before
    the final norm), so ids are transformers' indices into `hidden_states`, L aside. As listed, at
    top level or in `eagle_config`; by default (2, L // 2, L - 3). Published checkpoints count in
    two ways, some with ids one higher: what a config lists is taken as it stands. Raises
    CheckpointError on repeated ids and on ids that the target does not have.
    """
    ids = _setting(settings, LAYER_IDS, None)
    if ids:
        return check_layer_ids([int(index) for index in ids], num_layers)
    try:
        return check_layer_ids((2, num_layers // 2, num_layers - 3), num_layers)
    except CheckpointError as error:
        raise CheckpointError(f"the default (2, L // 2, L - 3) does not fit: {error}") from error


def eagle3_config(
    settings: Mapping[str, Any], family: str, axes: HeadAxes, target: Target
) -> EagleConfig:
    """The config of a head for this target."""
    settings = {**settings, "tie_word_embeddings": False}
    block = BLOCKS[axes.block].config(settings, settings.get("num_hidden_layers", 1))
    if axes.input_features == "last_hidden":
        return EagleConfig(block, axes, family)
    width = target.embed.shape[1]
    told = _setting(settings, "target_hidden_size", None) or width
    if told != width:
        raise CheckpointError(
            f"the head is for a target of hidden size {told}, and the target's is {width}"
        )
    ids = aux_layer_ids(settings, target.config.num_layers)
    return EagleConfig(block, axes, family, aux_layers=ids, aux_size=width)


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A `speculators` config.json with its `transformer_layer_config` at top level."""
    layer = settings.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        return dict(settings)
    own = {k: v for k, v in settings.items() if k not in ("transformer_layer_config", "model_type")}
    return {**layer, **own}


def _setting(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    nested = settings.get("eagle_config") or {}
    for place in (settings, nested):
        if place.get(name) is not None:
            return place[name]
    return default
