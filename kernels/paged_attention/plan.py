"""How one call of the attention kernel is cut, from shapes alone."""

from __future__ import annotations

from typing import NamedTuple

MAX_SPLITS = 32
MIN_SHARE = 96  # keys of a split: with fewer, adding up the splits takes longer than they save
ALONE = 8  # a call whose tiles fit the chip so many times leaves each all the room it can use
CROWDED = 3  # from so many programs a processor on, each needs fewer warps to keep memory busy


class Plan(NamedTuple):
    """The cut of a call."""

    tiles: int
    tiles_per_request: int  # 0: as many as its rows need
    rows: int  # lines of a tile, a power of two
    keys: int  # of one iteration, a power of two
    splits: int  # programs that share a tile's keys, a power of two
    num_warps: int
    num_stages: int


def plan_for(
    num_rows: int,
    num_requests: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    value_dim: int,
    max_keys: int,
    itemsize: int,
    num_processors: int,
) -> Plan:
    """Tiles, splits and pipeline of a call.

    Args:
        max_query_len: most rows of a request.
        max_keys: most keys of a request, M * block_size.
        itemsize: bytes of a number in the cache.
    """
    repeats = num_heads // num_kv_heads
    lines = min(max_query_len, num_rows) * repeats
    wide = value_dim > 128 or itemsize > 2
    rows = max(16, min(32 if wide else 64, (1 << (lines - 1).bit_length())))
    each = -(-lines // rows)
    tiles, ragged = num_requests * each, num_rows * repeats // rows + num_requests
    if ragged < tiles:
        tiles, each = ragged, 0
    # block ids come two stages before the keys that they place, so that 3 stages hold one
    # iteration's keys in waiting and 5 hold two
    keys, stages = (32, 5) if rows == 16 else (64, 3)
    share = MIN_SHARE
    if wide:
        keys, stages = 32, 2
    elif rows == 16 and tiles * num_kv_heads * ALONE <= num_processors:
        keys, stages, share = 128, 2, 256  # a text of a few hundred keys in one or two iterations
    splits = min(num_processors // (tiles * num_kv_heads), max_keys // share, MAX_SPLITS)
    splits = 1 << (max(splits, 1).bit_length() - 1)
    warps = 4 if rows * value_dim <= 64 * 128 else 8
    if rows == 16 and not wide and tiles * num_kv_heads >= num_processors * CROWDED:
        warps = 2
    return Plan(tiles, each, rows, keys, splits, warps, stages)
