"""How products of few rows are cut: the plans, the search for them, and what they compile to."""

import itertools
import re
from functools import partial

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.few_rows import bench, kernel, tune
from specdec.kernels.few_rows.kernel import FALLBACK
from specdec.kernels.few_rows.plan import (
    ANY,
    FP8_GATED,
    FP8_PRODUCTS,
    GATED,
    PRODUCTS,
    Plan,
    fp8_plan,
    plan_for,
    product_plan,
)
from specdec.kernels.few_rows.tune import PRODUCTS as TUNED
from specdec.kernels.few_rows.tune import Times, first_try, search

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Plan(cols=16, step=32, split=1, warps=2, stages=3)


def test_plans():
    assert product_plan(33, 128, 2048) is None
    assert product_plan(0, 128, 2048) is None
    assert product_plan(4, 8, 2048) is None
    assert product_plan(4, 128, 2050) is None
    for gated, fp8 in itertools.product((False, True), repeat=2):
        plan_of = partial(fp8_plan if fp8 else product_plan, gated=gated)
        bf16, eight = (GATED, FP8_GATED) if gated else (PRODUCTS, FP8_PRODUCTS)
        for num_cols, width, (below, most) in itertools.product(
            (128, 576, 4096, 6144, 14336, 128256),
            (576, 2048, 4096, 14336),
            itertools.pairwise([0, *sorted(eight if fp8 else bf16)]),
        ):
            plan = plan_of(below + 1, num_cols, width)
            assert plan == plan_of(most, num_cols, width)
            assert plan is not None if fp8 else plan is None or width % plan.step == 0
    for num_rows, width in itertools.product((1, 16, 17, 32), (4096, 14336)):
        assert product_plan(num_rows, 4096, width) is not None
    draft_head = product_plan(16, 32000, 4096)
    assert draft_head is not None
    assert draft_head.swap_ab
    assert product_plan(4, 16384, 4096) is None
    assert product_plan(4, 128256, 4096) is not None
    x, weight = torch.zeros(4, 576), torch.zeros(128, 576)
    assert plan_for(x, weight) is None  # fp32
    assert plan_for(x.bfloat16(), weight) is None
    assert plan_for(x.bfloat16(), weight.bfloat16()) == product_plan(4, 128, 576)
    assert plan_for(x.bfloat16(), weight.bfloat16()[:, ::2]) is None


def test_search_finds_the_best_cut_and_features():
    """In the layers where a product is part of one, alone elsewhere."""
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
    assert len(tried) == len(set(tried)) == 1 + 2 * 6 + 11
    assert set(search(TUNED["o"], time, quick=False)) >= set(times)
    alone = search(TUNED["fc"], lambda plan: Times(time(plan).alone, 0.0), quick=True)
    assert next(iter(alone)).late


def test_search_names_lines_for_the_plan(monkeypatch, capsys):
    """The whole command at small shapes, with a clock that stands still."""
    cuts = ((16, 32, 1, 2, 3),)
    shapes = {"qkv": (96, 64), "o": (64, 64), "gate_up": (96, 64), "down": (64, 96)}
    products = {
        name: tune.Product(*shape, cuts, gated=name == "gate_up") for name, shape in shapes.items()
    }
    products |= {f"fp8 {name}": item._replace(fp8=True) for name, item in products.items()}
    monkeypatch.setattr(tune, "PRODUCTS", products)
    monkeypatch.setattr(tune, "SIZE", 64)
    monkeypatch.setattr(tune, "ROWS", (2,))
    monkeypatch.setattr(
        tune, "_random", lambda rows, width: torch.randn(rows, width, device=DEVICE)
    )

    def weights(name):
        num_cols, width, _, gated, fp8 = products[name]
        weight = torch.randn(num_cols * (1 + gated), width, device=DEVICE)
        return [bench.in_bytes(weight) if fp8 else weight] * tune.LAYERS

    def seconds_of(case):
        assert case.run().isfinite().all()
        return [1.0]

    monkeypatch.setattr(tune, "_weights", weights)
    monkeypatch.setattr(tune, "seconds_of", seconds_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "LAYERS", 1)
    monkeypatch.setattr(tune, "FEATURES", tune.FEATURES[:2])
    assert tune.main(["--quick", "--rows", "2", "gate_up"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "GATED: (96, 64, cuBLAS),  # gate_up"  # the first of equals
    assert sum(line.startswith("gate_up") for line in lines) == 2 * 3  # each plan again at the end
    assert tune.main(["--quick", "--rows", "2", "fp8 o", "o"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "FP8_PRODUCTS: (64, 64, cuBLAS),  # fp8 o"
    assert [line.partition(",")[0] for line in lines if "against" in line and "layers" in line] == [
        "1 fp8 layers",
        "1 layers",
    ]


def test_search_is_refused_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for argv, code, named in (
        (["o"], 1, "GPU"),
        (["--rows", "0", "o"], 2, "--rows 0"),
        (["--rows", "200", "o"], 2, "--rows 200"),
        (["fp8 fc"], 2, "fp8 fc"),
    ):
        assert tune.main(argv) == code
        out, err = capsys.readouterr()
        assert not out
        assert named in err
        assert len(err.splitlines()) == 1


def test_search_tries_what_is_planned():
    """Each plan of a tuned product, so that a search can find it again."""
    for name, tuned in TUNED.items():
        tried = first_try(tuned, quick=False)
        plan_of = fp8_plan if tuned.fp8 else product_plan
        for rows in (16, 32, 64, 128):
            plan = plan_of(rows, tuned.num_cols, tuned.width, gated=tuned.gated)
            assert plan is None or plan in tried, (name, rows)


def test_stacks_of_layers(monkeypatch):
    """What the bench times gives one result, whichever way its norms and products run."""
    shapes = {"qkv": (640, 512), "o": (512, 512), "gate_up": (576, 512), "down": (512, 576)}
    layer = {name: (*shape, name == "gate_up") for name, shape in shapes.items()}
    for name, value in {"LAYER": layer, "SIZE": 512, "LAYERS": 2, "ROWS": (2, 32)}.items():
        monkeypatch.setattr(bench, name, value)
    own = SMALL._replace(cols=64, step=128, split=2)
    monkeypatch.setattr(bench, "product_plan", lambda rows, *_, **__: own if rows < 32 else None)
    ends, add_norm = [], kernel.few_rows_add_norm
    monkeypatch.setattr(
        kernel, "few_rows_add_norm", lambda *args: ends.append(1) or add_norm(*args)
    )
    few, left, fp8, *many = bench._stacks(torch.device(DEVICE))
    assert (left.name, fp8.name) == (f"{few.name}, norms left", f"{few.name}, fp8")
    assert len(many) == 2
    between, expected = few.run(), few.baseline()
    assert not ends
    ours = left.run()
    assert len(ends) == 2 * 2
    for out in (between, ours):
        assert (out - expected).float().norm() / expected.float().norm() < 4e-2
    assert fp8.num_bytes == few.num_bytes // 2
    assert fp8.run().isfinite().all()


def compiled(num_cols, width, gated, plan, num_rows=16, ending=""):
    """The kernel as it is launched for so many rows.

    Args:
        ending: letters of what the product has besides: n its rows are a `Normed`, s it is added to
            a stream, 8 its weights are in fp8.
    """
    kinds = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    if "8" in ending:
        kinds["weight_ptr"] = "*u8"
    optional = {"bias_ptr": "", "partial_ptr": "*fp32", "arrived_ptr": "*i32"}
    if plan.split == 1:
        optional |= {"partial_ptr": "", "arrived_ptr": ""}
    optional |= {"squares_ptr": "*fp32" if "n" in ending else ""}
    optional |= {"scale_ptr": "*fp32" if "8" in ending else ""}
    for name in ("residual_ptr", "norm_ptr", "summed_ptr", "sums_ptr"):
        optional[name] = ("*fp32" if name == "sums_ptr" else "*bf16") if "s" in ending else ""
    lines = max(16, 1 << (num_rows - 1).bit_length())
    constants = {
        **{name: None for name, kind in optional.items() if not kind},
        "X_STRIDE": width, "N": num_cols, "K": width,
        "ROWS": lines, "SQUARES_FIRST": lines * 128 <= kernel.SQUARES_HELD * 32 * plan.warps,
        "COLS": plan.cols, "BLOCK": 1 << (plan.cols - 1).bit_length(), "STEP": plan.step,
        "SPLIT": plan.split, "AHEAD": plan.ahead, "HELD": plan.held, "LATE": plan.late,
        "GATED": gated, "SWAP_AB": plan.swap_ab, "SQUARES": 128, "SCALED": 128, "UPCAST": False,
        "COMPILED": True, "EXACT": False, "OVERLAP": plan.overlap,
    }  # fmt: skip
    signature = kinds | {name: kind for name, kind in optional.items() if kind} | {"eps": "fp32"}
    if num_rows == 1:
        constants["num_rows"] = num_rows
    else:
        signature["num_rows"] = "i32"
    return Compile(
        "specdec.kernels.few_rows.program", "few_rows_program", signature, constants,
        plan.warps, plan.stages,
    )  # fmt: skip


@pytest.mark.slow
def test_tuned_cuts_fit_the_chip():
    kinds = [(False, "", {"held": 2}), (False, "", {"swap_ab": True})]
    kinds += [(True, "8", {}), (True, "8", {"swap_ab": True})]
    cuts = [
        compiled(tuned.num_cols, tuned.width, tuned.gated, Plan(*cut)._replace(**more), 16, ending)
        for tuned in TUNED.values()
        for cut in tuned.cuts
        for fp8, ending, more in kinds
        if fp8 == tuned.fp8
    ]
    assert all(result.spilled == 0 for result in compile_sm90(cuts))


def test_compiles_for_sm90():
    some = Plan(cols=32, step=128, split=2, warps=4, stages=4, ahead=2, held=2)
    cuts = [
        (6144, 4096, False, some),
        (6144, 4096, False, some._replace(late=True), 1),
        (14336, 4096, True, some._replace(split=1, cols=16)),
        (14336, 4096, True, some._replace(split=1, cols=56), 16, "n"),
        (4096, 4096, False, some._replace(late=True), 16, "s"),
        (6144, 4096, False, some._replace(late=True), 16, "n"),
        (1000, 576, False, FALLBACK),
        (4096, 4096, False, some._replace(cols=64, late=True, held=0, swap_ab=True), 16, "s"),
    ]
    planned = {
        (min(num_cols, 128256), 4096 if width == ANY else width, gated, plan, rows, ending)
        for gated, tables, ending in ((False, PRODUCTS, "s"), (True, GATED, "n"))
        for rows, table in tables.items()
        for num_cols, width, plan in table
        if plan is not None
    }
    everything = (*cuts, *planned)
    results = compile_sm90([compiled(*cut) for cut in everything])
    for cut, result in zip(everything, results, strict=True):
        assert result.spilled == 0
        assert "cp.async.cg.shared.global" in result.ptx  # 16 bytes a thread, pipelined
        assert "mma" in result.ptx
        if cut[3].swap_ab:  # weights come from shared memory, not from registers, a list in braces
            first = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\S)", result.ptx)
            assert first
            assert "{" not in first
    for cut, result in zip(cuts, results[: len(cuts)], strict=True):
        wait, copies = (result.ptx.index(op) for op in ("griddepcontrol.wait", "cp.async.cg"))
        assert wait < copies
        assert ("bulk.prefetch.L2" in result.ptx[:wait]) == (cut[3].ahead > 0)
        assert ("ld.global" in result.ptx[:wait]) == (cut[3].held > 0)  # weights, not activations
        assert "st.shared" not in result.ptx[:copies]  # nothing waits for what is held
        trigger = result.ptx.index("griddepcontrol.launch_dependents")
        assert (trigger > copies) == cut[3].late
