"""Rollback of recurrent states: rejected rows leave no trace, whatever the engine does."""

import pytest
import tiny
import tiny_qwen3_next as tiny_next
import torch
from drafters import adversary, mixed, oracle, scripted
from running import requests, tiny_engine
from snapshots import snapshot_target

from specdec.generate import generate
from specdec.models import delta_windows
from specdec.models.deltanet import DeltaNet
from specdec.propose.ngram import ngram
from specdec.schedule import schedule
from specdec.verify.rejection import rejection

PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 9, [50, 60, 70, 80], [4, 4, 5, 5, 4, 4, 5]]
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def target():
    return tiny_next.tiny_target()


@pytest.fixture(scope="module")
def plain(target):
    return ids_of(generate(tiny_engine(target, eos=()), requests(PROMPTS, max_tokens=MAX_TOKENS)))


@pytest.fixture(scope="module")
def texts(plain):
    return {tuple(p): [*p, *ids] for p, ids in zip(PROMPTS, plain, strict=True)}


def ids_of(results):
    return [r.token_ids for r in results]


def run(target, prompts=PROMPTS, max_tokens=MAX_TOKENS, **options):
    engine = tiny_engine(target, **{"eos": (), "verify": rejection} | options)
    return generate(engine, requests(prompts, max_tokens=max_tokens))


def test_plain_equals_a_cacheless_loop(target, plain):
    for prompt, ids in zip(PROMPTS[:2], plain, strict=False):
        text = [*prompt, *ids]
        cache = tiny.new_cache(target, 40, 4)
        logits = target.logits(tiny.prefill(target, [text[:-1]], cache, 4)[0])
        assert logits[len(prompt) - 1 :, :101].argmax(dim=1).tolist() == list(ids)


@pytest.mark.parametrize("pattern", [oracle, adversary, mixed], ids=lambda p: p.__name__)
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_scripted_drafters_equal_plain(target, plain, texts, pattern, batch, k):
    results = run(target, propose=scripted(texts, 101, pattern), k=k, max_num_seqs=batch)
    assert ids_of(results) == plain
    rounds = [r for result in results for r in result.rounds]
    if pattern is oracle:
        assert all(r.accepted == min(r.drafted, r.committed) for r in rounds)
    if pattern is adversary:
        assert all(r.accepted == 0 for r in rounds)


@pytest.mark.parametrize("batch", [1, 5])
def test_ngram_equals_plain(target, plain, batch):
    results = run(target, propose=ngram, k=4, max_num_seqs=batch, min_ngram=1, max_ngram=3)
    assert ids_of(results) == plain
    assert sum(r.drafted > r.accepted for result in results for r in result.rounds) > 0


def test_dense_family_equals_plain():
    target = tiny_next.tiny_target(config=tiny_next.dense_settings())
    want = ids_of(run(target, max_tokens=12))
    texts = {tuple(p): [*p, *ids] for p, ids in zip(PROMPTS, want, strict=True)}
    assert ids_of(run(target, propose=scripted(texts, 101, mixed), max_tokens=12)) == want


@pytest.mark.parametrize("budget", [4, 7, 13])
def test_chunked_prefill_equals_whole(target, plain, texts, budget):
    """Chunks shorter than, as long as and longer than the window, beside decoding rows."""
    propose = scripted(texts, 101, mixed)
    assert ids_of(run(target, propose=propose, max_num_batched_tokens=budget)) == plain


def test_preemption_equals_plain(target):
    """A cache that holds 1.5 requests: the younger is preempted with drafts pending and starts
    anew, in whatever slot it gets."""
    prompts = [PROMPTS[0], PROMPTS[3]]
    want = ids_of(run(target, prompts, max_tokens=64))
    texts = {tuple(p): [*p, *ids] for p, ids in zip(prompts, want, strict=True)}
    engine = tiny_engine(
        target, propose=scripted(texts, 101, mixed), num_blocks=27, max_model_len=72, eos=()
    )
    assert ids_of(generate(engine, requests(prompts, max_tokens=64))) == want
    assert engine.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.interpreter
def test_kernels_equal_plain(target, plain, texts):
    """Chunks and windows on the Triton kernels."""
    propose, prompts = scripted(texts, 101, mixed), PROMPTS[:2]
    results = run(target, prompts, propose=propose, max_num_batched_tokens=13, kernels="triton")
    assert ids_of(results) == plain[:2]


def varying(numbers):
    """The scheduler with another K at every step, over and over."""
    calls = {"n": 0}

    def stage(requests_, limits, *, num_draft_tokens, **keywords):
        k = numbers[calls["n"] % len(numbers)]
        calls["n"] += 1
        assert k <= num_draft_tokens
        return schedule(requests_, limits, num_draft_tokens=k, **keywords)

    return stage


def engine_with_schedule(target, propose, numbers, **options):
    engine = tiny_engine(target, propose=propose, eos=(), **options)
    stage = varying(numbers)
    bound = engine.stages.schedule.keywords
    engine.stages = engine.stages._replace(
        schedule=lambda requests_, limits: stage(requests_, limits, **bound)
    )
    return engine


@pytest.mark.parametrize("pattern", [oracle, mixed], ids=lambda p: p.__name__)
@pytest.mark.parametrize("numbers", [(3, 0, 0, 3, 1, 3), (0, 2), (3, 3, 0, 0, 0, 1)], ids=str)
def test_k_falls_to_0_and_comes_back(target, plain, texts, pattern, numbers):
    engine = engine_with_schedule(target, scripted(texts, 101, pattern), numbers)
    results = generate(engine, requests(PROMPTS, max_tokens=MAX_TOKENS))
    assert ids_of(results) == plain
    drafted = [r.drafted for result in results for r in result.rounds]
    assert {0, max(numbers)} <= set(drafted)


def states_of(engine, sequence, layer):
    """One request's state and convolution inputs after its computed tokens."""
    cache, config = engine.target.cache, engine.target.model.config
    mixers = [x.mixer for x in engine.target.model.params.layers if isinstance(x.mixer, DeltaNet)]
    slot = torch.tensor([sequence.slot])
    states, stored = cache.states[layer][slot], cache.stored[layer][slot]
    count = torch.tensor([sequence.num_computed]) - cache.window_start[slot]
    assert 0 <= count.item() <= stored.shape[1] - (config.delta.conv_width - 1)
    state, before = delta_windows.fold(mixers[layer], config.delta, states, stored, count)
    return state[0], before[0, :, : config.delta.num_channels]


@pytest.mark.parametrize("numbers", [(3,), (3, 0, 0, 3, 1, 3)], ids=str)
@pytest.mark.parametrize(("budget", "distinct"), [(64, 3), (9, 2)])  # 9 rows: two rounds of K = 3
def test_states_equal_a_token_by_token_run(target, plain, texts, numbers, budget, distinct):
    """After every step, for every request and layer: the state and the convolution's inputs are
    those of a run over the committed tokens alone, one at a time."""
    alone = snapshot_target(target)
    expected = {}
    for prompt, ids in zip(PROMPTS, plain, strict=True):
        cache = tiny.new_cache(alone, 40, 4)
        for position, token_id in enumerate([*prompt, *ids]):
            step = tiny.Step([token_id], position, list(range(1, 20)), slot=0)
            alone.forward(tiny.make_batch([step], 4), cache)
        expected[tuple(prompt)] = [layer[0] for layer in cache.layers]

    engine = engine_with_schedule(
        target, scripted(texts, 101, mixed), numbers, max_num_batched_tokens=budget
    )
    for request in requests(PROMPTS, max_tokens=MAX_TOKENS):
        engine.add(request)
    rejections, checked = set(), 0
    while engine.has_unfinished:
        outputs = engine.step()
        rounds = [o.round for o in outputs if o.round and not o.finish_reason]
        rejections.add(tuple(sorted(r.drafted - r.accepted for r in rounds)))
        for sequence in engine.running:
            for layer, snapshots in enumerate(expected[sequence.request.prompt_ids]):
                state, before = states_of(engine, sequence, layer)
                inputs, want = snapshots[sequence.num_computed]
                torch.testing.assert_close(state, want, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(before, inputs, rtol=1e-4, atol=1e-5)
                checked += 1
    assert checked > 100
    assert any(len(set(step)) >= distinct for step in rejections)  # one step, different rejections


@pytest.mark.parametrize("numbers", [(3,), (3, 0, 0, 3, 1, 3)], ids=str)
def test_snapshots_give_the_same_tokens(target, plain, texts, numbers):
    """The reference way of rolling back, in the engine's place of the windows."""
    propose = scripted(texts, 101, mixed)
    engine = engine_with_schedule(snapshot_target(target), propose, numbers)
    assert ids_of(generate(engine, requests(PROMPTS, max_tokens=MAX_TOKENS))) == plain


def test_a_failed_request_leaves_nothing_in_its_slot(target):
    """NaN in a request's states does not reach the next one in the slot, nor its neighbour."""
    want = ids_of(run(target, PROMPTS[:2], max_tokens=8))
    engine = tiny_engine(target, eos=(), max_num_seqs=2)
    engine.add(requests([PROMPTS[2]], max_tokens=8)[0])
    engine.step()
    for tensor in (*engine.target.cache.states, *engine.target.cache.stored):
        tensor[engine.running[0].slot] = float("nan")
    outputs = engine.step()
    assert [o.finish_reason for o in outputs] == ["error"]
    assert ids_of(generate(engine, requests(PROMPTS[:2], max_tokens=8))) == want
