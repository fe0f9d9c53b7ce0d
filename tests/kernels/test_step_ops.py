"""The step's bookkeeping in Triton: every integer equal to the reference's, on random states."""

import random

import pytest
import torch
from compiling import compile_sm90
from step_cases import (
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

from specdec import state as records
from specdec.kernels.step import kernel, programs, reference
from specdec.kernels.step.bench import TRIM, UPDATE


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def test_constants_are_those_of_the_records():
    assert reference.PLACEHOLDER == records.PLACEHOLDER_TOKEN_ID
    assert reference.INVALID == records.INVALID_TOKEN_ID
    reasons = records.FinishReason
    assert (reference.RUNNING, reference.STOP) == (reasons.RUNNING, reasons.STOP)
    assert (reference.LENGTH, reference.ERROR) == (reasons.LENGTH, reasons.ERROR)
    assert reference.NULL_SLOT == records.NULL_BLOCK * 16


@pytest.mark.parametrize(("seed", "num_requests", "k"), CASES)
def test_prepare_step(seed, num_requests, k):
    _, state, rows = case(seed, num_requests, k)
    want = prepared(reference, state, rows)
    equal(prepared(kernel, state, rows), want)
    if num_requests > 1:
        assert want.row_valid.any()
    assert not want.row_valid[want.query_start[-3] :].any()


@pytest.mark.parametrize(("seed", "num_requests", "k"), CASES)
def test_num_sampled_and_rejected(seed, num_requests, k):
    rng = random.Random(seed)
    drafts = ints([rng.randint(0, k) for _ in range(num_requests)])
    accepted = ints([rng.randint(0, int(n)) for n in drafts])
    cu_num_logits = ints([0, *(rng.choice([0, k + 1]) for _ in range(num_requests))]).cumsum(0)
    args = (accepted, drafts, cu_num_logits)
    want = reference.get_num_sampled_and_rejected(*args)
    for mine, theirs in zip(kernel.get_num_sampled_and_rejected(*args), want, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(want[0] + want[1], torch.where(cu_num_logits.diff() > 0, drafts + 1, 0))


@pytest.mark.parametrize(("seed", "num_requests", "k"), CASES)
def test_outcome_is_trimmed_and_written(seed, num_requests, k):
    rng, state, rows = case(seed, num_requests, k)
    step = prepared(reference, state, rows)
    given = verified(rng, state, rows, k)
    trimmed = {"request_slots": rows[0], "query_start": step.query_start}
    trimmed |= {"seq_lens": step.seq_lens} | pick(state, TRIM)
    committed = reference.trim(*given, **trimmed)
    equal(kernel.trim(*map(spread, given), **trimmed), committed)

    scattered = reference.Committed(*map(spread, committed))
    proposed = rng.randint(0, k)
    drafts = torch.randint(0, 99, (rows.shape[1], proposed), device=device)
    is_delta = torch.rand(drafts.shape, device=device) < 0.5
    num_proposed = ints([rng.randint(0, proposed) for _ in range(rows.shape[1])])
    args = (committed, drafts, is_delta, num_proposed)
    args = (*args[:2], is_delta.index_fill(0, ints([len(is_delta) - 2]), True), num_proposed)
    args[2][-1] = args[2][-2]  # padding requests write one slot; they all propose the same
    states = []
    for op in (reference, kernel):
        mine = {name: tensor.clone() for name, tensor in pick(state, UPDATE).items()}
        mine["output_bin_counts"] = torch.zeros(len(state["seeds"]), 99, device=device).int()
        proposal = map(spread, args[1:])
        report = op.post_update_(scattered, *proposal, request_slots=rows[0], **mine)
        states.append((report, mine))
    (want_report, theirs), (report, mine) = states
    assert torch.equal(report, want_report)
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    assert int(theirs["output_bin_counts"].sum()) == 2 * int(committed.num_committed.sum())


def test_compiles_for_hopper():
    constants = {
        "prepare_step": {"K": 3, "BLOCK_SIZE": 16, "TILE": 16, "REQUESTS": 64, "K_PAD": 4},
        "num_sampled_and_rejected": {"TILE": 128},
        "trim": {"NUM_EOS": 2, "W": 4, "W_PAD": 4},
        "post_update": {"COUNTS": True, "W": 4, "P": 3, "K": 3, "W_PAD": 4, "K_PAD": 4},
    }
    results = compile_sm90(compiles(programs, constants))
    assert all(result.spilled == 0 for result in results)
