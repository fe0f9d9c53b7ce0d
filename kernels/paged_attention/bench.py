"""Attention of an 8B model's layer and of latent heads: decoding rows, prefill, and both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, cycle
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.bench import Case
from specdec.kernels.paged_attention.kernel import paged_attention
from specdec.kernels.paged_attention.plan import Plan
from specdec.kernels.paged_attention.reference import AttentionGroup, fold_groups, folded_attention

BLOCK_SIZE = 16
COLD_BYTES = 200 * 2**20  # caches in turn, so that no keys are found in the 50 MB of cache
TABLE_KEYS = 512  # that a block table has room for, or as many as the longest request needs


class Heads(NamedTuple):
    query: int
    key: int
    dim: int
    value_dim: int
    shared: bool = False  # the values are columns of the keys


LLAMA = Heads(32, 8, 128, 128)
LATENT_16 = Heads(16, 1, 576, 512, shared=True)
LATENT_128 = Heads(128, 1, 576, 512, shared=True)
Rows = list[tuple[int, int]]  # (rows of the step, keys before them) a request


def cases(device: torch.device) -> list[Case]:
    """Bytes are the visible keys and values, read once, and the rows; torch is the baseline."""
    made = []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        made.append(case(f"8B, {batch} x 4 rows, 128-400 keys", LLAMA, decoding(batch), device))
    for batch in (1, 64):
        rows = decoding(batch, num_rows=1)
        made.append(case(f"8B, {batch} x 1 row, 128-400 keys", LLAMA, rows, device))
    made.append(case("8B, 1 x 4 rows, 8192 keys", LLAMA, [(4, 8188)], device))
    made.append(case("8B, 64 x 4 rows, 2048 keys", LLAMA, [(4, 2044)] * 64, device))
    made.append(case("8B, prefill of 16 x 128", LLAMA, [(128, 0)] * 16, device))
    made.append(case("8B, prefill of 2 x 4096", LLAMA, [(4096, 0)] * 2, device))
    mixed = [*decoding(31), (128, 0)]
    made.append(case("8B, 31 x 4 rows and a prefill of 128", LLAMA, mixed, device))
    for heads in (LATENT_16, LATENT_128):
        for batch in (1, 64):
            name = f"latent, {heads.query} heads, {batch} x 2 rows, 128-400 keys"
            made.append(case(name, heads, decoding(batch, num_rows=2), device))
    return made


def decoding(batch: int, num_rows: int = 4) -> Rows:
    """Requests of as many rows each, with 128 to 400 keys."""
    return [(num_rows, 124 + 272 * index // max(batch - 1, 1)) for index in range(batch)]


def case(
    name: str, heads: Heads, rows: Rows, device: torch.device, plan: Plan | None = None
) -> Case:
    """One call's time, cut by `plan`; `rows` of each request."""
    counts = [count for count, _ in rows]
    lens = [count + before for count, before in rows]
    width = -(-max(TABLE_KEYS, *lens) // BLOCK_SIZE)
    needed = [-(-length // BLOCK_SIZE) for length in lens]
    num_blocks = sum(needed) + 1
    order = iter((torch.randperm(num_blocks - 1) + 1).tolist())
    tables = torch.zeros(len(rows), width, dtype=torch.int64)
    for index, count in enumerate(needed):
        tables[index, :count] = torch.tensor([next(order) for _ in range(count)])
    positions = torch.cat([torch.arange(before, before + count) for count, before in rows])
    batch = {
        "positions": positions.to(device),
        "query_start": torch.tensor([0, *accumulate(counts)], device=device),
        "seq_lens": torch.tensor(lens, device=device),
        "block_tables": tables.to(device),
    }

    def cache(dim: int) -> Tensor:
        shape = (num_blocks, BLOCK_SIZE, heads.key, dim)
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    size = num_blocks * BLOCK_SIZE * heads.key * heads.dim * (2 if heads.shared else 4)
    caches = []
    for _ in range(min(64, -(-COLD_BYTES // size))):
        keys = cache(heads.dim)
        caches.append((keys, None if heads.shared else cache(heads.value_dim)))
    shape = (len(positions), heads.query, heads.dim)
    query = torch.randn(shape, device=device, dtype=torch.bfloat16)
    scale = heads.dim**-0.5
    run = partial(
        paged_attention,
        query,
        max_query_len=max(counts),
        scale=scale,
        value_dim=heads.value_dim,
        plan=plan,
        **batch,
    )
    widths = heads.dim if heads.shared else heads.dim + heads.value_dim
    num_bytes = 2 * sum(lens) * heads.key * widths
    num_bytes += query.nbytes // heads.dim * (heads.dim + heads.value_dim)
    return Case(name, _in_turn(run, caches), num_bytes, _baseline(query, caches, heads, batch))


def _baseline(
    query: Tensor, caches: list[tuple[Tensor, Tensor | None]], heads: Heads, batch: dict
) -> Callable[[], object] | None:
    """torch's attention over gathered blocks, where requests have as many rows each."""
    num_requests = len(batch["seq_lens"])
    num_rows, longest = len(query) // num_requests, int(batch["seq_lens"].max())
    if (batch["query_start"].diff() != num_rows).any() or num_rows * longest > 2**20:
        return None
    num_blocks = -(-longest // BLOCK_SIZE)
    keys = torch.arange(num_blocks * BLOCK_SIZE, device=query.device)
    index = torch.arange(len(query), device=query.device).view(num_requests, -1)
    mask = keys <= batch["positions"].view(num_requests, -1, 1)
    group = AttentionGroup(index, batch["block_tables"][:, :num_blocks], mask)
    folded = fold_groups([group], len(query), heads.query, heads.key, query.dtype)

    def run(key_cache: Tensor, value_cache: Tensor | None) -> Tensor:
        if value_cache is None:
            value_cache = key_cache[..., : heads.value_dim]
        return folded_attention(query, key_cache, value_cache, folded, heads.dim**-0.5)

    return _in_turn(run, caches)


def _in_turn(run: Callable[..., object], arguments: list[tuple]) -> Callable[[], object]:
    turns = cycle(arguments)
    return lambda: run(*next(turns))
