"""Random states and plans of a step, for tests of what runs around its models."""

import random

import torch
from compiling import Compile

from specdec.kernels.step.bench import PREPARE

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


def verified(rng, state, rows, k):
    """A random verification: token ids with ends of sequence and invalid ones, and its rows."""
    num_requests = rows.shape[1]
    num_sampled = ints([rng.randint(1, k + 1) if n else 0 for n in rows[2].tolist()])
    common = [7, 50, 51, 52, 53, 54, -2]
    tokens = ints([[rng.choice(common) for _ in range(k + 1)] for _ in range(num_requests)])
    tokens[torch.arange(k + 1, device=device) >= num_sampled[:, None]] = -1
    batch_rows = torch.randint(0, int(rows[1].sum()), tokens.shape, device=device)
    return tokens, batch_rows, (num_sampled - 1).clamp(min=0), num_sampled


def poison(monkeypatch):
    """Memory that a kernel is to write holds -7 and True beforehand."""

    def poisoned(make):
        return lambda *args, **keywords: make(*args, **keywords).fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


BOOLS = {
    "row_valid_ptr",
    "draft_is_delta_ptr",
    "is_delta_ptr",
    "out_row_valid",
    "out_draft_is_delta",
    "ignore_eos_ptr",
}


def compiles(module, constants):
    """`Compile`s of the programs of a module by their constants, integers of a step all."""
    made = []
    for name, known in constants.items():
        names = [n for n in getattr(module, name).arg_names if n not in known]
        signature = {n: "*i1" if n in BOOLS else "*i64" for n in names}
        scalars = ("stride", "num_requests", "columns")
        signature |= {n: "i32" for n in names if n.endswith(scalars)}
        signature |= {n: "*i32" for n in names if n == "counts_ptr"}
        made.append(Compile(module.__name__, name, signature, known, 1))
    return made
