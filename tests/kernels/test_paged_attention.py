"""Paged attention against a loop over rows and heads."""

import pytest
import tiny
import torch

from specdec.kernels.paged_attention.reference import fold_groups, paged_attention
from specdec.models.batch import AttentionGroup


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "value_dim", "dtype"),
    [
        (6, 2, 8, 8, torch.float32),
        (3, 3, 5, 7, torch.float32),
        (9, 3, 64, 64, torch.float32),
        (4, 1, 16, 16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("block_size", [1, 16])
def test_kernel_equals_the_reference(
    case, num_heads, num_kv_heads, dim, value_dim, dtype, block_size
):
    """In the interpreter without a GPU, on one where there is one."""
    from specdec.kernels.paged_attention import kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(200, generator=generator).add(1).tolist()
    steps = []
    for length, start in sorted(CASES[case]):
        count = -(-(start + length) // block_size) + 1
        steps.append(tiny.Step([0] * length, start, [order.pop() for _ in range(count)]))
    batch = tiny.make_batch(steps, block_size, device=device, num_padding=2)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    keys = random(201, block_size, num_kv_heads, dim)
    values = random(201, block_size, num_kv_heads, value_dim)
    query = random(batch.input_ids.numel(), num_heads, dim)
    expected = paged_attention(query.float(), keys.float(), values.float(), batch.groups, 0.3)
    out = kernel.paged_attention(
        query,
        keys,
        values,
        positions=batch.positions,
        query_start=batch.query_start,
        block_tables=batch.block_tables,
        groups=[(len(steps) + 1, max(length for length, _ in CASES[case]))],
        scale=0.3,
    )
    assert out.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    error = (out.float() - expected).norm() / expected.norm()
    assert error < tolerance
