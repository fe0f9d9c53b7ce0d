"""A draft head's rows in Triton: every integer equal to the reference's, on random states."""

import pytest
import torch
from compiling import compile_sm90
from step_cases import (
    BLOCK_SIZE,
    CASES,
    case,
    compiles,
    device,
    equal,
    ints,
    pick,
    poison,
    prepared,
    spread,
    verified,
)

from specdec.kernels.draft_rows import kernel, programs, reference
from specdec.kernels.step import reference as step_reference
from specdec.kernels.step.bench import TRIM


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize(("seed", "num_requests", "k"), CASES)
def test_prepare_eagle_inputs(seed, num_requests, k):
    rng, state, rows = case(seed, num_requests, k)
    step = prepared(step_reference, state, rows)
    about = {"request_slots": rows[0], "query_start": step.query_start}
    trimmed = about | {"seq_lens": step.seq_lens} | pick(state, TRIM)
    committed = step_reference.trim(*verified(rng, state, rows, k), **trimmed)
    inputs = about | {"positions": step.positions, "max_query_len": int(rows[1].max())}
    inputs |= pick(state, "token_ids num_tokens")
    want = reference.prepare_eagle_inputs(committed, **inputs)
    scattered = step_reference.Committed(*map(spread, committed))
    for mine, theirs in zip(kernel.prepare_eagle_inputs(scattered, **inputs), want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("num_depths", [1, 2, 3])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 5, 8])
def test_prepare_eagle_decode(num_draft_tokens, num_depths):
    torch.manual_seed(num_depths)
    last = ints([0, 1, 9, 17, 3])
    tables = torch.randint(1, 99, (5, 8), device=device)
    sizes = {"num_draft_tokens": num_draft_tokens, "num_depths": num_depths}
    want = reference.prepare_eagle_decode(last, tables, **sizes, block_size=BLOCK_SIZE)
    got = kernel.prepare_eagle_decode(last, tables, **sizes, block_size=BLOCK_SIZE)
    assert len(got) == max(0, num_draft_tokens - 1)
    for mine, theirs in zip(got, want, strict=True):
        equal(mine, theirs)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("seed", "num_requests", "k"), CASES)
def test_moved_back(seed, num_requests, k, depth):
    _, state, rows = case(seed, num_requests, k)
    step = prepared(step_reference, state, rows)
    args = (step.positions, step.row_valid, step.seq_lens, step.block_tables)
    sizes = {"query_start": step.query_start, "max_query_len": int(rows[1].max())}
    sizes |= {"depth": depth, "block_size": BLOCK_SIZE}
    want = reference.moved_back(*args, **sizes)
    for mine, theirs in zip(kernel.moved_back(*args, **sizes), want, strict=True):
        assert torch.equal(mine, theirs)


def test_compiles_for_hopper():
    constants = {
        "eagle_inputs": {"W": 4, "TILE": 16},
        "move_back": {"DEPTH": 1, "BLOCK_SIZE": 16, "TILE": 16},
        "eagle_decode": {"DEPTHS": 1, "BLOCK_SIZE": 16, "TILE": 128},
    }
    results = compile_sm90(compiles(programs, constants))
    assert all(result.spilled == 0 for result in results)
