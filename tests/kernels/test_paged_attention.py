"""Paged attention against a loop over rows and heads."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from torch import Tensor

from specdec.kernels.paged_attention.reference import fold_groups, paged_attention
from specdec.models.batch import AttentionGroup, Batch


def by_the_row(query, keys, values, batch, steps, block_size, scale):
    """softmax(scale q k) v, one row and one head at a time, keys found through the block table."""
    num_rows, num_heads, _ = query.shape
    repeats = num_heads // keys.shape[2]
    out, row = torch.zeros(num_rows, num_heads, values.shape[3], dtype=torch.float64), 0
    for step in steps:
        for offset in range(len(step.token_ids)):
            seen = range(step.start + offset + 1)
            slots = [(step.blocks[p // block_size], p % block_size) for p in seen]
            for head in range(num_heads):
                k = torch.stack([keys[b, s, head // repeats] for b, s in slots]).double()
                v = torch.stack([values[b, s, head // repeats] for b, s in slots]).double()
                weights = (k @ query[row, head].double() * scale).softmax(0)
                out[row, head] = weights @ v
            row += 1
    return out


CASES = {
    "one_row": [(1, 0)],
    "first_tokens": [(1, 0), (1, 0)],
    "decode": [(1, 12), (1, 3), (1, 30)],
    "verify": [(4, 9), (2, 30), (3, 0)],
    "chunks": [(17, 0), (13, 20)],
    "mixed": [(1, 11), (19, 3), (5, 27), (30, 0), (1, 0)],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "value_dim"),
    [(6, 2, 8, 8), (3, 3, 5, 7), (9, 3, 64, 64), (4, 1, 16, 16)],
)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_equals_a_loop(case, num_heads, num_kv_heads, dim, value_dim, block_size):
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(200, generator=generator).add(1).tolist()
    steps = []
    for length, start in CASES[case]:
        count = -(-(start + length) // block_size) + 1  # a lookahead block, not visible
        steps.append(tiny.Step([0] * length, start, [order.pop() for _ in range(count)]))
    batch = tiny.make_batch(steps, block_size)
    keys = torch.randn(201, block_size, num_kv_heads, dim, generator=generator)
    values = torch.randn(201, block_size, num_kv_heads, value_dim, generator=generator)
    query = torch.randn(batch.input_ids.numel(), num_heads, dim, generator=generator)
    out = paged_attention(query, keys, values, batch.groups, 0.3)
    expected = by_the_row(query, keys, values, batch, steps, block_size, 0.3)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_bfloat16():
    steps = [
        tiny.Step([0] * 3, 40, list(range(1, 12))),
        tiny.Step([0] * 20, 0, [20, 21, 22, 23, 24]),
    ]
    batch = tiny.make_batch(steps, 4)
    keys, values = (torch.randn(30, 4, 2, 16).to(torch.bfloat16) for _ in range(2))
    query = torch.randn(23, 6, 16).to(torch.bfloat16)
    out = paged_attention(query, keys, values, batch.groups, 0.25)
    expected = by_the_row(query, keys, values, batch, steps, 4, 0.25)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_hidden_keys_have_no_weight():
    """Whatever lies past a row's sequence, in its blocks or in others, changes nothing."""
    steps = [tiny.Step([0] * 3, 5, [1, 2, 3]), tiny.Step([0], 2, [4])]
    batch = tiny.make_batch(steps, 4, num_padding=2)
    keys, values = torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 8)
    query = torch.randn(6, 4, 8)
    out = paged_attention(query, keys, values, batch.groups, 0.3)
    for cache in (keys, values):
        cache[0] = 1e4
        cache[3] = -1e4
        cache[4, 3] = 1e4
        cache[5] = 1e4
    again = paged_attention(query, keys, values, batch.groups, 0.3)
    assert torch.equal(out[:4], again[:4])


def test_padding_entries_read_back_the_first_occurrence():
    """A rectangle's padding repeats a row; the row is computed with its own mask."""
    index = torch.tensor([[0, 1, 2], [3, 3, 3]])
    mask = torch.ones(2, 3, 4, dtype=torch.bool).tril(1)
    mask[1] = torch.tensor([True, True, False, False])
    group = AttentionGroup(index, torch.tensor([[1], [2]]), mask)
    folded = fold_groups([group], 4, 2, 1, torch.float32)
    # [g, Hkv, G, q]: request 1 starts at entry 6; its head 0 at 6, its head 1 at 9
    assert folded.output_rows.tolist() == [0, 3, 1, 4, 2, 5, 6, 9]
    assert folded.groups[0].bias.shape == (2, 1, 6, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_cpu(dtype):
    steps = [
        tiny.Step([0] * n, start, list(range(10 * i, 10 * i + 10)))
        for i, (n, start) in enumerate([(5, 100), (1, 0), (90, 20)])
    ]
    keys, values = (torch.randn(30, 16, 3, 64).to(dtype) for _ in range(2))
    query = torch.randn(96, 9, 64).to(dtype)
    groups = tiny.make_batch(steps, 16).groups
    on_device = tiny.make_batch(steps, 16, device="cuda").groups
    out = paged_attention(query.cuda(), keys.cuda(), values.cuda(), on_device, 0.125)
    expected = paged_attention(query.float(), keys.float(), values.float(), groups, 0.125)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().float(), expected, rtol=tolerance, atol=tolerance)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Problem(NamedTuple):
    """A batch and its tensors on the device."""

    batch: Batch
    query: Tensor
    keys: Tensor
    values: Tensor | None  # None: the keys' first columns
    value_dim: int


def problem(
    case: Sequence[tuple[int, int]],
    shape: tuple[int, int, int, int],
    block_size: int,
    dtype: torch.dtype = torch.float32,
    shared: bool = False,
) -> Problem:
    """Requests of `case` and two padding rows; blocks that nobody sees hold NaN."""
    num_heads, num_kv_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(0)
    steps, first = [], 1
    for length, start in case:
        count = -(-(start + length) // block_size)
        steps.append(tiny.Step([0] * length, start, [*range(first, first + count), first + count]))
        first += count + 1
    shuffle = [0, *(torch.randperm(first - 1, generator=generator) + 1).tolist()]
    steps = [step._replace(blocks=[shuffle[block] for block in step.blocks]) for step in steps]
    batch = tiny.make_batch(steps, block_size, device=DEVICE, num_padding=2)

    def cache(width: int) -> Tensor:
        pages = torch.full((first, block_size, num_kv_heads, width), torch.nan)
        for tokens, start, blocks, *_ in steps:
            for position in range(start + len(tokens)):
                row = torch.randn(num_kv_heads, width, generator=generator)
                pages[blocks[position // block_size], position % block_size] = row
        return pages.to(DEVICE, dtype)

    query = torch.randn(len(batch.input_ids), num_heads, dim, generator=generator)
    keys = cache(dim)
    values = None if shared else cache(value_dim)
    return Problem(batch, query.to(DEVICE, dtype), keys, values, value_dim)


def run_kernel(given: Problem, **changes: Any) -> Tensor:
    from specdec.kernels.paged_attention import kernel

    batch = given.batch
    settings = {
        "positions": batch.positions,
        "query_start": batch.query_start,
        "seq_lens": batch.seq_lens,
        "block_tables": batch.block_tables,
        "max_query_len": batch.max_query_len,
        "row_valid": batch.row_valid,
        "value_dim": given.value_dim,
        "scale": 0.3,
    }
    return kernel.paged_attention(given.query, given.keys, given.values, **{**settings, **changes})


def run_reference(given: Problem, groups: Any = None) -> Tensor:
    """In fp32; padding rows are 0."""
    keys = given.keys.float().nan_to_num()
    values = keys[..., : given.value_dim]
    if given.values is not None:
        values = given.values.float().nan_to_num()
    groups = given.batch.groups if groups is None else groups
    out = paged_attention(given.query.float(), keys, values, groups, 0.3)
    return torch.where(given.batch.row_valid[:, None, None], out, 0)


def assert_near(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    assert out.shape == expected.shape
    error = (out.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel's wrapper allocates holds NaN until the kernel writes it."""
    allocate = Tensor.new_empty

    def poisoned(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        new = allocate(self, *args, **kwargs)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


SHAPES = [  # Hq, Hkv, D, Dv
    (6, 2, 8, 8),
    (3, 3, 5, 7),
    (9, 3, 64, 64),
    (4, 1, 24, 16),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_equals_the_reference(case, shape):
    """In the interpreter without a GPU, on one where there is one."""
    dtype = torch.bfloat16 if shape[1] == 1 else torch.float32
    given = problem(CASES[case], shape, block_size=4 if shape[1] == 2 else 16, dtype=dtype)
    assert_near(run_kernel(given), run_reference(given), dtype)
