"""Speculation changes speed and nothing else: greedy output equals plain decoding."""

from functools import partial

import pytest
import torch
from drafters import adversary, mixed, oracle, scripted
from running import requests, tiny_engine
from tiny import tiny_draft, tiny_target

from specdec.generate import generate
from specdec.propose.autoregressive import autoregressive
from specdec.propose.ngram import ngram
from specdec.verify.delta import delta
from specdec.verify.greedy import greedy
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 9, [50, 60, 70, 80], [4, 4, 5, 5, 4, 4, 5]]
RULES = [greedy, rejection, delta, gumbel]


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return ids_of(generate(tiny_engine(target), requests(PROMPTS, max_tokens=24)))


def ids_of(results):
    return [r.token_ids for r in results]


def run(target, draft=None, max_tokens=24, prompts=PROMPTS, **options):
    return generate(tiny_engine(target, draft, **options), requests(prompts, max_tokens=max_tokens))


def naive_greedy(target, prompt, max_tokens, eos):
    """No cache, one token at a time: the whole text is run again for every token."""
    from tiny import new_cache, prefill

    text = list(prompt)
    while len(text) < len(prompt) + max_tokens and text[-1] not in eos:
        cache = new_cache(target, 40, 4)
        hidden = prefill(target, [text], cache, 4)[0][-1:]
        text.append(int(target.logits(hidden)[0, : target.vocab_size].argmax()))
    return tuple(text[len(prompt) :])


def test_plain_equals_a_cacheless_loop(target, plain):
    for prompt, ids in zip(PROMPTS[:3], plain, strict=False):
        assert ids == naive_greedy(target, prompt, 24, {2})


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_eagle_equals_plain(target, plain, rule, k):
    results = run(target, tiny_draft(target), propose=autoregressive, verify=rule, k=k)
    assert ids_of(results) == plain


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
def test_sampled_drafts_equal_plain_at_temperature_zero(target, plain, rule):
    options = {"propose": autoregressive, "verify": rule, "draft_sampling": "sample"}
    assert ids_of(run(target, tiny_draft(target), **options)) == plain


@pytest.mark.parametrize("k", [1, 4])
def test_ngram_equals_plain(target, plain, k):
    results = run(target, propose=ngram, k=k, min_ngram=1, max_ngram=3)
    assert ids_of(results) == plain
    assert sum(r.accepted for result in results for r in result.rounds) > 0


@pytest.mark.parametrize("pattern", [oracle, adversary, mixed], ids=lambda p: p.__name__)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_scripted_drafters(target, plain, pattern, batch, k):
    texts = {tuple(p): [*p, *ids] for p, ids in zip(PROMPTS, plain, strict=True)}
    results = run(
        target, propose=scripted(texts, 101, pattern), k=k, max_num_seqs=batch, verify=rejection
    )
    assert ids_of(results) == plain
    rounds = [r for result in results for r in result.rounds]
    if pattern is oracle:
        assert all(r.accepted == min(r.drafted, r.committed) for r in rounds)
    if pattern is adversary:
        assert all(r.accepted == 0 and r.committed == 1 for r in rounds)


@pytest.mark.parametrize("budget", [4, 7, 13])
def test_chunked_prefill_equals_whole(target, plain, budget):
    results = run(target, tiny_draft(target), propose=autoregressive, max_num_batched_tokens=budget)
    assert ids_of(results) == plain


def test_mixed_sampled_neighbours_leave_greedy_rows_alone(target, plain):
    engine = tiny_engine(
        target, tiny_draft(target), propose=autoregressive, draft_sampling="sample"
    )
    hot = requests(PROMPTS, max_tokens=16, temperature=1.0, top_p=0.9)
    cold = requests(PROMPTS, max_tokens=24)
    results = generate(engine, [x for pair in zip(hot, cold, strict=True) for x in pair])
    assert ids_of(results[1::2]) == plain


def test_blocks_come_back(target):
    engine = tiny_engine(target, tiny_draft(target), propose=autoregressive)
    free = sorted(engine.pool.free)
    generate(engine, requests(PROMPTS, max_tokens=10))
    assert sorted(engine.pool.free) == free
    assert sorted(engine.free_slots) == list(range(8))


def test_preemption_equals_plain(target, plain):
    """A cache that holds 1.5 requests: the younger is preempted and recomputed."""
    prompts = [PROMPTS[0], PROMPTS[3]]
    want = ids_of(run(target, max_tokens=64, prompts=prompts, eos=()))
    engine = tiny_engine(
        target,
        tiny_draft(target),
        propose=autoregressive,
        num_blocks=27,
        max_model_len=72,
        eos=(),
    )
    free = sorted(engine.pool.free)
    results = generate(engine, requests(prompts, max_tokens=64))
    assert engine.num_preemptions > 0
    assert ids_of(results) == want
    assert sorted(engine.pool.free) == free


@pytest.mark.parametrize("noise", ["independent", "shared"])
@pytest.mark.parametrize("k", [1, 4])
def test_gumbel_equals_plain_sampling(target, noise, k):
    """Token for token, for any K and drafter."""
    rule = partial(gumbel, noise=noise)
    sampling = {"max_tokens": 24, "temperature": 1.3, "top_p": 0.95}
    asked = [r for s in range(2) for r in requests(PROMPTS, seed=s, **sampling)]
    want = ids_of(generate(tiny_engine(target, verify=rule), asked))
    mode = "shared" if noise == "shared" else "sample"
    engine = tiny_engine(target, tiny_draft(target), autoregressive, rule, k=k, draft_sampling=mode)
    assert ids_of(generate(engine, asked)) == want
    assert ids_of(generate(tiny_engine(target, None, ngram, rule, k=k), asked)) == want


def test_draft_cache_holds_the_target_hidden_states(target):
    """After steps with rejections, the head's keys equal a fresh teacher-forced pass (K2)."""
    draft = tiny_draft(target)
    engine = tiny_engine(target, draft, autoregressive, eos=())
    engine.add(requests([PROMPTS[1]], max_tokens=60)[0])
    rounds = []
    while len(rounds) < 12:
        rounds += [o.round for o in engine.step() if o.round]
    assert sum(r.accepted < r.drafted for r in rounds) > 0
    text = engine.running[0].token_ids
    fresh = tiny_engine(target, draft, autoregressive, eos=())
    fresh.add(requests([text], max_tokens=5)[0])
    while not fresh.step():
        pass
    # the fresh run has computed every position of `text`; the last one pairs with its own sample
    for cache, other in zip(engine.draft.cache.keys, fresh.draft.cache.keys, strict=True):
        rows = [
            torch.cat([c[b] for b in e.state.block_tables[e.running[0].slot]])[: len(text) - 2]
            for c, e in ((cache, engine), (other, fresh))
        ]
        assert (rows[0] - rows[1]).abs().max() <= 1e-5
