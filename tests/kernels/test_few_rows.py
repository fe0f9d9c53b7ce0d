"""Products of few rows: the kernel against torch, cut in every way."""

import itertools
from functools import partial

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.few_rows import reference
from specdec.kernels.few_rows.plan import ANY, GATED, PRODUCTS, Plan, plan_for, product_plan

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
@pytest.mark.parametrize(("split", "held"), [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product(num_rows, num_cols, width, split, held, dtype):
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(num_rows, num_cols, width, dtype)
    plan = SMALL._replace(split=split, held=held)
    for own in (bias, None):
        close(kernel.few_rows(x, weight, own, plan), reference.few_rows(x, weight, own))


@pytest.mark.parametrize(("num_rows", "inner", "width"), [(1, 16, 32), (5, 23, 90)])
@pytest.mark.parametrize(("split", "held"), [(1, 0), (1, 1), (2, 0), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_with_its_activation(num_rows, inner, width, split, held, dtype):
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(num_rows, 2 * inner, width, dtype)
    plan = SMALL._replace(split=split, held=held)
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


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("cols", [16, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_divided_by_its_readers(dtype, cols, split):
    """A product of `Normed` rows is that of the rows normed before."""
    from specdec.kernels.add_norm.reference import rms_norm
    from specdec.kernels.few_rows import kernel

    plan = SMALL._replace(cols=cols, split=split)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_norm_at_its_end(num_rows, num_cols, split, held, dtype):
    from specdec.kernels.add_norm.reference import rms_norm
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(num_rows, num_cols, 90, dtype)
    residual, _, norm = inputs(num_rows, num_cols, num_cols, dtype)
    plan = SMALL._replace(split=split, held=held, cols=16 if split == 1 else 11)
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


def test_a_row_does_not_depend_on_its_neighbours():
    """Nor a result on the run: shared outputs are added in one order, whoever comes last."""
    from specdec.kernels.few_rows import kernel

    x, weight, bias = inputs(8, 48, 96)
    plan = SMALL._replace(split=3)
    together = kernel.few_rows(x, weight, bias, plan)
    for _ in range(3):
        assert torch.equal(kernel.few_rows(x, weight, bias, plan), together)
    for row in range(8):
        assert torch.equal(kernel.few_rows(x[row : row + 1], weight, bias, plan)[0], together[row])


def test_plans():
    assert product_plan(33, 128, 2048) is None
    assert product_plan(0, 128, 2048) is None
    assert product_plan(4, 8, 2048) is None
    assert product_plan(4, 128, 2050) is None
    for gated in (False, True):
        edges = sorted(GATED if gated else PRODUCTS)
        for num_cols, width, (below, most) in itertools.product(
            (128, 576, 4096, 6144, 14336, 128256),
            (576, 2048, 4096, 14336),
            itertools.pairwise([0, *edges]),
        ):
            plan, same = (product_plan(m, num_cols, width, gated=gated) for m in (below + 1, most))
            assert plan == same
            assert plan is None or width % plan.step == 0
    assert product_plan(4, 128256, 4096) is not None
    x, weight = torch.zeros(4, 576), torch.zeros(128, 576)
    assert plan_for(x, weight) is None  # fp32
    assert plan_for(x.bfloat16(), weight) is None
    assert plan_for(x.bfloat16(), weight.bfloat16()) == product_plan(4, 128, 576)
    assert plan_for(x.bfloat16(), weight.bfloat16()[:, ::2]) is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 4, 16])
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
        run = partial(kernel.few_rows_gated, x, weight, None, own)
        first = run()
        close(first, reference.few_rows_gated(x, weight))
        assert all(torch.equal(run(), first) for _ in range(50))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features", [{}, {"held": 2}, {"late": True, "held": 1}, {"ahead": 2}, {"overlap": False}]
)
def test_overlapped_chain_equals_one_by_one(features):
    """Each kernel reads what the one before wrote, captured as a graph of overlapped launches."""
    from specdec.kernels.add_norm.kernel import add_norm
    from specdec.kernels.few_rows import kernel

    x, up, _ = inputs(4, 2 * 2048, 1024, torch.bfloat16, bias=False)
    _, down, _ = inputs(1, 1024, 2048, torch.bfloat16, bias=False)
    norm = torch.randn(1024, device=DEVICE, dtype=torch.bfloat16)
    plan = Plan(cols=32, step=128, split=2, warps=4, stages=4)._replace(**features)

    def chain(pause):
        hidden, residual = x, None
        for _ in range(20):
            normed, residual = add_norm(hidden, residual, norm, 1e-5)
            pause()
            inner = kernel.few_rows_gated(normed, up, None, plan)
            pause()
            hidden = kernel.few_rows(inner, down, None, plan)
            pause()
        return hidden

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def compiled(num_cols, width, gated, plan, num_rows=None, ending=""):
    """The kernel as it is launched for 2 to 16 rows, or for `num_rows` as a constant.

    Args:
        ending: letters of what the product has besides: n its rows are a `Normed`, s it is added to
            a stream.
    """
    kinds = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    optional = {"bias_ptr": "", "partial_ptr": "*fp32", "arrived_ptr": "*i32"}
    if plan.split == 1:
        optional |= {"partial_ptr": "", "arrived_ptr": ""}
    optional |= {"squares_ptr": "*fp32" if "n" in ending else ""}
    for name in ("residual_ptr", "norm_ptr", "summed_ptr", "sums_ptr"):
        optional[name] = ("*fp32" if name == "sums_ptr" else "*bf16") if "s" in ending else ""
    constants = {
        **{name: None for name, kind in optional.items() if not kind},
        "X_STRIDE": width, "N": num_cols, "K": width, "ROWS": 16,
        "COLS": plan.cols, "BLOCK": 1 << (plan.cols - 1).bit_length(), "STEP": plan.step,
        "SPLIT": plan.split, "AHEAD": plan.ahead, "HELD": plan.held, "LATE": plan.late,
        "GATED": gated, "SQUARES": 128, "UPCAST": False, "EXACT": False, "OVERLAP": plan.overlap,
    }  # fmt: skip
    signature = kinds | {name: kind for name, kind in optional.items() if kind} | {"eps": "fp32"}
    if num_rows is None:
        signature["num_rows"] = "i32"
    else:
        constants["num_rows"] = num_rows
    return Compile(
        "specdec.kernels.few_rows.program", "few_rows_program", signature, constants,
        plan.warps, plan.stages,
    )  # fmt: skip


def test_search_finds_the_best_cut_and_features():
    """In the layers where a product is part of one, alone elsewhere."""
    from specdec.kernels.few_rows.tune import PRODUCTS as TUNED
    from specdec.kernels.few_rows.tune import Times, search

    tried = []

    def time(plan):
        tried.append(plan)
        if plan is None:
            return Times(3.0, 9.0)
        if plan.stages > 6:
            return Times(float("inf"), float("inf"))
        layers = 5 + abs(plan.split - 4) + abs(plan.held - 4) / 8
        return Times(2.0 - plan.late, layers)

    times = search(TUNED["o"], time, quick=True)
    best = next(iter(times))
    assert (best.cols, best.split, best.held, times[best].layers) == (32, 4, 4, 5)
    assert len(tried) == len(set(tried)) == 1 + 2 * 5 + 6
    assert set(search(TUNED["o"], time, quick=False)) >= set(times)
    alone = search(TUNED["fc"], lambda plan: Times(time(plan).alone, 0.0), quick=True)
    assert next(iter(alone)).late


def test_search_names_lines_for_the_plan(monkeypatch, capsys):
    """The whole command at small shapes, with a clock that stands still."""
    from specdec.kernels.few_rows import tune

    cuts = ((16, 32, 1, 2, 3),)
    shapes = {"qkv": (96, 64), "o": (64, 64), "gate_up": (96, 64), "down": (64, 96)}
    products = {
        name: tune.Product(*shape, cuts, gated=name == "gate_up") for name, shape in shapes.items()
    }
    monkeypatch.setattr(tune, "PRODUCTS", products)
    monkeypatch.setattr(tune, "SIZE", 64)
    monkeypatch.setattr(tune, "ROWS", (2,))
    monkeypatch.setattr(
        tune, "_random", lambda rows, width: torch.randn(rows, width, device=DEVICE)
    )

    def weights(name):
        num_cols, width, _, gated = products[name]
        return [torch.randn(num_cols * (1 + gated), width, device=DEVICE)] * tune.LAYERS

    def seconds_of(case):
        assert case.run().isfinite().all()
        return [1.0]

    monkeypatch.setattr(tune, "_weights", weights)
    monkeypatch.setattr(tune, "seconds_of", seconds_of)
    monkeypatch.setattr(tune, "LAYERS", 1)
    monkeypatch.setattr(tune, "FEATURES", tune.FEATURES[:2])
    assert tune.main(["--quick", "gate_up"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "GATED: (96, 64, cuBLAS),  # gate_up"  # the first of equals
    assert sum(line.startswith("gate_up") for line in lines) == 2 * 3  # each plan again at the end


@pytest.mark.slow
def test_tuned_cuts_fit_the_chip():
    from specdec.kernels.few_rows.tune import PRODUCTS as TUNED

    plans = {
        (product.num_cols, product.width, product.gated, Plan(*cut)._replace(held=2))
        for product in TUNED.values()
        for cut in product.cuts
    }
    assert all(result.spilled == 0 for result in compile_sm90([compiled(*plan) for plan in plans]))


def test_compiles_for_sm90():
    from specdec.kernels.few_rows.kernel import FALLBACK

    some = Plan(cols=32, step=128, split=2, warps=4, stages=4, ahead=2, held=2)
    cuts = [
        (6144, 4096, False, some),
        (6144, 4096, False, some._replace(late=True), 1),
        (14336, 4096, True, some._replace(split=1, cols=16)),
        (14336, 4096, True, some._replace(split=1, cols=56), None, "n"),
        (4096, 4096, False, some._replace(late=True), None, "s"),
        (6144, 4096, False, some._replace(late=True), None, "n"),
        (1000, 576, False, FALLBACK),
    ]
    planned = {
        (min(num_cols, 128256), 4096 if width == ANY else width, gated, plan)
        for gated, tables in ((False, PRODUCTS), (True, GATED))
        for table in tables.values()
        for num_cols, width, plan in table
        if plan is not None
    }
    results = compile_sm90([compiled(*cut) for cut in (*cuts, *planned)])
    for result in results:
        assert result.spilled == 0
        assert "cp.async.cg.shared.global" in result.ptx  # 16 bytes a thread, pipelined
        assert "mma.sync" in result.ptx
    for cut, result in zip(cuts, results[: len(cuts)], strict=True):
        wait, copies = (result.ptx.index(op) for op in ("griddepcontrol.wait", "cp.async.cg"))
        assert wait < copies
        assert ("bulk.prefetch.L2" in result.ptx[:wait]) == (cut[3].ahead > 0)
        assert ("ld.global" in result.ptx[:wait]) == (cut[3].held > 0)  # weights, not activations
        assert "st.shared" not in result.ptx[:copies]  # nothing waits for what is held
        trigger = result.ptx.index("griddepcontrol.launch_dependents")
        assert (trigger > copies) == cut[3].late


def test_layers_run_it_where_it_is_planned(monkeypatch):
    from specdec.kernels.few_rows import kernel
    from specdec.kernels.runtime import using
    from specdec.models import layers

    seen = []

    def spy(x, weight, bias=None, plan=None):
        seen.append((x.shape[0], weight.shape[0], plan))
        return x.new_zeros(x.shape[0], plan.cols)

    monkeypatch.setattr(kernel, "few_rows", spy)
    x, router, small = torch.randn(4, 512), torch.randn(128, 512), torch.randn(8, 512)
    x, router, small = (tensor.to(DEVICE, torch.bfloat16) for tensor in (x, router, small))
    layers.linear(x, router)
    with using("triton"):
        layers.linear(x, small)
        layers.linear(x.repeat(9, 1), router)
        layers.linear(x.float(), router.float())
        assert not seen
        layers.linear(x, router)
    assert seen == [(4, 128, product_plan(4, 128, 512))]


def test_a_feed_forward_part_on_kernels(monkeypatch):
    """The same numbers as in torch, where plans give it to the kernel and where they do not."""
    from specdec.kernels.few_rows import plan as plans
    from specdec.kernels.runtime import using
    from specdec.models import layers

    x, gate_up, gate_up_bias = inputs(2, 2 * 512, 512, torch.bfloat16)
    _, down, bias = inputs(1, 576, 512, torch.bfloat16)
    expected = layers.gated_mlp(x, gate_up, down, gate_up_bias, bias)
    for plan in (None, Plan(cols=32, step=128, split=1, warps=4, stages=3)):
        monkeypatch.setitem(plans.GATED, 16, ((plans.ANY, plans.ANY, plan),))
        with using("triton"):
            ours = layers.gated_mlp(x, gate_up, down, gate_up_bias, bias)
        close(ours, expected)
