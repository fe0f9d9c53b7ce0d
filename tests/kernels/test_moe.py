"""Experts of few rows: kernels against their definition and against the forms in torch."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.moe import reference
from specdec.kernels.moe.plan import expert_plan, takes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter cuts bfloat16 off where a GPU rounds
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 3e-2}
MODULE = "specdec.kernels.moe.kernel"
CHOICE = "specdec.kernels.moe.choice"


def inputs(num_rows, num_experts, top_k, size=40, inner=24, dtype=torch.float32, skew=False):
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, size)
    gate_up = torch.randn(num_experts, 2 * inner, size) / size**0.5
    down = torch.randn(num_experts, size, inner) / inner**0.5
    preference = torch.rand(num_rows, num_experts)
    if skew:
        preference[:, 1] += 1  # one expert for all
    experts = preference.topk(top_k).indices
    weights = torch.rand(num_rows, top_k)
    floats = (tensor.to(DEVICE, dtype) for tensor in (hidden, gate_up, down))
    return (*floats, experts.to(DEVICE), weights.to(DEVICE))


def close(ours, expected):
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    error = (ours.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[ours.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "skew"),
    [
        (1, 8, 2, False),
        (5, 37, 3, False),  # fewer choices than experts
        (9, 40, 2, True),
        (7, 6, 3, False),  # a program for each expert
        (40, 3, 2, True),  # more rows of an expert than go at once
    ],
)
def test_moe(num_rows, num_experts, top_k, skew, dtype):
    from specdec.kernels.moe import kernel

    arguments = inputs(num_rows, num_experts, top_k, dtype=dtype, skew=skew)
    close(kernel.moe(*arguments), reference.moe(*arguments))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_shared_expert_is_added(dtype):
    from specdec.kernels.moe import kernel

    arguments = inputs(3, 5, 2, dtype=dtype)
    shared, gate = torch.randn_like(arguments[0]), torch.randn(3, 1).to(DEVICE, dtype)
    for more in ((shared,), (shared, gate)):
        close(kernel.moe(*arguments, *more), reference.moe(*arguments, *more))


def test_odd_sizes_and_no_rows():
    from specdec.kernels.moe import kernel

    arguments = inputs(3, 5, 2, size=71, inner=35)
    close(kernel.moe(*arguments), reference.moe(*arguments))
    hidden, gate_up, down, experts, weights = arguments
    assert kernel.moe(hidden[:0], gate_up, down, experts[:0], weights[:0]).shape == (0, 71)


def test_a_row_does_not_depend_on_its_neighbours():
    from specdec.kernels.moe import kernel

    hidden, gate_up, down, experts, weights = inputs(6, 5, 2)
    together = kernel.moe(hidden, gate_up, down, experts, weights)
    for row in range(6):
        at = slice(row, row + 1)
        alone = kernel.moe(hidden[at], gate_up, down, experts[at], weights[at])
        assert torch.equal(alone, together[at])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (37, 8), (128, 8), (3, 3)])
def test_softmax_topk(num_experts, top_k, normalise):
    from specdec.kernels.moe import kernel

    torch.manual_seed(0)
    logits = torch.randn(5, num_experts, device=DEVICE)
    ours = kernel.softmax_topk(logits, top_k, normalise)
    expected = reference.softmax_topk(logits, top_k, normalise)
    assert torch.equal(ours[0], expected[0])
    assert ours[0].dtype == torch.int64
    for mine, theirs in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "top_groups"),
    [(8, 2, 4, 2), (36, 5, 3, 2), (256, 8, 8, 4), (6, 2, 1, 1)],
)
def test_grouped_sigmoid_topk(num_experts, top_k, num_groups, top_groups, normalise):
    from specdec.kernels.moe import kernel

    torch.manual_seed(0)
    logits = torch.randn(5, num_experts, device=DEVICE)
    correction = torch.randn(num_experts, device=DEVICE) / 3
    arguments = (logits, correction, top_k, num_groups, top_groups, normalise, 2.5)
    ours = kernel.grouped_sigmoid_topk(*arguments)
    expected = reference.grouped_sigmoid_topk(*arguments)
    assert torch.equal(ours[0], expected[0])
    for mine, theirs in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_equal_scores_take_the_lower_ids():
    from specdec.kernels.moe import kernel

    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5], device=DEVICE)
    experts, _, _ = kernel.softmax_topk(logits, 3, True)
    assert experts.tolist() == [[1, 2, 4], [0, 1, 2]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("num_experts", [8, 36])
def test_a_row_that_is_not_finite_chooses_experts_that_exist(num_experts):
    """Its outputs are not numbers; other rows keep theirs, and nothing is read past the weights."""
    from specdec.kernels.moe import kernel

    logits = torch.randn(3, num_experts, device=DEVICE)
    spoiled = logits.clone()
    spoiled[1] = float("nan")
    correction = torch.zeros(num_experts, device=DEVICE)
    for choose in (
        lambda x: kernel.softmax_topk(x, 3, True),
        lambda x: kernel.grouped_sigmoid_topk(x, correction, 3, 4, 2, True, 1.0),
    ):
        (experts, weights, _), (expected, *_) = choose(spoiled), choose(logits)
        assert torch.equal(experts[::2], expected[::2])
        assert experts[1].sort().values.tolist() == sorted(set(experts[1].tolist()))
        assert experts[1].min() >= 0
        assert experts[1].max() < num_experts
        assert weights[1].isnan().all()
        assert weights[::2].isfinite().all()


def test_models_run_it():
    from specdec.kernels.runtime import using
    from specdec.models import moe

    hidden, gate_up, down, _, _ = inputs(3, 6, 2, dtype=torch.bfloat16)
    gate = torch.randn(6, 40, device=DEVICE).bfloat16()
    params = moe.SoftmaxMoe(gate, moe.Experts(gate_up, down))
    seen = []

    def run():
        return moe.softmax_moe(params, hidden, top_k=2, normalise=True, observe=seen.append)

    expected = run()
    with using("triton"):
        ours = run()
    assert torch.equal(seen[0].experts, seen[1].experts)
    close(ours, expected)
    assert takes(hidden, gate_up, down, seen[0].experts)
    assert not takes(hidden.float(), gate_up.float(), down.float(), seen[0].experts)
    assert not takes(hidden, gate_up, down, torch.zeros(513, dtype=torch.int64))


def test_compiles_for_sm90():
    items = []
    signature = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
    signature |= {"experts_ptr": "*i64", "choices": "i32"}
    for choices in (8, 512):
        for gated, num_cols, width in ((True, 768, 2048), (False, 2048, 768)):
            plan = expert_plan(choices, 128, num_cols, width, gated=gated)
            constants = {
                "N": num_cols, "K": width, "SHARE": 8 if gated else 1, "PAD": max(16, choices),
                "BY_EXPERT": choices >= 128, "ROWS": plan.rows, "COLS": plan.cols,
                "STEP": plan.step, "GATED": gated, "UPCAST": False, "OVERLAP": True,
            }  # fmt: skip
            items.append(
                Compile(MODULE, "_expert_products", signature, constants, plan.warps, plan.stages)
            )
    signature = dict.fromkeys(("outputs_ptr", "shared_ptr", "gate_ptr", "out_ptr"), "*bf16")
    signature["weights_ptr"] = "*fp32"
    constants = {"H": 2048, "TOP_K": 8, "BLOCK": 512, "OVERLAP": True}
    rest = [Compile(MODULE, "_weighted_sum", signature, constants, 2)]
    signature = {
        "logits_ptr": "*bf16", "experts_ptr": "*i64", "weights_ptr": "*fp32", "scores_ptr": "*fp32"
    }  # fmt: skip
    constants = {
        "E": 128, "TOP_K": 8, "E_PAD": 128, "K_PAD": 8, "NORMALISE": True, "OVERLAP": True
    }  # fmt: skip
    rest.append(Compile(CHOICE, "_softmax_topk", signature, constants, 1))
    signature = signature | {"logits_ptr": "*fp32", "correction_ptr": "*fp32", "scale": "fp32"}
    constants = constants | {"E": 256, "E_PAD": 256, "GROUPS": 8, "TOP_GROUPS": 4, "G_PAD": 8}
    rest.append(Compile(CHOICE, "_grouped_sigmoid_topk", signature, constants, 1))
    results = compile_sm90(items + rest)
    assert all(result.spilled == 0 for result in results)
    for result in results[: len(items)]:
        assert "cp.async.cg.shared.global" in result.ptx
        assert "mma.sync" in result.ptx
