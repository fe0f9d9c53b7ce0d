"""Paged attention against a loop over rows and heads."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from compiling import Compile, compile_sm90
from torch import Tensor

from specdec.kernels.paged_attention.plan import plan_for
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


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 1, 21, 9), torch.float32), ((20, 1, 48, 32), torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("case", ["verify", "mixed"])
def test_values_in_the_keys(case, shape, dtype):
    """Latent attention: one head of keys, whose first columns are the values."""
    given = problem(CASES[case], shape, 4, dtype, shared=True)
    assert_near(run_kernel(given), run_reference(given), dtype)


def test_the_width_of_shared_values_is_named():
    given = problem(CASES["one_row"], (2, 1, 8, 4), 4, shared=True)
    with pytest.raises(ValueError, match="value_dim"):
        run_kernel(given, value_dim=None)


@pytest.mark.parametrize("shape", [(6, 2, 8, 8), (16, 1, 24, 16)], ids=str)
@pytest.mark.parametrize("length", [1, 33, 150])
def test_split_keys(length, shape):
    """One request alone is split over many programs, the last of which adds up; twice, since it
    leaves its counter for the next call."""
    given = problem([(min(4, length), length - min(4, length))], shape, 4, shared=shape[1] == 1)
    settings = {
        "max_query_len": 4,
        "block_tables": torch.nn.functional.pad(given.batch.block_tables, (0, 200)),
    }
    expected = run_reference(given)
    for _ in range(2):
        assert_near(run_kernel(given, **settings), expected, torch.float32)
    assert not kernel_counters().any()


@pytest.mark.gpu
@pytest.mark.parametrize("start", [140, 396, 1500])
def test_rounding_does_not_depend_on_the_cut(start):
    """bf16 outputs of other splits and iterations differ in the order of fp32 sums alone."""
    shape = (9, 3, 64, 64)
    given = problem([(4, start)], shape, 16, torch.bfloat16)
    num_requests = len(given.batch.block_tables)
    plan = plan_for(len(given.query), num_requests, 4, 9, 3, 64, start, 2, 132)
    cuts = [
        plan._replace(keys=keys, splits=splits) for keys in (32, 64, 128) for splits in (1, 2, 8)
    ]
    cuts.append(plan._replace(keys=32, splits=1, num_warps=2))
    first, *others = (run_kernel(given, plan=cut, max_query_len=4) for cut in cuts)
    for out in others:
        assert (out != first).float().mean() < 0.005


def kernel_counters() -> Tensor:
    from specdec.kernels.paged_attention import kernel

    return kernel._arrived(torch.zeros(1, device=DEVICE).device)


def test_rows_of_no_request():
    """Rows past query_start[R], requests without keys and padding rows give 0."""
    given = problem([(3, 5), (2, 9), (1, 0)], (6, 2, 8, 8), 4)
    start, lens = given.batch.query_start, given.batch.seq_lens.clone()
    lens[1] = 0
    valid = given.batch.row_valid.clone()
    valid[2] = False
    out = run_kernel(
        given,
        query_start=start[:3],
        seq_lens=lens[:2],
        row_valid=valid,
        block_tables=given.batch.block_tables[:2].contiguous(),
    )
    expected = run_reference(given)
    assert_near(out[:2], expected[:2], torch.float32)
    assert not out[2:].any()


@pytest.mark.parametrize("shape", [(6, 2, 8, 8), (16, 1, 24, 16)], ids=str)
@pytest.mark.parametrize("starts", [(0, 37), (9, 9)])
def test_trees(shape, starts):
    """Rows of a tree see what came before it, and their ancestors; a prefill runs beside them."""
    parents = [-1, 0, 0, 1, 1, 2, 4, 3]
    case = [(len(parents), starts[0]), (19, 5), (len(parents), starts[1])]
    given = problem(case, shape, 4, shared=shape[1] == 1)
    bits, depths = [], []
    for node, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    mask, positions = torch.zeros_like(given.batch.positions), given.batch.positions.clone()
    for first, start in ((0, starts[0]), (27, starts[1])):
        mask[first : first + 8] = torch.tensor(bits)
        positions[first : first + 8] = start + torch.tensor(depths)

    def tree_mask(group: AttentionGroup) -> AttentionGroup:
        visible = group.mask.clone()
        for request, query in (group.query_index == 0).nonzero().tolist() + (
            group.query_index == 27
        ).nonzero().tolist():
            if query:
                continue  # a repeat
            start = starts[int(group.query_index[request, 0] > 0)]
            for node, seen in enumerate(bits):
                for other in range(8):
                    visible[request, node, start + other] = bool(seen >> other & 1)
        return group._replace(mask=visible)

    expected = run_reference(given, [tree_mask(group) for group in given.batch.groups])
    out = run_kernel(given, ancestor_mask=mask, positions=positions)
    assert_near(out, expected, torch.float32)
    chain = run_kernel(given, ancestor_mask=torch.zeros_like(mask))
    assert_near(chain, run_reference(given), torch.float32)
    assert not torch.equal(chain, out)


@pytest.mark.parametrize("num_rows", [1, 4, 64, 256, 2048])
@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (9, 3), (128, 1)])
def test_tiles_cover_any_mix_of_rows(num_rows, requests, heads, kv_heads):
    """However rows fall to requests, the tiles that the host counted are enough."""
    cuts = torch.randint(num_rows + 1, (requests - 1,)).sort().values.tolist()
    starts = [0, *cuts, num_rows]
    longest = max(b - a for a, b in pairwise(starts))
    repeats = heads // kv_heads
    plan = plan_for(num_rows, requests, longest, heads, kv_heads, 128, 512, 2, 132)
    first = [start * repeats // plan.rows + r for r, start in enumerate(starts)]
    if plan.tiles_per_request:
        first = [plan.tiles_per_request * r for r in range(requests + 1)]
    for r, (a, b) in enumerate(pairwise(starts)):
        assert first[r + 1] - first[r] >= -(-(b - a) * repeats // plan.rows)
    assert first[requests] <= plan.tiles
    assert plan.splits == 1 or plan.tiles * kv_heads * plan.splits <= 132


COMPILED = [  # type, Hq, Hkv, D, Dv, values in the keys, tree, requests, rows of each
    ("bf16", 32, 8, 128, 128, False, False, 1, 4),
    ("bf16", 32, 8, 128, 128, False, True, 8, 100),
    ("bf16", 128, 1, 576, 512, True, False, 1, 1),
    ("bf16", 32, 8, 128, 128, False, False, 64, 4),
]
ALSO_COMPILED = [
    ("bf16", 32, 8, 128, 128, False, True, 64, 4),
    ("bf16", 16, 2, 256, 256, False, False, 64, 4),
    ("fp32", 32, 8, 128, 128, False, False, 8, 4),
]


@pytest.mark.parametrize(
    "cases", [COMPILED, pytest.param(ALSO_COMPILED, marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_compiles_for_sm90(cases):
    """At the shapes of an 8B model, of DeepSeek-V3 and of Qwen3-Next, cut as the host cuts them."""
    compiles = []
    for kind, heads, kv_heads, dim, value_dim, shared, tree, requests, rows in cases:
        plan = plan_for(
            requests * rows, requests, rows, heads, kv_heads, value_dim, 512,
            2 if kind == "bf16" else 4, 132,
        )  # fmt: skip
        signature = {f"{name}_ptr": f"*{kind}" for name in ("query", "key", "value", "out")}
        signature |= {"partial_ptr": "*fp32", "weight_ptr": "*fp32", "arrived_ptr": "*i32"}
        names = ("positions", "query_start", "seq_lens", "block_tables", "ancestors")
        signature |= {f"{name}_ptr": "*i64" for name in names} | {"valid_ptr": "*i1"}
        signature |= {"num_rows": "i32", "num_requests": "i32", "table_stride": "i32"}
        signature |= {"scale": "fp32"}
        absent = ["value_ptr"] * shared + ["ancestors_ptr"] * (not tree)
        if plan.splits == 1:
            absent += ["partial_ptr", "weight_ptr", "arrived_ptr"]
        constants = {
            "HEADS": kv_heads,
            "G": heads // kv_heads,
            "D": dim,
            "DV": value_dim,
            "BLOCK_SIZE": 16,
            "TILES": plan.tiles_per_request,
            "REQUESTS": 1 if plan.tiles_per_request else requests,
            "ROWS": plan.rows,
            "KEYS": plan.keys,
            "SPLITS": plan.splits,
            "D_PAD": value_dim,
            "REST_PAD": dim - value_dim if shared else 1,
            "DV_PAD": value_dim,
            "UPCAST": False,
            "OVERLAP": True,
        }
        compiles.append(
            Compile(
                "specdec.kernels.paged_attention.program",
                "attention_program",
                {name: kind for name, kind in signature.items() if name not in absent},
                {**constants, **dict.fromkeys(absent)},
                plan.num_warps,
                plan.num_stages,
            )
        )
    for case, result in zip(cases, compile_sm90(compiles), strict=True):
        assert case[0] == "fp32" or result.spilled <= 32, case


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(32, 8, 128, 128), (16, 1, 576, 512)], ids=str)
def test_a_graph_follows_the_device(shape):
    """One capture serves any lengths: what changes lies in tensors."""
    shared, dtype = shape[1] == 1, torch.bfloat16
    problems = [
        problem([(4, start), (count, 3)], shape, 16, dtype, shared)
        for start, count in ((0, 20), (700, 20), (33, 20))
    ]
    width = max(given.batch.block_tables.shape[1] for given in problems)
    names = ("positions", "query_start", "seq_lens", "block_tables", "row_valid")

    def inputs(given: Problem) -> dict[str, Tensor]:
        values = {name: getattr(given.batch, name) for name in names}
        table = values["block_tables"]
        values["block_tables"] = torch.nn.functional.pad(table, (0, width - table.shape[1]))
        return values

    most = max(len(given.keys) for given in problems)
    held = {name: value.clone() for name, value in inputs(problems[0]).items()}
    keys = torch.full((most, *problems[0].keys.shape[1:]), torch.nan, device=DEVICE, dtype=dtype)
    values = None if shared else keys[..., : shape[3]].clone()
    static = problems[0]._replace(query=problems[0].query.clone(), keys=keys, values=values)
    run_kernel(static, **held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_kernel(static, **held)
    for given in [*problems, problems[0]]:
        for name, value in inputs(given).items():
            held[name].copy_(value)
        static.query.copy_(given.query)
        keys[: len(given.keys)].copy_(given.keys)
        if values is not None:
            values[: len(given.values)].copy_(given.values)
        graph.replay()
        assert_near(out, run_reference(given), dtype)
