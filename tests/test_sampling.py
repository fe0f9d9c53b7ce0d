"""Distributions from logits, and the drafter's own draws."""

from types import SimpleNamespace

import battery
import pytest
import torch
from battery import mixed, neutral, ragged_dist

from specdec.kernels.row_stats.reference import row_requests
from specdec.sampling import (
    make_dist,
    prob_of,
    process_logits,
    race_winners,
    row_distribution,
    target_probs,
)
from specdec.state import INVALID_TOKEN_ID

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def dist_of(logits, vocab_size=None, **sampling):
    return ragged_dist(logits, torch.tensor([logits.shape[0]]), vocab_size, **sampling)


@pytest.mark.parametrize("dtype", DTYPES)
def test_probs_are_the_definition(dtype):
    logits, sampling = mixed(60, 37, dtype=dtype)
    dist = dist_of(logits, **sampling)
    probs = target_probs(dist)
    assert dist.logits.dtype == dtype
    assert probs.dtype == torch.float32
    raw = logits.double().softmax(-1)
    for r in range(60):
        temperature, top_k, top_p, min_p = (float(v[r]) for v in sampling.values())
        if temperature == 0:
            wanted = torch.nn.functional.one_hot(logits[r].argmax(), 37).double()
        else:
            wanted = battery.filtered(raw[r : r + 1], temperature, int(top_k), top_p, min_p)[0]
        assert torch.allclose(probs[r].double(), wanted, atol=2e-6), r
    assert torch.equal(probs, dist.probs())
    assert torch.equal(probs[[7, 3, 3]], dist.probs(torch.tensor([7, 3, 3])))


def test_record_follows_its_own_formula():
    logits, sampling = mixed(40, 50)
    dist = dist_of(logits, **sampling)
    x = (logits - dist.max[:, None]) * dist.inv_temperature[:, None]
    probs = torch.where(x >= dist.cutoff[:, None], (x - dist.lse[:, None]).exp(), 0.0)
    sampled = ~dist.greedy
    assert torch.equal(probs[sampled], target_probs(dist)[sampled])
    assert bool((x <= 0).all())
    assert torch.equal(dist.max, logits.amax(-1))
    assert torch.equal(dist.argmax, logits.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prob_of_reads_the_same_numbers(dtype):
    logits, sampling = mixed(40, 50, seed=1, dtype=dtype)
    logits[5] = torch.nan
    dist = dist_of(logits, vocab_size=47, **sampling)
    probs = target_probs(dist)
    rows = torch.arange(40)[:, None].expand(-1, 54)
    ids = torch.arange(-2, 52).expand(40, -1)
    found = prob_of(dist, rows, ids)
    assert torch.equal(found[:, 2:52], probs)
    assert found[:, :2].abs().max() == 0
    assert found[:, 49:].abs().max() == 0
    assert probs[:, 47:].abs().max() == 0
    assert probs[5].abs().max() == 0


def test_padding_columns_have_no_say():
    """Huge or NaN logits past vocab_size change nothing."""
    logits, sampling = mixed(40, 30, seed=2)
    for value in (1e4, torch.nan, torch.inf, 0.0):
        padded = torch.cat([logits, torch.full((40, 6), value)], 1)
        dist, narrow = dist_of(padded, vocab_size=30, **sampling), dist_of(logits, **sampling)
        for name in ("max", "inv_temperature", "cutoff", "lse", "greedy", "argmax"):
            assert torch.equal(getattr(dist, name), getattr(narrow, name)), name
        assert torch.equal(target_probs(dist)[:, :30], target_probs(narrow))
        assert target_probs(dist)[:, 30:].abs().max() == 0


def test_flags_promise_and_change_nothing():
    logits, sampling = mixed(40, 30, seed=3)
    plain = neutral(40) | {"temperature": sampling["temperature"]}
    with_sort, without = dist_of(logits, **plain), dist_of(logits, filters=False, **plain)
    assert torch.allclose(target_probs(with_sort), target_probs(without), atol=1e-6)
    assert bool((without.cutoff[~without.greedy] == -torch.inf).all())
    cold = {"temperature": torch.zeros(40)}
    slow, fast = dist_of(logits, **cold), dist_of(logits, all_greedy=True, **cold)
    assert fast.all_greedy
    for name in ("max", "inv_temperature", "cutoff", "lse", "greedy", "argmax"):
        assert torch.equal(getattr(slow, name), getattr(fast, name)), name
    assert torch.equal(target_probs(slow), target_probs(fast))


@pytest.mark.parametrize(("temperature", "all_greedy"), [(1.0, False), (0.0, False), (0.0, True)])
def test_rows_that_are_not_finite(temperature, all_greedy):
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    clean = logits.clone()
    logits[0], logits[1, 4], logits[2, 8], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    sampling = neutral(6, temperature) | {"top_p": torch.full((6,), 0.9)}
    dist = dist_of(logits, all_greedy=all_greedy, **sampling)
    good = dist_of(clean, all_greedy=all_greedy, **sampling)
    assert dist.argmax[:4].tolist() == [INVALID_TOKEN_ID] * 4
    probs = target_probs(dist)
    assert probs[:4].abs().max() == 0
    assert dist.cutoff[:4].tolist() == [torch.inf] * 4
    assert torch.equal(probs[4:], target_probs(good)[4:])
    assert torch.equal(dist.argmax[4:], clean.argmax(-1)[4:])


def test_minus_infinity_marks_a_forbidden_id():
    logits = torch.tensor([[0.0, -torch.inf, 1.0], [-torch.inf, -torch.inf, 2.0]])
    probs = target_probs(dist_of(logits, **neutral(2) | {"top_p": torch.full((2,), 0.999999)}))
    assert torch.allclose(probs, logits.softmax(-1), atol=1e-6)
    assert probs[0, 1] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_lowest_id_of_a_tie(dtype):
    logits = torch.zeros(3, 2000, dtype=dtype)
    logits[0, [1500, 7, 900]] = 3.0
    logits[1, [1999, 1998]] = 1.0
    for flag in (False, True):
        dist = dist_of(logits, temperature=torch.zeros(3), all_greedy=flag)
        assert dist.argmax.tolist() == [7, 1998, 0]
        assert target_probs(dist).sum(-1).tolist() == [1.0, 1.0, 1.0]
        assert target_probs(dist).argmax(-1).tolist() == [7, 1998, 0]


def test_a_lost_race_never_goes_to_a_filtered_id():
    """Draws of +inf lose to finite ones; where all kept ids drew it, the lowest of them wins."""
    logits = torch.tensor([[1.0, 9.0, 8.0, 7.0]] * 3)
    dist = dist_of(logits, top_k=torch.tensor([3, 3, 3]))
    inf = torch.inf
    races = torch.tensor([[0.1, inf, 5.0, inf], [0.1, inf, inf, inf], [1e-9, 3.0, inf, 2.0]])
    assert race_winners(logits, dist, races).tolist() == [2, 1, 1]


def test_inputs_are_left_alone():
    logits, sampling = mixed(8, 30)
    before = logits.clone()
    dist = dist_of(logits, **sampling)
    target_probs(dist)
    assert dist.logits is logits
    assert torch.equal(logits, before)


def test_process_logits_gives_each_row_its_requests_parameters():
    """Requests in slots 3, 0, 2 with 2, 0, 3 rows, and one row past the last."""
    logits, _ = mixed(6, 20, seed=4)
    state = SimpleNamespace(
        temperature=torch.tensor([0.3, 9.0, 0.0, 1.0]),
        top_k=torch.tensor([4, 9, 0, 3]),
        top_p=torch.tensor([0.9, 0.1, 1.0, 0.7]),
        min_p=torch.tensor([0.0, 0.5, 0.1, 0.05]),
    )
    batch = SimpleNamespace(
        request_slots=torch.tensor([3, 0, 2]),
        cu_num_logits=torch.tensor([0, 2, 2, 5]),
        logits_indices=torch.tensor([4, 5, 9, 10, 11, 0]),
        filters=True,
        penalties=False,
        all_greedy=False,
    )
    owners = torch.tensor([3, 3, 2, 2, 2, 2])
    dist = process_logits(logits, state, batch, vocab_size=18)
    wanted = make_dist(
        logits,
        **{name: getattr(state, name)[owners] for name in vars(state)},
        cu_num_logits=batch.cu_num_logits,
        batch_rows=batch.logits_indices,
        vocab_size=18,
    )
    for name, value in vars(dist).items():
        other = getattr(wanted, name)
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, name


def test_row_requests():
    cu = torch.tensor([0, 0, 2, 2, 5, 5])
    assert row_requests(cu, 7).tolist() == [1, 1, 3, 3, 3, 4, 4]
    assert row_requests(torch.tensor([0, 0]), 0).tolist() == []


def test_a_decode_steps_vocabulary_costs_few_passes():
    """No full sort and no second upcast where nothing is filtered: temporaries stay at three fp32
    copies of the logits."""
    from torch.profiler import ProfilerActivity, profile

    logits = torch.randn(6, 49152, dtype=torch.float32).bfloat16()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        row_distribution(logits, **neutral(6), vocab_size=49152, filters=False)
    names = {event.key for event in profiler.key_averages()}
    assert "aten::sort" not in names
    allocated = sum(
        e.self_cpu_memory_usage for e in profiler.key_averages() if e.self_cpu_memory_usage > 0
    )
    assert allocated < 3.2 * 4 * logits.numel()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        row_distribution(logits, **neutral(6, 0.0), vocab_size=49152, all_greedy=True)
    assert "aten::exp" not in {event.key for event in profiler.key_averages()}
