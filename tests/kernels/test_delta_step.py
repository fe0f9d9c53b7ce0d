"""A DeltaNet layer's step in Triton: against the reference, over steps that reject and prefill."""

import random

import pytest
import torch
import triton.language as tl
from compiling import Compile, compile_sm90

from specdec.kernels.gated_delta import kernel, reference

device = "cuda" if torch.cuda.is_available() else "cpu"

SHAPES = [  # key heads, value heads, Dk, Dv, convolution width
    (1, 1, 1, 1, 1),
    (2, 4, 5, 6, 4),
    (1, 3, 18, 9, 3),
    (2, 2, 16, 40, 2),
]
# the interpreter cuts fp32 off to bf16 where a GPU rounds
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2 if device == "cuda" else 5e-2}


def normal(*shape, generator, dtype=torch.float32):
    return torch.randn(shape, generator=generator).to(device, dtype)


def layer(shape, num_slots, window, seed=0, dtype=torch.float32):
    hk, hv, dk, dv, width = shape
    generator = torch.Generator().manual_seed(seed)
    channels = 2 * hk * dk + hv * dv
    weights = {
        "conv": normal(channels, width, generator=generator, dtype=dtype),
        "decay_log": normal(hv, generator=generator) - 1,
        "step_bias": normal(hv, generator=generator, dtype=dtype),
    }
    states = torch.full((num_slots, hv, dk, dv), float("nan"), device=device)
    stored = torch.full((num_slots, width - 1 + window - 1, channels + 2 * hv), float("nan"))
    return weights, states, stored.to(device, dtype)


def batch_of(steps, padding=()):
    """steps: (slot, first position, rows, real rows); padding: rows of padding requests, whose slot
    is the last that is given."""
    positions, valid, lens, slots = [], [], [], []
    for slot, first, rows, real in [*steps, *((-1, 0, rows, 0) for rows in padding)]:
        positions += [first + row if row < real else 0 for row in range(rows)]
        valid += [row < real for row in range(rows)]
        lens.append(rows)
        slots.append(slot)
    return {
        "positions": torch.tensor(positions, device=device),
        "row_valid": torch.tensor(valid, device=device),
        "query_start": torch.tensor([0, *lens], device=device).cumsum(0),
        "request_slots": torch.tensor(slots, device=device),
    }


def run_step(op, shape, batch, weights, states, stored, window_start, window, inputs, longest):
    plan = op.plan_windows_(window_start, **batch, window=window, num_key_heads=shape[0])
    out = op.delta_step_(
        inputs,
        **weights,
        states=states,
        stored=stored,
        plan=plan,
        query_start=batch["query_start"],
        request_slots=batch["request_slots"],
        num_key_heads=shape[0],
        key_dim=shape[2],
        max_query_len=longest,
    )
    return plan, out


def close(mine, theirs, tolerance, others=None):
    """By the largest number there, or among `others` that were rounded on the way."""
    scale = theirs.float().abs().max().clamp(min=1e-3)
    if others is not None:
        scale = torch.maximum(scale, others.float().abs().max())
    assert torch.isfinite(mine.float()).all()
    assert ((mine.float() - theirs.float()).abs().max() / scale) < tolerance


FP32, BF16 = torch.float32, torch.bfloat16
CASES = [  # shape, window, dtype, turns
    (SHAPES[0], 1, FP32, 4),
    (SHAPES[1], 4, FP32, 3),
    (SHAPES[1], 2, BF16, 3),
    (SHAPES[2], 3, FP32, 2),
    (SHAPES[3], 1, FP32, 2),
    *(
        pytest.param(shape, window, dtype, 8, marks=pytest.mark.slow)
        for shape in SHAPES
        for window in (1, 2, 5)
        for dtype in (FP32, BF16)
    ),
]


@pytest.mark.parametrize(("shape", "window", "dtype", "turns"), CASES, ids=str)
def test_steps_equal_the_reference(shape, window, dtype, turns):
    """Windows of any acceptance, prefill chunks of any length, new texts, padding rows and padding
    requests that share a slot; slots start full of NaN."""
    rng, generator = random.Random(window), torch.Generator().manual_seed(window)
    num_slots = 3
    weights, states, stored = layer(shape, num_slots + 1, window, dtype=dtype)
    mine = (states.clone(), stored.clone(), torch.full((num_slots + 1,), 999, device=device))
    theirs = (states, stored, mine[2].clone())
    length, tolerance = [0] * num_slots, TOLERANCE[dtype]
    for turn in range(turns):
        steps = []
        for slot in rng.sample(range(num_slots), rng.randint(1, num_slots)):
            if rng.random() < 0.15:
                length[slot] = 0
            real = rng.randint(1, window)
            if turn % 3 == 1 and (not steps or rng.random() < 0.3):
                real = rng.randint(window + 1, 20 if turn < 6 else 90)
            steps.append((slot, length[slot], real + rng.choice([0, 0, 3]), real))
            length[slot] += real if real > window else rng.randint(1, real)
        batch = batch_of(steps, padding=rng.choice([(), (2, 1), (window,)]))
        batch["request_slots"] %= num_slots + 1
        num_rows = len(batch["positions"])
        wide = normal(num_rows, stored.shape[2] + 3, generator=generator, dtype=dtype)
        inputs = wide[:, : stored.shape[2]]
        longest = int(batch["query_start"].diff().max())
        args = (shape, batch, weights)
        want_plan, want = run_step(reference, *args, *theirs, window, inputs.contiguous(), longest)
        plan, out = run_step(kernel, *args, *mine, window, inputs, longest)
        assert torch.equal(plan.rows, want_plan.rows)
        assert torch.equal(plan.arrived, want_plan.arrived)  # back at 0 after the launches
        assert torch.equal(mine[2], theirs[2])
        close(out, want, tolerance)
        for slot, *_ in steps:
            # rows may cancel in a state of one number, not what rounding each of them left
            close(mine[0][slot], theirs[0][slot], tolerance, others=want)
            assert torch.equal(mine[1][slot], theirs[1][slot])
        assert mine[0][num_slots].isnan().all()
        assert mine[1][num_slots].isnan().all()
        assert mine[2][num_slots] == 999


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "shape", [(16, 32, 128, 128, 4), (2, 4, 64, 64, 4), (2, 2, 256, 128, 4), (2, 4, 32, 32, 4)]
)
def test_prefill_at_full_size(shape, dtype):
    """Texts from their start, longer than a chunk and shorter."""
    window, lens = 4, (200, 5, 33)
    weights, states, stored = layer(shape, len(lens), window, dtype=dtype)
    batch = batch_of([(slot, 0, rows, rows) for slot, rows in enumerate(lens)])
    generator = torch.Generator().manual_seed(1)
    inputs = normal(sum(lens), stored.shape[2], generator=generator, dtype=dtype)
    results = []
    for op in (reference, kernel):
        start = torch.zeros(len(lens), dtype=torch.int64, device=device)
        mine = states.clone(), stored.clone()
        _, out = run_step(op, shape, batch, weights, *mine, start, window, inputs, max(lens))
        results.append((out, *mine))
    (want, state, kept), (out, own_state, own_kept) = results
    close(out, want, TOLERANCE[dtype])
    close(own_state, state, TOLERANCE[dtype])
    assert torch.equal(own_kept[:, :6], kept[:, :6])


@pytest.mark.parametrize("rows", [17, 65, pytest.param(200, marks=pytest.mark.slow)])
def test_prefill_of_like_keys(rows):
    """All keys alike, strengths near 1 and hardly any decay: the system is as ill as it gets."""
    shape, window = (1, 1, 16, 16, 1), 1
    weights, states, stored = layer(shape, 1, window)
    weights["conv"].fill_(1)
    weights["decay_log"].fill_(-12)
    inputs = torch.ones(rows, stored.shape[2], device=device)
    inputs[:, 32:48] = normal(rows, 16, generator=torch.Generator().manual_seed(0))
    inputs[:, 48] = 8
    batch = batch_of([(0, 0, rows, rows)])
    results = []
    for op in (reference, kernel):
        start = torch.zeros(1, dtype=torch.int64, device=device)
        mine = states.clone()
        _, out = run_step(
            op, shape, batch, weights, mine, stored.clone(), start, window, inputs, rows
        )
        results.append((out, mine))
    for got, want in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 2, 5), (1, 4, 128), (2, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    num_rows, heads, dim = shape
    x = normal(*shape, generator=generator, dtype=dtype)
    wide = normal(num_rows, heads * dim + 7, generator=generator, dtype=dtype) * 3
    gate = wide[:, 7:].unflatten(-1, (heads, dim))
    weight = normal(dim, generator=generator, dtype=dtype)
    got = kernel.gated_norm(x, gate, weight, 1e-6)
    want = reference.gated_norm(x, gate, weight, 1e-6)
    assert got.dtype == dtype
    close(got, want, TOLERANCE[dtype] / 2)


BIG = (16, 32, 128, 128, 4, 4)  # of the 80B model, K = 3


def compiles(hk, hv, dk, dv, width, window, block, warps, prefill, dtype="bf16"):
    pointers = dict.fromkeys(("inputs_ptr", "conv_ptr", "bias_ptr", "stored_ptr"), f"*{dtype}")
    signature = {
        **pointers,
        "decay_log_ptr": "*fp32",
        "states_ptr": "*fp32",
        "out_ptr": f"*{dtype}",
        "plan_ptr": "*i32",
        "arrived_ptr": "*i32",
        "query_start_ptr": "*i64",
        "slots_ptr": "*i64",
        "stride": "i32",
    }
    constants = {
        "HK": hk,
        "HV": hv,
        "DK": dk,
        "DV": dv,
        "W": width,
        "WINDOW": window,
        "DK_PAD": max(16, dk),
    }
    constants |= {"BLOCK": block, "REPEAT_PAD": hv // hk, "KEPT_PAD": 8}
    name = "window"
    if prefill:
        signature["mixed_ptr"] = signature.pop("conv_ptr")
        name = "prefill"
        low = dtype == "bf16"
        constants |= {"ROWS": kernel.CHUNK, "OPERAND": tl.bfloat16 if low else tl.float32}
        constants |= {"PRECISION": "ieee", "SOLVE_PRECISION": "tf32x3" if low else "ieee"}
        constants |= {"LOOSE_PRECISION": "tf32" if low else "ieee"}
    module = f"specdec.kernels.gated_delta.{name}"
    stages = 1 if prefill else 3
    return Compile(module, f"delta_{name}_kernel", signature, constants, warps, stages)


def test_compiles_for_hopper():
    """What every decoding step launches, at the 80B model's shape, and the convolution."""
    plan = {
        "positions_ptr": "*i64",
        "query_start_ptr": "*i64",
        "row_valid_ptr": "*i1",
        "slots_ptr": "*i64",
        "window_start_ptr": "*i64",
        "plan_ptr": "*i32",
        "arrived_ptr": "*i32",
    }
    norm = dict.fromkeys(("x_ptr", "gate_ptr", "weight_ptr", "out_ptr"), "*bf16")
    results = compile_sm90(
        [
            compiles(*BIG, 8, 1, prefill=False),
            Compile(
                "specdec.kernels.gated_delta.prefill",
                "convolve_kernel",
                dict.fromkeys(("inputs_ptr", "conv_ptr", "stored_ptr", "mixed_ptr"), "*bf16")
                | {"plan_ptr": "*i32", "query_start_ptr": "*i64", "slots_ptr": "*i64"}
                | dict.fromkeys(("stride", "num_requests", "num_rows"), "i32"),
                {"C": 8192, "N": 8256, "W": 4, "WINDOW": 4}
                | {"REQUESTS": 64, "ROWS": 32, "CHANNELS": 128},
            ),
            Compile(
                "specdec.kernels.gated_delta.window",
                "plan_windows_kernel",
                plan,
                {"WINDOW": 4, "HK": 16, "HK_PAD": 16, "ROWS": 64},
                1,
            ),
            Compile(
                "specdec.kernels.gated_delta.norm",
                "gated_norm_kernel",
                norm | {"gate_stride": "i32", "eps": "fp32"},
                {"HEADS": 32, "D": 128, "HEADS_PAD": 4, "D_PAD": 128},
            ),
        ]
    )
    assert results[0].spilled == 0


@pytest.mark.slow
def test_every_configuration_compiles_for_hopper():
    compile_sm90(
        [
            compiles(2, 4, 32, 16, 4, 4, 16, 4, prefill=True, dtype="fp32"),
            compiles(*BIG, 32, 4, prefill=False),
            compiles(*BIG, 32, 4, prefill=False, dtype="fp32"),
            compiles(*BIG, 64, 4, prefill=True),
            compiles(*BIG, 64, 4, prefill=True, dtype="fp32"),
        ]
    )
