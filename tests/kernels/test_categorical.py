import pytest
import torch
from scipy.stats import chisquare

from specdec.kernels.categorical.reference import BLOCK, _first_past, categorical


def grid(n):
    return (torch.arange(n) + 0.5) / n


@pytest.mark.parametrize("size", [1, 3, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 49152])
def test_quantiles_are_those_of_a_plain_cumulative_sum(size):
    rng = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=rng) * (torch.rand(size, generator=rng) < 0.5)
    weights[size // 2] = 5.0
    uniforms = grid(64)
    drawn = categorical(weights.expand(64, -1), uniforms)
    below = weights.double().cumsum(0)
    quantile = uniforms.double() * below[-1]
    # the id's interval holds the quantile, up to the rounding of fp32 sums
    slack = 1e-5 * float(below[-1])
    assert bool((below[drawn] >= quantile - slack).all())
    assert bool((below[drawn] - weights[drawn] <= quantile + slack).all())
    assert bool((weights[drawn] > 0).all())


def test_frequencies():
    weights = torch.tensor([0.0, 2.0, 0.0, 5.0, 1.0, 0.0])
    uniforms = torch.rand(80_000, generator=torch.Generator().manual_seed(0))
    drawn = categorical(weights.expand(80_000, -1), uniforms)
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert chisquare(counts[[1, 3, 4]], [20_000, 50_000, 10_000]).pvalue > 1e-4


@pytest.mark.parametrize("size", [5, 2 * BLOCK + 7])
@pytest.mark.parametrize("place", [0, 2, -1])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_single_positive_id_wins_for_every_uniform(size, place, scale):
    weights = torch.zeros(size)
    weights[place] = scale
    uniforms = torch.tensor([0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
    expected = place % size
    assert categorical(weights.expand(4, -1), uniforms).unique().tolist() == [expected]


def test_extreme_uniforms_stay_on_positive_ids():
    """Many tiny weights whose fp32 sums round: the last quantile falls on the last positive id."""
    rng = torch.Generator().manual_seed(1)
    weights = torch.rand(20, 5 * BLOCK + 3, generator=rng).pow(30)
    weights[:, :7] = 0
    weights[:, -9:] = 0
    for uniform in (0.0, 1 - 2.0**-24):
        drawn = categorical(weights, torch.full((20,), uniform))
        assert bool((weights.gather(1, drawn[:, None]) > 0).all())


def test_rounded_sums_never_expose_an_id_of_weight_zero():
    """A scan may round a sum above its successor's, and a quantile may reach the last sum."""
    weights = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    cumulative = torch.tensor([[0.5, 0.5 + 2.0**-24, 1.0, 1.0]])
    drawn = [int(_first_past(torch.tensor([q]), cumulative, weights)) for q in (0.4, 0.5, 1.0)]
    assert drawn == [0, 2, 2]


def test_all_zero_weights_give_an_id_in_range():
    drawn = categorical(torch.zeros(2, 2 * BLOCK), torch.tensor([0.0, 0.9]))
    assert bool(((drawn >= 0) & (drawn < 2 * BLOCK)).all())


def test_rows_do_not_see_each_other():
    rng = torch.Generator().manual_seed(2)
    weights = torch.rand(6, 3000, generator=rng)
    uniforms = torch.rand(6, generator=rng)
    together = categorical(weights, uniforms)
    alone = [int(categorical(weights[i : i + 1], uniforms[i : i + 1])) for i in range(6)]
    assert together.tolist() == alone
