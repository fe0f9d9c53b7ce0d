"""A stack of residual blocks, and the residual streams that a head may ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.batch import TargetOutput
from specdec.models.layers import Product, made

Block = Callable[[Tensor | Product, Tensor | None], tuple[Tensor | Product, Tensor]]
# (hidden, residual or None before the first block) -> (hidden, residual); their sum is the output
FinalNorm = Callable[[Tensor | Product, Tensor | None], tuple[Tensor, Tensor]]
# to (normed, summed)


def run_stack(
    blocks: Sequence[Block], hidden: Tensor, capture: Sequence[int], norm: FinalNorm
) -> TargetOutput:
    """Runs the blocks over `hidden` [T, H] (the embeddings).

    Args:
        capture: numbers of layers, each in 0..L (see `check_layer_ids`).
        norm: of the residual stream after the last block, see `layers.add_rms_norm`.

    Returns:
        The normed stream [T, H]; and, in the order asked for, the stream after that many blocks: 0
        is the embeddings, L what the norm is of.
    """
    residual: Tensor | None = None
    streams: dict[int, Tensor] = {}
    for index, block in enumerate(blocks):
        if index in capture:
            hidden = made(hidden)
            hidden, residual = hidden if residual is None else hidden + residual, None
            streams[index] = hidden
        hidden, residual = block(hidden, residual)
    normed, streams[len(blocks)] = norm(hidden, residual)
    return TargetOutput(normed, tuple(streams[index] for index in capture))


def check_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The ids as they are, when each names another boundary of a target of L layers.

    Id i means the residual stream after i layers, so L is the one after the last block. Raises
    CheckpointError on ids outside 0..L and on repeated ones.
    """
    listed = ", ".join(map(str, ids))
    fix = "set eagle_aux_hidden_state_layer_ids"
    for index in ids:
        if not 0 <= index <= num_layers:
            raise CheckpointError(
                f"auxiliary layer {index} of [{listed}] is not within 0..{num_layers}, the "
                f"boundaries of the target's {num_layers} layers; {fix}"
            )
    if len(set(ids)) != len(ids):
        raise CheckpointError(
            f"auxiliary layers [{listed}] repeat one (the target has {num_layers} layers); {fix}"
        )
    return tuple(ids)
