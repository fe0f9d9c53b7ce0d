import pytest
import torch
from battery import filtered

from specdec.kernels.cutoff.reference import cutoff

OFF = -torch.inf


def scaled(probs):
    logits = torch.tensor(probs).log()
    return logits - logits.max()


def kept(row, top_k=0, top_p=1.0, min_p=0.0):
    cut = cutoff(row[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return (row >= cut).nonzero().flatten().tolist()


def test_off_is_minus_infinity():
    row = scaled([0.5, 0.3, 0.2])
    cut = cutoff(row[None], torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert cut.tolist() == [OFF]


@pytest.mark.parametrize(
    ("parameters", "ids"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 0.5}, [0]),  # met exactly
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.8}, [0, 1]),  # met exactly
        ({"top_p": 0.93}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 0.6}, [0, 1]),  # .3 / .5, met exactly
        ({"min_p": 0.61}, [0]),
        ({"min_p": 1.0}, [0]),
        # top-p sees what top-k left: .5, .3 of .8, so .6 is within .5 + .3
        ({"top_k": 2, "top_p": 0.6}, [0]),
        ({"top_k": 2, "top_p": 0.63}, [0, 1]),
        ({"top_p": 0.85, "min_p": 0.3}, [0, 1]),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.2}, [0, 1, 2]),
    ],
)
def test_order_and_boundaries(parameters, ids):
    assert kept(scaled([0.50, 0.30, 0.12, 0.08]), **parameters) == ids


@pytest.mark.parametrize(
    ("parameters", "ids"),
    [
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 1, 2]),
    ],
)
def test_ties_at_the_cutoff_are_all_kept(parameters, ids):
    assert kept(torch.tensor([0.0, -0.5, -0.5, -2.0, -2.0]), **parameters) == ids


def test_excluded_ids_neither_count_nor_come_back():
    row = torch.tensor([-torch.inf, 0.0, -1.0, -torch.inf, -2.0])
    assert kept(row, top_k=3) == [1, 2, 4]
    assert kept(row, top_p=0.9) == [1, 2]
    cut = cutoff(row[None], torch.tensor([4]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert cut.tolist() == [OFF]  # fewer real ids than k


@pytest.mark.parametrize("vocab_size", [3, 1000, 1023, 1025])
def test_random_rows_against_a_loop(vocab_size):
    """Every row has its own parameters; kept sets equal those of a restatement with loops."""
    rng = torch.Generator().manual_seed(vocab_size)
    num_rows = 24
    logits = torch.randn(num_rows, vocab_size, generator=rng) * 2
    logits[::3] = logits[::3].bfloat16().float()  # plenty of ties
    rows = logits - logits.amax(-1, keepdim=True)
    top_k = torch.randint(0, vocab_size + 2, (num_rows,), generator=rng)
    top_k[::4] = 0
    top_p = torch.rand(num_rows, generator=rng)
    top_p[1::4] = 1.0
    min_p = torch.rand(num_rows, generator=rng) * 0.2
    min_p[2::4] = 0.0
    cut = cutoff(rows, top_k, top_p, min_p)
    probs = logits.double().softmax(-1)
    for r in range(num_rows):
        wanted = filtered(
            probs[r : r + 1],
            top_k=int(top_k[r]),
            top_p=float(top_p[r]),
            min_p=float(min_p[r]),
        )
        assert torch.equal(rows[r] >= cut[r], wanted[0] > 0), r
        alone = cutoff(rows[r : r + 1], top_k[r : r + 1], top_p[r : r + 1], min_p[r : r + 1])
        assert torch.equal(alone[0], cut[r])
