"""Ragged requests as rectangles, which the torch attention wants; the Triton kernels need none.

Requests of like query length stand next to each other in a plan (`length_class`), and each run of
them is padded to its longest query and its longest sequence.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.models.batch import AttentionGroup

_MAX_PADDING = 2.0  # a rectangle's longest sequence over its shortest
_MIN_REQUESTS = 32  # below which a rectangle is not worth splitting


class Rectangle(NamedTuple):
    """Consecutive requests, and the sizes that they are padded to."""

    num_requests: int
    max_query_len: int
    max_seq_len: int


def length_class(query_len: int) -> int:
    """Equal for queries that share a rectangle: all of up to 16 rows, else by powers of two."""
    return 4 if query_len <= 16 else (query_len - 1).bit_length()


def rectangles(query_lens: Sequence[int], seq_lens: Sequence[int]) -> tuple[Rectangle, ...]:
    """Split requests, in order, where padding would waste more than half."""
    made: list[Rectangle] = []
    start = 0
    for i in range(1, len(query_lens) + 1):
        ends = i == len(query_lens) or length_class(query_lens[i]) != length_class(
            query_lens[start]
        )
        if not ends and seq_lens[i] > _MAX_PADDING * seq_lens[start]:
            ends = i - start >= _MIN_REQUESTS
        if ends:
            made.append(Rectangle(i - start, max(query_lens[start:i]), max(seq_lens[start:i])))
            start = i
    return tuple(made)


def attention_groups(
    sizes: Sequence[Rectangle],
    query_start: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    block_size: int,
) -> tuple[AttentionGroup, ...]:
    """The rectangles of a step's rows.

    Args:
        sizes: of R requests together; none: no groups.
        query_start: [R + 1].
        positions: [T].
        block_tables: [R, M].
    """
    groups = []
    bounds = accumulate((size.num_requests for size in sizes), initial=0)
    for (_, max_query, max_seq), (start, end) in zip(sizes, pairwise(bounds), strict=True):
        first, past = query_start[start:end, None], query_start[start + 1 : end + 1, None]
        row = first + torch.arange(max_query, device=positions.device)
        query_index = torch.where(row < past, row, first)
        tables = block_tables[start:end, : -(-max_seq // block_size)]
        groups.append(attention_group(query_index, positions, tables, block_size))
    return tuple(groups)


def attention_group(
    query_index: Tensor, positions: Tensor, block_tables: Tensor, block_size: int
) -> AttentionGroup:
    """Causal visibility of each query's own sequence; position 0 is always visible, so that padding
    rows attend to something finite.

    Args:
        query_index: [g, q] rows of the batch.
        positions: [T].
        block_tables: [g, m].
    """
    key_positions = torch.arange(block_tables.shape[1] * block_size, device=positions.device)
    mask = key_positions[None, None, :] <= positions[query_index][:, :, None]
    return AttentionGroup(query_index, block_tables, mask)
