"""Products of few rows: the kernel against torch, cut in every way."""

from functools import partial

import pytest
import torch

from specdec.kernels.few_rows import reference
from specdec.kernels.few_rows.plan import Plan, product_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter cuts bfloat16 off where a GPU rounds, twice more with the activation
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 2e-2}
SMALL = Plan(cols=16, step=32, split=1, warps=2, stages=3)


def inputs(num_rows, num_cols, width, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    x = torch.randn(num_rows, width).to(DEVICE, dtype)
    weight = (torch.randn(num_cols, width) / width**0.5).to(DEVICE, dtype)
    return x, weight, torch.randn(num_cols).to(DEVICE, dtype) if bias else None


def close(ours, expected):
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    error = (ours.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[ours.dtype]


@pytest.mark.parametrize(
    ("num_rows", "num_cols", "width"), [(1, 16, 32), (5, 37, 90), (17, 50, 64)]
)
@pytest.mark.parametrize(
    ("split", "held", "swap_ab"),
    [
        (1, 0, False),
        (1, 0, True),
        (1, 1, False),
        (1, 2, True),
        (2, 0, True),
        (2, 1, False),
        (2, 1, True),
        (3, 0, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(num_rows, num_cols, width, split, held, swap_ab, dtype):
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(num_rows, num_cols, width, dtype)
    plan = SMALL._replace(split=split, held=held, swap_ab=swap_ab)
    for own in (bias, None):
        close(kernel.few_rows(x, weight, own, plan), reference.few_rows(x, weight, own))


@pytest.mark.parametrize(("num_rows", "inner", "width"), [(1, 16, 32), (5, 23, 90)])
@pytest.mark.parametrize(
    ("split", "held", "swap_ab"),
    [(1, 0, False), (1, 0, True), (1, 1, False), (2, 0, True), (2, 1, False), (2, 1, True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_with_its_activation(num_rows, inner, width, split, held, swap_ab, dtype):
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(num_rows, 2 * inner, width, dtype)
    plan = SMALL._replace(split=split, held=held, swap_ab=swap_ab)
    for own in (bias, None):
        ours = kernel.few_rows_gated(x, weight, own, plan)
        close(ours, reference.few_rows_gated(x, weight, own))


def normed(num_rows, width, dtype):
    """A stream, and its norm in parts as a product of three tiles would leave it."""
    stream, _, weight = inputs(num_rows, width, width, dtype)
    parts = [part.float().square().sum(-1) for part in stream.split(width // 3 + 1, -1)]
    return (
        stream,
        weight,
        reference.Normed((stream * weight).to(dtype), torch.stack(parts, -1), 1e-5),
    )


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("cols", [16, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_divided_by_its_readers(dtype, cols, split, swap_ab):
    """A product of `Normed` rows is that of the rows normed before."""
    from specdec.kernels.add_norm.reference import rms_norm
    from specdec.kernels.few_rows import kernel

    plan = SMALL._replace(cols=cols, split=split, swap_ab=swap_ab)
    stream, norm, x = normed(5, 90, dtype)
    whole = rms_norm(stream, norm, 1e-5)
    _, weight, bias = inputs(1, 37, 90, dtype)
    close(kernel.few_rows(x, weight, bias, plan), reference.few_rows(x, weight, bias))
    close(reference.few_rows(x, weight, bias), reference.few_rows(whole, weight, bias))
    _, weight, bias = inputs(1, 2 * 23, 90, dtype)
    ours = kernel.few_rows_gated(x, weight, bias, plan)
    close(ours, reference.few_rows_gated(x, weight, bias))
    close(ours, reference.few_rows_gated(whole, weight, bias))


@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 16), (5, 37), (17, 50)])
@pytest.mark.parametrize(("split", "held"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_norm_at_its_end(num_rows, num_cols, split, held, swap_ab, dtype):
    from specdec.kernels.add_norm.reference import rms_norm
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(num_rows, num_cols, 90, dtype)
    residual, _, norm = inputs(num_rows, num_cols, num_cols, dtype)
    cols = 16 if split == 1 else 11
    plan = SMALL._replace(split=split, held=held, cols=cols, swap_ab=swap_ab)
    for own, rows in ((bias, x), (None, normed(num_rows, 90, dtype)[2])):
        ours, summed = kernel.few_rows_add_norm(rows, weight, own, residual, norm, 1e-5, plan)
        want, want_summed = reference.few_rows_add_norm(rows, weight, own, residual, norm, 1e-5)
        close(summed, want_summed)
        close(ours.rows, want.rows)
        close(ours.squares.sum(-1, keepdim=True), want.squares)
        close((ours.rows * ours.scale()).to(dtype), rms_norm(summed, norm, 1e-5))


def test_strided_rows_and_leading_dimensions():
    from specdec.kernels.few_rows import kernel

    x, weight, _ = inputs(6, 20, 40)
    wide = torch.randn(6, 100, device=DEVICE)
    wide[:, 30:70] = x
    ours = kernel.few_rows(wide[:, 30:70], weight, None, SMALL)
    close(ours, reference.few_rows(x, weight))
    assert torch.equal(kernel.few_rows(x.view(2, 3, 40), weight, None, SMALL), ours.view(2, 3, 20))
    assert kernel.few_rows(x[:0], weight).shape == (0, 20)


@pytest.mark.parametrize("swap_ab", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(swap_ab):
    """Nor a result on the run: shared outputs are added in one order, whoever comes last."""
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(8, 48, 96)
    plan = SMALL._replace(split=3, swap_ab=swap_ab)
    together = kernel.few_rows(x, weight, bias, plan)
    for _ in range(3):
        assert torch.equal(kernel.few_rows(x, weight, bias, plan), together)
    for row in range(8):
        assert torch.equal(kernel.few_rows(x[row : row + 1], weight, bias, plan)[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 4, 16, 32, 64])
def test_model_shapes(num_rows):
    """At the shapes of an 8B model, many times over; cut anyhow where none is planned."""
    from specdec.kernels.few_rows import kernel

    own = Plan(cols=32, step=64, split=2, warps=4, stages=4, held=1)
    for num_cols, width in ((6144, 4096), (4096, 14336), (128256, 4096), (960, 576), (128, 2048)):
        x, weight, _ = inputs(num_rows, num_cols, width, torch.bfloat16, bias=False)
        run = partial(
            kernel.few_rows, x, weight, None, product_plan(num_rows, num_cols, width) or own
        )
        exact = reference.few_rows(x.float(), weight.float())
        first = run()
        error = (first.float() - exact).norm() / exact.norm()
        assert error < 4e-3
        assert all(torch.equal(run(), first) for _ in range(50))
    for inner, width in ((14336, 4096), (1536, 576)):
        x, weight, _ = inputs(num_rows, 2 * inner, width, torch.bfloat16, bias=False)
        plan = product_plan(num_rows, inner, width, gated=True) or own
        run = partial(kernel.few_rows_gated, x, weight, None, plan)
        first = run()
        close(first, reference.few_rows_gated(x, weight))
        assert all(torch.equal(run(), first) for _ in range(50))
    for width in (4096, 14336):
        x, weight, _ = inputs(num_rows, 4096, width, torch.bfloat16, bias=False)
        residual, _, norm = inputs(num_rows, 4096, 4096, torch.bfloat16)
        stream = (x, weight, None, residual, norm, 1e-5)
        plan = product_plan(num_rows, 4096, width) or own
        normed, summed = kernel.few_rows_add_norm(*stream, plan)
        want, want_summed = reference.few_rows_add_norm(*stream)
        close(summed, want_summed)
        close(normed.rows, want.rows)
        close(normed.squares.sum(-1, keepdim=True), summed.float().square().sum(-1)[:, None])
        for _ in range(50):
            again, same = kernel.few_rows_add_norm(*stream, plan)
            assert torch.equal(same, summed)
            assert torch.equal(again.rows, normed.rows)
            assert torch.equal(again.squares, normed.squares)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"held": 2},
        {"late": True, "held": 1},
        {"ahead": 2},
        {"overlap": False},
        {"late": True, "cols": 64, "swap_ab": True},
        {"late": True, "cols": 64, "swap_ab": True, "held": 1},
    ],
)
@pytest.mark.parametrize("ends", [False, True], ids=["norms", "norms left"])
def test_overlapped_chain_equals_one_by_one(features, ends):
    """Each kernel reads what the one before wrote, captured as a graph of overlapped launches."""
    from specdec.kernels.add_norm.kernel import add_norm
    from specdec.kernels.few_rows import kernel

    x, up, _ = inputs(4, 2 * 2048, 1024, torch.bfloat16, bias=False)
    _, down, _ = inputs(1, 1024, 2048, torch.bfloat16, bias=False)
    norm = torch.randn(1024, device=DEVICE, dtype=torch.bfloat16)
    plan = Plan(cols=32, step=128, split=2, warps=4, stages=4)._replace(**features)

    def chain(pause):
        normed, residual = add_norm(x, None, norm, 1e-5)
        for _ in range(20):
            pause()
            inner = kernel.few_rows_gated(normed, up, None, plan)
            pause()
            if ends:
                last = (None, residual, norm, 1e-5, plan)
                normed, residual = kernel.few_rows_add_norm(inner, down, *last)
            else:
                hidden = kernel.few_rows(inner, down, None, plan)
                pause()
                normed, residual = add_norm(hidden, residual, norm, 1e-5)
        pause()
        return residual

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)
