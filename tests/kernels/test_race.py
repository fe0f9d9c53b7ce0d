"""Gumbel-max races in Triton against torch."""

import battery
import compiling
import pytest
import torch

from specdec.kernels.race import kernel, reference
from specdec.keys import target_exponential
from specdec.sampling import race_winners, row_distribution

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [3, 1000, 1025, 2049])
@pytest.mark.parametrize("case", ["rows", "owned", "lanes"])
def test_equals_reference(vocab_size, case):
    logits, sampling = battery.mixed(8, vocab_size + 7)
    logits[1, 0] = torch.nan
    dist = row_distribution(logits, **sampling, vocab_size=vocab_size)
    rng = torch.Generator().manual_seed(1)
    options = {
        "vocab_size": vocab_size,
        "seeds": torch.randint(-(2**62), 2**62, (8,), generator=rng).to(DEVICE),
        "round_start": torch.arange(8, device=DEVICE) * 3,
        "purpose": 4,
        "offset": 2,
    }
    if case == "owned":
        options["cu_num_logits"] = torch.tensor([0, 3, 3, 4, 6], device=DEVICE)
        options |= {k: options[k][:4] for k in ("seeds", "round_start")}
    if case == "lanes":
        options["lanes"] = (torch.arange(vocab_size) * 4 + 1).to(DEVICE)
    rows = [t.to(DEVICE) for t in (logits, *dist[:3], dist.greedy, dist.argmax)]
    expected = reference.race(*rows, **options)
    assert torch.equal(kernel.race(*rows, **options), expected)
    if case == "rows":
        noise = target_exponential(options["seeds"], options["round_start"] + 2, vocab_size)
        ids = race_winners(logits[:, :vocab_size], dist, noise.cpu())
        assert torch.equal(expected.cpu(), ids)


def test_compiles_for_sm_90():
    module = "specdec.kernels.race.kernel"
    floats = ("max", "inv_temperature", "cutoff", "best")
    longs = ("argmax", "seeds", "round_start", "cu_num_logits", "lanes")
    types = {f"{n}_ptr": "*fp32" for n in floats} | {f"{n}_ptr": "*i64" for n in longs}
    types |= {"logits_ptr": "*bf16", "greedy_ptr": "*i1", "best_id_ptr": "*i32"}
    types |= {"row_stride": "i64", "num_requests": "i32", "num_blocks": "i32"}
    types |= {"vocab_size": "i32", "offset": "i32"}
    winner = {k: types[k] for k in ("best_ptr", "best_id_ptr", "num_blocks", "greedy_ptr")}
    winner |= {"argmax_ptr": "*i64", "out_ptr": "*i64"}
    compiles = [compiling.Compile(module, "_winner", winner, {"BLOCKS": 32, "OVERLAP": True}, 1)]
    owned = [(64, False, 4096), (2**18, False, 1024)]
    for requests, mapped, size in (*owned, (0, True, 1024), (0, False, 1024)):
        constants = {"PURPOSE": 4, "BLOCK": size, "REQUESTS": requests, "MAPPED": mapped}
        constants["OVERLAP"] = True
        compiles.append(compiling.Compile(module, "_block_race", types, constants, size // 512))
    for built in compiling.compile_sm90(compiles):
        assert built.spilled == 0
