"""The drafter's own draws, and what is kept of the distributions behind them."""

import battery
import pytest
import torch
from battery import mixed, neutral

from specdec.draft_sampling import draft_prob_of, draft_probs, sample_draft
from specdec.keys import Keys, Purpose, target_exponential, uniform
from specdec.models.batch import VocabMap
from specdec.sampling import target_probs


def keys_of(n, start=12):
    return Keys(torch.arange(n) * 31 + 5, torch.full((n,), start) + torch.arange(n) % 3)


@pytest.mark.parametrize("mode", ["greedy", "sample", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_q_is_what_was_sampled_from(mode, dtype):
    """The numbers left for the verifier rebuild q to the bit, whatever the filters."""
    num_rows, vocab_size = 60, 33
    logits, sampling = mixed(num_rows, 40, seed=5, dtype=dtype)
    sample = sample_draft(
        logits, **sampling, vocab_size=vocab_size, keys=keys_of(num_rows), offset=2, mode=mode
    )
    assert bool(((sample.token_ids >= 0) & (sample.token_ids < vocab_size)).all())
    cold = sampling["temperature"] == 0
    assert torch.equal(sample.token_ids[cold], logits[cold, :vocab_size].argmax(-1))
    if mode != "sample":
        assert bool(sample.is_delta.all())
        return
    assert torch.equal(sample.is_delta, cold)
    q = battery.keep_q([sample])
    index = torch.zeros(num_rows, dtype=torch.int64)
    probs = draft_probs(q, index, 40)
    as_target = target_probs(
        battery.ragged_dist(logits, torch.tensor([num_rows]), vocab_size, **sampling)
    )
    assert torch.equal(probs[~cold], as_target[~cold])
    own = draft_prob_of(q, sample.token_ids[:, None])[:, 0]
    assert torch.equal(own, probs.gather(1, sample.token_ids[:, None])[:, 0])
    assert bool((own > 0).all())


def test_sampled_draft_takes_the_draft_stream():
    num_rows = 4000
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    keys = keys_of(num_rows)
    sample = sample_draft(
        probs.log().expand(num_rows, -1),
        **neutral(num_rows),
        vocab_size=4,
        keys=keys,
        offset=3,
        mode="sample",
    )
    draws = uniform(keys, Purpose.DRAFT, 3)
    wanted = torch.where(draws < 0.1, 0, torch.where(draws < 0.7, 2, 3))
    assert float((sample.token_ids == wanted).double().mean()) > 0.999


@pytest.mark.parametrize("mode", ["greedy", "sample", "shared"])
def test_draft_row_that_is_not_finite(mode):
    logits = torch.randn(4, 8)
    logits[1], logits[2, 3] = torch.nan, torch.inf
    sample = sample_draft(logits, **neutral(4), vocab_size=8, keys=keys_of(4), offset=0, mode=mode)
    assert sample.token_ids[[1, 2]].tolist() == [0, 0]
    assert sample.is_delta[[1, 2]].tolist() == [True, True]
    alone = sample_draft(
        logits[3:],
        **neutral(1),
        vocab_size=8,
        keys=Keys(*(k[3:] for k in keys_of(4))),
        offset=0,
        mode=mode,
    )
    assert sample.token_ids[3] == alone.token_ids[0]


def test_shared_noise_is_looked_up_by_target_id():
    """Where the reduced draft agrees with the target on its ids, it draws the target's own token
    whenever that is one of them."""
    num_rows, vocab_size = 3000, 50
    d2t = torch.arange(1, vocab_size, 3)
    t2d = torch.full((vocab_size,), -1).index_put((d2t,), torch.arange(len(d2t)))
    target = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 2
    keys, offset = keys_of(num_rows), 4
    sample = sample_draft(
        target[d2t].expand(num_rows, -1),
        **neutral(num_rows),
        vocab_size=len(d2t),
        keys=keys,
        offset=offset,
        mode="shared",
        vocab_map=VocabMap(d2t, t2d),
    )
    race = target_exponential(keys.seeds, keys.round_start + offset, vocab_size)
    tokens = (target - race.log()).argmax(-1)
    drawable = t2d[tokens] >= 0
    assert 500 < int(drawable.sum()) < 2500
    assert torch.equal(sample.token_ids[drawable], tokens[drawable])
    assert bool((t2d[sample.token_ids] >= 0).all())


def test_q_through_a_reduced_vocabulary():
    d2t, t2d = torch.tensor([1, 2, 4]), torch.tensor([-1, 0, 1, -1, 2])
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    sample = sample_draft(
        logits,
        **neutral(2),
        vocab_size=3,
        keys=keys_of(2),
        offset=0,
        mode="sample",
        vocab_map=VocabMap(d2t, t2d),
    )
    q = battery.keep_q([sample], VocabMap(d2t, t2d))
    full = torch.tensor([[0, 0.5, 0.3, 0, 0.2], [0, 0.1, 0.1, 0, 0.8]])
    assert torch.allclose(draft_probs(q, torch.zeros(2).long(), 5), full)
    padded = torch.nn.functional.pad(full, (0, 2))
    assert torch.allclose(draft_probs(q, torch.zeros(2).long(), 7), padded)
    for token in range(-1, 9):
        wanted = full[:, token] if 0 <= token < 5 else torch.zeros(2)
        found = draft_prob_of(q, torch.full((2, 1), token))[:, 0]
        assert torch.allclose(found, wanted), token


def test_drafters_unknown_mode_is_named():
    with pytest.raises(ValueError, match="'argmax' is not one of greedy, sample, shared"):
        sample_draft(
            torch.zeros(1, 3),
            **neutral(1),
            vocab_size=3,
            keys=keys_of(1),
            offset=0,
            mode="argmax",
        )
