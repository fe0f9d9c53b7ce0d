"""Row statistics in Triton against torch: reference, and the row distribution that it serves."""

import compiling
import pytest
import torch
import triton
import triton.language as tl

from specdec.kernels.row_stats import kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(3, 3), (1000, 1000), (1023, 1030), (1024, 1024), (1025, 1056), (2049, 2049)]


def rows(n, width, vocab_size, dtype):
    """Random logits [n, width] with NaN, infinite and tied rows among them, padding poisoned."""
    rng = torch.Generator().manual_seed(n + width)
    logits = (torch.randn(n, width, generator=rng) * 4).to(dtype)
    logits[1, 0], logits[1, vocab_size - 1] = 50.0, 50.0
    logits[2, vocab_size // 2] = torch.nan
    logits[3] = -torch.inf
    logits[4, vocab_size // 3] = torch.inf
    logits[5, : vocab_size - 1] = -torch.inf
    logits[:, vocab_size:] = torch.nan
    temperature = torch.tensor([1.0, 0.0, 0.6, 1.7, 1e-6, 1e-3])[torch.arange(n) % 6]
    return logits.to(DEVICE), temperature.roll(1).to(DEVICE)


def check(got, expected, valid):
    assert torch.equal(got.argmax, expected.argmax)
    assert torch.equal(got.greedy, expected.greedy)
    assert torch.equal(got.inv_temperature, expected.inv_temperature)
    assert torch.equal(got.cutoff, expected.cutoff)
    assert torch.equal(got.max[valid], expected.max[valid])
    assert not got.max[~valid].isfinite().any()
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-5, atol=1e-6)
    assert (got.block_mass is None) == (expected.block_mass is None)
    if got.block_mass is not None:
        sampled = valid & ~expected.greedy
        torch.testing.assert_close(
            got.block_mass[sampled], expected.block_mass[sampled], rtol=1e-5, atol=1e-6
        )


@triton.jit
def _owners(rows_ptr, cu_num_logits_ptr, out_ptr, num_requests, REQUESTS: tl.constexpr):
    at = tl.program_id(0)
    row = tl.load(rows_ptr + at)
    tl.store(out_ptr + at, kernel.owner_of(row, cu_num_logits_ptr, num_requests, REQUESTS))


@pytest.mark.parametrize("num_requests", [1, 5, 1024, 1025, 5000])
def test_owners_of_rows(num_requests):
    rng = torch.Generator().manual_seed(num_requests)
    counts = torch.randint(0, 3, (num_requests,), generator=rng)
    cu_num_logits = torch.cat([torch.zeros(1).long(), counts.cumsum(0)]).to(DEVICE)
    num_rows = int(cu_num_logits[-1]) + 3  # the last three are padding
    some = torch.linspace(0, num_rows - 1, 12).long().to(DEVICE)
    out = torch.full_like(some, -7)
    size = triton.next_power_of_2(num_requests)
    _owners[(12,)](some, cu_num_logits, out, num_requests, REQUESTS=size)
    assert torch.equal(out, reference.row_requests(cu_num_logits, num_rows)[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "width"), SIZES)
@pytest.mark.parametrize("case", ["plain", "all_greedy", "owned"])
def test_equals_reference(vocab_size, width, dtype, case):
    logits, temperature = rows(8, width, vocab_size, dtype)
    options = {"vocab_size": vocab_size, "epsilon": 1e-5, "invalid": -2}
    if case == "all_greedy":
        options["all_greedy"] = True
    if case == "owned":
        temperature = torch.tensor([0.3, 1.0, 0.0, 0.9], device=DEVICE)
        options["slots"] = torch.tensor([3, 0, 1, 2], device=DEVICE)
        options["cu_num_logits"] = torch.tensor([0, 3, 3, 5, 7], device=DEVICE)
    expected = reference.row_stats(logits, temperature, **options)
    valid = expected.argmax >= 0
    assert int((~valid).sum()) == 3
    check(kernel.row_stats(logits, temperature, **options), expected, valid)


@pytest.mark.parametrize("blocks", [2, 4])
def test_blocks_of_a_program_change_nothing(monkeypatch, blocks):
    """5 blocks a row, so that the last program of a row has some past its end."""
    logits, temperature = rows(6, 4100, 4099, torch.bfloat16)
    options = {"vocab_size": 4099, "epsilon": 1e-5, "invalid": -2}
    expected = kernel.row_stats(logits, temperature, **options)
    monkeypatch.setattr(kernel, "_blocks_of_a_program", lambda num_blocks: blocks)
    got = kernel.row_stats(logits, temperature, **options)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_parameters_of_requests_become_those_of_rows():
    cu_num_logits = torch.tensor([0, 3, 3, 4, 6], device=DEVICE)
    slots = torch.tensor([5, 0, 2, 1], device=DEVICE)
    floats = torch.rand(3, 6, device=DEVICE)
    top_k = torch.arange(6, device=DEVICE) + 40
    parameters = floats[0], top_k, floats[1], floats[2]
    rows = torch.tensor([5, 5, 5, 2, 1, 1, 1, 1], device=DEVICE)
    for op in (reference, kernel):
        got = op.request_rows(8, slots, cu_num_logits, *parameters)
        for ours, theirs in zip(got, parameters, strict=True):
            assert torch.equal(ours, theirs[rows])


def test_no_rows():
    stats = kernel.row_stats(
        torch.empty(0, 5, device=DEVICE),
        torch.empty(0, device=DEVICE),
        vocab_size=5,
        epsilon=1e-5,
        invalid=-2,
    )
    assert stats.argmax.shape == (0,)
    assert stats.block_mass.shape == (0, 1)


def test_compiles_for_sm_90():
    """Every kernel, from bf16 and fp32, at both block sizes."""
    module = "specdec.kernels.row_stats.kernel"
    owners = {"temperature_ptr": "*fp32", "slots_ptr": "*i64", "cu_num_logits_ptr": "*i64"}
    owners |= {"num_requests": "i32"}
    outputs = {f"{name}_ptr": "*fp32" for name in ("max", "inv_temperature", "cutoff", "lse")}
    blocks = {"block_max_ptr": "*fp32", "num_blocks": "i32"}
    sums_of = {"block_sum_ptr": "*fp32", "epsilon": "fp32", "groups": "i32"}
    compiles = []
    for dtype, size in (("*bf16", 4096), ("*fp32", 4096), ("*bf16", 1024)):
        rows = {"logits_ptr": dtype, "row_stride": "i64", "vocab_size": "i32"}
        for sums, requests in ((True, 64), (False, 0)):
            compiles.append(
                compiling.Compile(
                    module,
                    "_block_stats",
                    rows | owners | blocks | sums_of,
                    {
                        "BLOCK": size,
                        "BLOCKS": 4,
                        "REQUESTS": requests,
                        "SUMS": sums,
                        "OVERLAP": True,
                    },
                    size // 512,
                )
            )
    for sums, requests, greedy in ((True, 64, False), (False, 0, True), (False, 0, False)):
        types = owners | outputs | blocks | {"block_mass_ptr": "*fp32", "greedy_ptr": "*i1"}
        types |= {"logits_ptr": "*bf16", "row_stride": "i64", "vocab_size": "i32"}
        types |= {"argmax_ptr": "*i64", "epsilon": "fp32", "invalid": "i32"}
        constants = {
            "BLOCK": 4096,
            "BLOCKS": 32,
            "REQUESTS": requests,
            "SUMS": sums,
            "ALL_GREEDY": greedy,
        }
        constants["OVERLAP"] = True
        compiles.append(compiling.Compile(module, "_row_stats", types, constants, 4))
    types = {"slots_ptr": "*i64", "cu_num_logits_ptr": "*i64", "num_requests": "i32"}
    types |= {f"{n}_ptr": "*fp32" for n in ("temperature", "top_p", "min_p", "out")}
    types |= {"top_k_ptr": "*i64", "out_k_ptr": "*i64", "num_rows": "i32"}
    constants = {"REQUESTS": 64, "OVERLAP": True}
    compiles.append(compiling.Compile(module, "_request_rows", types, constants, 1))
    for built in compiling.compile_sm90(compiles):
        assert built.spilled == 0
