"""What a step costs at the least: its bytes and its products at the rates that a device shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specdec.models.batch import CacheShape, Draft, Target
from specdec.models.layers import tree_leaves

if TYPE_CHECKING:
    from specdec.build import Models

SIDE = 8192  # of the product that shows the matrix rate


def ceilings(device: torch.device) -> dict[str, float | None]:
    """Bytes read and bf16 operations a second, measured; None off a GPU."""
    if device.type != "cuda":
        return {"read_bytes_per_second": None, "operations_per_second": None}
    from specdec.kernels.bandwidth import read_bandwidth

    a, b = torch.randn(2, SIDE, SIDE, device=device, dtype=torch.bfloat16).unbind()
    best = float("inf")
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return {
        "read_bytes_per_second": read_bandwidth(),
        "operations_per_second": 2 * SIDE**3 / best,
    }


def floor_ms(
    models: Models,
    num_draft_tokens: int,
    batch: int,
    mean_len: float,
    limits: dict[str, float | None],
) -> float | None:
    """The larger of a step's bytes and its products at the device's rates.

    Weights are read once a pass (the head's K times, its feature layer once), keys and values once
    a pass; activations and logits are not counted. None for experts, whose reading depends on the
    routing, and where the rates were not measured.
    """
    bandwidth, rate = limits["read_bytes_per_second"], limits["operations_per_second"]
    if bandwidth is None or rate is None or getattr(models.target.config, "num_experts", 0):
        return None
    target = models.target
    num_bytes, num_weights = matrices(target.params, skip=target.embed)
    if target.lm_head is target.embed:
        num_bytes += size(target.embed)
        num_weights += target.embed.numel()
    rows = batch * (num_draft_tokens + 1)
    num_bytes += batch * mean_len * bytes_per_token(target)
    operations = 2.0 * rows * num_weights
    if models.draft is not None and num_draft_tokens:
        draft = models.draft
        once = draft.params.aux_fc
        block_bytes, block_weights = matrices(draft.params, skip=once)
        head = draft.logits_size * target.lm_head.shape[1]
        later = num_draft_tokens - 1
        head_bytes = head * target.embed.element_size()
        num_bytes += num_draft_tokens * (block_bytes + head_bytes)
        num_bytes += num_draft_tokens * batch * mean_len * bytes_per_token(draft)
        operations += 2.0 * (rows + batch * later) * block_weights
        operations += 2.0 * batch * num_draft_tokens * head
        if once is not None:
            num_bytes += size(once)
            operations += 2.0 * rows * once.numel()
    return max(num_bytes / bandwidth, operations / rate) * 1e3


def matrices(params: Any, skip: torch.Tensor | None) -> tuple[int, int]:
    """Bytes and weights of the matrices of a tree, each tensor once."""
    seen = {id(skip)}
    num_bytes = num_weights = 0
    for leaf in tree_leaves(params):
        if leaf.dim() < 2 or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        num_bytes += size(leaf)
        num_weights += leaf.numel()
    return num_bytes, num_weights


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bytes_per_token(model: Target | Draft) -> float:
    """Of the paged cache, in one block of it."""

    def total(num_blocks: int) -> int:
        shape = CacheShape(num_blocks, 16, 1, 1)
        return sum(size(leaf) for leaf in tree_leaves(model.new_cache(shape)))

    return (total(2) - total(1)) / 16
