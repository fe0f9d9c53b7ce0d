"""The step's bookkeeping in Triton: every integer equal to the reference's, on random states."""

import random

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec import state as records
from specdec.kernels.step import draft_programs, kernel, programs, reference

device = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 4
CASES = [(0, 1, 0), (1, 1, 1), (2, 5, 3), (3, 9, 4), (4, 3, 2), (5, 6, 7)]  # seed, requests, K


def ints(values):
    return torch.tensor(values, dtype=torch.int64, device=device)


def random_state(rng, num_slots, k, longest=40):
    """Requests anywhere in their prompt, or with drafts pending, or ended; the last slot is the
    padding requests'."""
    fields = {name: [] for name in ("num_tokens", "num_computed_tokens", "num_drafts", "max_len")}
    finish = []
    for slot in range(num_slots):
        length = rng.randint(1, longest - k - 1)
        prefill = rng.random() < 0.4
        fields["num_tokens"].append(length)
        fields["num_computed_tokens"].append(rng.randint(0, length - 1) if prefill else length - 1)
        fields["num_drafts"].append(0 if prefill else rng.randint(0, k))
        fields["max_len"].append(length + rng.randint(1, k + 4))
        ended = slot == num_slots - 1 or rng.random() < 0.2
        finish.append(rng.randint(1, 4) if ended else 0)
    blocks = -(-(longest + 2 * k + 1) // BLOCK_SIZE)
    drafts = [[rng.randint(0, 99) for _ in range(k)] for _ in range(num_slots)]
    for row, pending in zip(drafts, fields["num_drafts"], strict=True):
        row[pending:] = [-1] * (k - pending)
    return {name: ints(values) for name, values in fields.items()} | {
        "finish_reason": ints(finish),
        "token_ids": torch.randint(0, 99, (num_slots, longest + k + 1), device=device),
        "draft_token_ids": ints(drafts).view(num_slots, k),
        "draft_is_delta": torch.rand(num_slots, k, device=device) < 0.5,
        "seeds": torch.randint(0, 1 << 60, (num_slots,), device=device),
        "block_tables": torch.randint(1, 999, (num_slots, blocks), device=device),
        "ignore_eos": torch.rand(num_slots, device=device) < 0.3,
        "eos_token_ids": ints([7, 8]),
    }


def case(seed, num_requests, k):
    """A state and a plan over it: rows of decoding requests and chunks, then two of padding."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_slots = num_requests + 3
    state = random_state(rng, num_slots, k)
    slots = [*rng.sample(range(num_slots - 1), num_requests), num_slots - 1, num_slots - 1]
    lens, logits = [], []
    for slot in slots[:-2]:
        left = int(state["num_tokens"][slot] - state["num_computed_tokens"][slot])
        whole = left == 1 or rng.random() < 0.7
        lens.append(left + k if whole else rng.randint(1, left))
        logits.append(k + 1 if whole else 0)
    lens += [1, rng.randint(1, 200)]
    logits += [0, rng.randint(0, 2 * k)]
    return rng, state, ints([slots, lens, logits])


def pick(state, names):
    return {name: state[name] for name in names.split()}


PREPARE = (
    "token_ids num_tokens num_computed_tokens finish_reason draft_token_ids draft_is_delta "
    "num_drafts seeds block_tables"
)
TRIM = "eos_token_ids ignore_eos max_len num_tokens num_computed_tokens num_drafts finish_reason"
UPDATE = (
    "token_ids max_len num_tokens num_computed_tokens finish_reason draft_token_ids draft_is_delta "
    "num_drafts"
)


def prepared(op, state, rows):
    sizes = {"num_rows": int(rows[1].sum()), "num_logits": int(rows[2].sum())}
    longest = int(rows[1].max())
    given = pick(state, PREPARE)
    return op.prepare_step(rows, **sizes, max_query_len=longest, block_size=BLOCK_SIZE, **given)


def spread(tensor):
    """The same numbers with gaps between them, as a stage of somebody's own may return them."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def equal(mine, theirs):
    for name, want in theirs._asdict().items():
        got = getattr(mine, name)
        assert got.dtype == want.dtype, name
        assert torch.equal(got, want), name


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that a kernel is to write holds -7 and True beforehand."""

    def poisoned(make):
        return lambda *args, **keywords: make(*args, **keywords).fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


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


def verified(rng, state, rows, k):
    """A random verification: token ids with ends of sequence and invalid ones, and its rows."""
    num_requests = rows.shape[1]
    num_sampled = ints([rng.randint(1, k + 1) if n else 0 for n in rows[2].tolist()])
    common = [7, 50, 51, 52, 53, 54, -2]
    tokens = ints([[rng.choice(common) for _ in range(k + 1)] for _ in range(num_requests)])
    tokens[torch.arange(k + 1, device=device) >= num_sampled[:, None]] = -1
    batch_rows = torch.randint(0, int(rows[1].sum()), tokens.shape, device=device)
    return tokens, batch_rows, (num_sampled - 1).clamp(min=0), num_sampled


@pytest.mark.parametrize(("seed", "num_requests", "k"), CASES)
def test_outcome_is_trimmed_written_and_passed_on(seed, num_requests, k):
    """`trim`, then what drafting reads of it, then `post_update_`, each on the same inputs."""
    rng, state, rows = case(seed, num_requests, k)
    step = prepared(reference, state, rows)
    about = {"request_slots": rows[0], "query_start": step.query_start}
    given = verified(rng, state, rows, k)
    trimmed = about | {"seq_lens": step.seq_lens} | pick(state, TRIM)
    committed = reference.trim(*given, **trimmed)
    equal(kernel.trim(*map(spread, given), **trimmed), committed)

    inputs = about | {"positions": step.positions, "max_query_len": int(rows[1].max())}
    inputs |= pick(state, "token_ids num_tokens")
    want = reference.prepare_eagle_inputs(committed, **inputs)
    scattered = reference.Committed(*map(spread, committed))
    for mine, theirs in zip(kernel.prepare_eagle_inputs(scattered, **inputs), want, strict=True):
        assert torch.equal(mine, theirs)

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
    step = prepared(reference, state, rows)
    args = (step.positions, step.row_valid, step.seq_lens, step.block_tables)
    sizes = {"query_start": step.query_start, "max_query_len": int(rows[1].max())}
    sizes |= {"depth": depth, "block_size": BLOCK_SIZE}
    want = reference.moved_back(*args, **sizes)
    for mine, theirs in zip(kernel.moved_back(*args, **sizes), want, strict=True):
        assert torch.equal(mine, theirs)


BOOLS = {
    "row_valid_ptr",
    "draft_is_delta_ptr",
    "out_row_valid",
    "out_draft_is_delta",
    "ignore_eos_ptr",
}
BOOLS |= {"is_delta_ptr"}


def test_compiles_for_hopper():
    constants = {
        "prepare_step": {"K": 3, "BLOCK_SIZE": 16, "TILE": 16, "REQUESTS": 64, "K_PAD": 4},
        "num_sampled_and_rejected": {"TILE": 128},
        "trim": {"NUM_EOS": 2, "W": 4, "W_PAD": 4},
        "post_update": {"COUNTS": True, "W": 4, "P": 3, "K": 3, "W_PAD": 4, "K_PAD": 4},
        "eagle_inputs": {"W": 4, "TILE": 16},
        "move_back": {"DEPTH": 1, "BLOCK_SIZE": 16, "TILE": 16},
        "eagle_decode": {"DEPTHS": 1, "BLOCK_SIZE": 16, "TILE": 128},
    }
    compiles = []
    for name, known in constants.items():
        file = "programs" if hasattr(programs, name) else "draft_programs"
        program = getattr(programs if file == "programs" else draft_programs, name)
        names = [n for n in program.arg_names if n not in known]
        signature = {n: "*i1" if n in BOOLS else "*i64" for n in names}
        scalars = ("stride", "num_requests", "columns")
        signature |= {n: "i32" for n in names if n.endswith(scalars)}
        if name == "post_update":
            signature["counts_ptr"] = "*i32"
        compiles.append(Compile(f"specdec.kernels.step.{file}", name, signature, known, 1))
    assert all(result.spilled == 0 for result in compile_sm90(compiles))
