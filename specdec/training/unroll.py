"""Training-time test (EAGLE-3, arXiv 2503.01840): the head unrolled on its own hidden states."""

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.models.batch import DraftOutput
from specdec.training.attention import unrolled_attention
from specdec.training.packing import Row

Block = Callable[[Tensor, Tensor, Tensor, Callable, int], DraftOutput]
# (embeds [T, H], hidden [T, H], positions [T], attention_fn, step) -> DraftOutput


def unroll(
    block: Block, embed: Tensor, hidden: Tensor, row: Row, num_steps: int, scale: float
) -> Tensor:
    """Every column's draft chain at once, on the text's own tokens.

    Column p at step k takes what the chain that starts after column p takes at its k-th draft: the
    hidden that step k - 1 recycled in column p (the target's, at step 0) and the id of column
    p + 1 + k, at position p + k; it predicts the id of column p + 2 + k. A chain that counts has
    only right tokens before it, so the text's tokens stand in for the drafted ones. Columns whose
    tokens lie past their document give numbers that no label reaches.

    Args:
        block: one pass of the head with its attention as an argument; the attention function takes
            (query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D], layer).
        embed: [V, H] token embeddings.
        hidden: [T, H] the target's features.
        scale: of the attention scores.

    Returns:
        [K, T, H], what the lm_head takes at each step.
    """
    keys: dict[int, list[Tensor]] = defaultdict(list)
    values: dict[int, list[Tensor]] = defaultdict(list)

    def attention(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        keys[layer].append(key)
        values[layer].append(value)
        return unrolled_attention(query, keys[layer], values[layer], row, scale)

    outputs = []
    for step in range(num_steps):
        ids = F.pad(row.input_ids[1 + step :], (0, 1 + step))
        out = block(F.embedding(ids, embed), hidden, row.positions + step, attention, step)
        outputs.append(out.for_logits)
        hidden = out.recycle
    return torch.stack(outputs)
