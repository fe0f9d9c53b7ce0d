"""The synthetic decision: the kernel equals its reference."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.synthetic import kernel, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step(num_requests, k, seed=0):
    """Ragged requests, some without rows, some with fewer pending drafts than rows."""
    rng = torch.Generator().manual_seed(seed)
    pending = torch.randint(0, k + 1, (num_requests,), generator=rng)
    rows = pending + 1
    rows[4::5] = 0
    rows[1::5] = k + 1
    cu = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    drafts = torch.randint(0, 100, (num_requests, k), generator=rng)
    drafts[torch.arange(k)[None, :] >= pending[:, None]] = -1
    accepted = (torch.rand(num_requests, generator=rng) * (pending + 1)).long()
    tokens = torch.randint(100, 200, (num_requests, k + 1), generator=rng)
    tensors = (drafts, pending, cu, torch.randperm(int(rows.sum())) + 7, tokens, accepted)
    return tuple(tensor.to(DEVICE) for tensor in tensors)


@pytest.mark.parametrize(("num_requests", "k"), [(1, 1), (7, 3), (64, 3), (33, 5), (11, 8)])
@pytest.mark.parametrize("wanted", [0, 2, 9, "each"])
def test_equals_the_reference(num_requests, k, wanted):
    args = step(num_requests, k)
    if wanted == "each":
        wanted = torch.arange(num_requests, device=DEVICE) % (k + 2)
    expected = reference.decide(wanted, *args)
    torch.use_deterministic_algorithms(True)  # fills what `empty` gives with the largest integer
    try:
        found = kernel.decide(wanted, *args)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, one, other in zip(expected._fields, expected, found, strict=True):
        assert torch.equal(one, other), name


def test_what_is_decided():
    """Two drafts stand, the rule's own last token follows, its batch rows are named."""
    decision = reference.decide(
        2,
        torch.tensor([[5, 6, 7], [8, -1, -1]]),
        torch.tensor([3, 1]),
        torch.tensor([0, 4, 6]),
        torch.tensor([10, 11, 12, 13, 20, 21]),
        torch.tensor([[99, -1, -1, -1], [8, 98, -1, -1]]),
        torch.tensor([0, 1]),
    )
    assert decision.token_ids.tolist() == [[5, 6, 99, -1], [8, 98, -1, -1]]
    assert decision.rows.tolist() == [[10, 11, 12, 12], [20, 21, 21, 21]]
    assert decision.num_accepted.tolist() == [2, 1]
    assert decision.num_sampled.tolist() == [3, 2]
    assert decision.num_rejected.tolist() == [1, 0]


def test_compiles():
    pointers = [name for name in kernel._decide.arg_names if name.endswith("_ptr")]
    signature = dict.fromkeys(pointers, "*i64")
    signature |= {"wanted": "i32", "num_requests": "i32", "num_rows": "i32"}
    module = "specdec.kernels.synthetic.kernel"
    each = [{"K": 3, "COLUMNS": 4, "PER_REQUEST": per_request} for per_request in (False, True)]
    compile_sm90([Compile(module, "_decide", signature, constants, 1) for constants in each])
