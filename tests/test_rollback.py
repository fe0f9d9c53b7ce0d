"""Rollback of recurrent states: rejected rows leave no trace, whatever the engine does."""

import random

import pytest
import tiny
import tiny_qwen3_next as tiny_next
import torch
from drafters import adversary, mixed, oracle, scripted
from running import requests, tiny_engine
from snapshots import empty, snapshot_target, token
from tiny_qwen3_next import QWEN3_NEXT_80B

from specdec.engine import generate
from specdec.models import deltanet
from specdec.models.batch import CacheShape
from specdec.models.deltanet import DeltaNet, DeltaNetConfig
from specdec.models.qwen3_next import rollback_memory
from specdec.models.qwen3_next_checkpoint import qwen3_next_config
from specdec.propose.ngram import ngram
from specdec.runtime import blocks_that_fit
from specdec.schedule import schedule
from specdec.verify.rejection import rejection

PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 9, [50, 60, 70, 80], [4, 4, 5, 5, 4, 4, 5]]
MAX_TOKENS = 20
DELTA = DeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_dim=5, value_dim=6, conv_width=4, norm_eps=1e-6
)


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
    state, before = deltanet.fold(mixers[layer], config.delta, states, stored, count)
    return state[0], before[0, :, : config.delta.num_channels]


@pytest.mark.parametrize("numbers", [(3,), (3, 0, 0, 3, 1, 3)], ids=str)
@pytest.mark.parametrize("budget", [64, 9])
def test_states_equal_a_token_by_token_run(target, plain, texts, numbers, budget):
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
    assert any(len(set(step)) > 2 for step in rejections)  # one step, different rejections


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


def random_mixer(seed=0):
    config, generator = DELTA, torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return DeltaNet(
        in_proj=torch.empty(0),
        conv=normal(config.num_channels, config.conv_width),
        decay_log=normal(4) - 1,
        step_bias=normal(4),
        norm=torch.ones(config.value_dim),
        out=torch.empty(0),
    )


@pytest.mark.parametrize("window", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_equal_one_row_at_a_time(window, seed):
    """Slots that decode, prefill in chunks of any length, end, start anew and pause, with padding
    rows in between; the caches start full of NaN."""
    rng, mixer = random.Random(seed), random_mixer(seed)
    generator = torch.Generator().manual_seed(seed)
    num_slots = 4
    states = deltanet.new_states(DELTA, num_slots + 1, "cpu").fill_(float("nan"))
    stored = deltanet.new_inputs(DELTA, num_slots + 1, window, "cpu", torch.float32)
    stored.fill_(float("nan"))
    window_start = torch.full((num_slots + 1,), 999)
    length, snapshots = [0] * num_slots, [empty(DELTA) for _ in range(num_slots)]
    for _ in range(25):
        slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
        steps, rows = [], []
        for slot in slots:
            if rng.random() < 0.15:
                length[slot], snapshots[slot] = 0, empty(DELTA)
            count = rng.choice([rng.randint(1, window), rng.randint(window + 1, 40)])
            kept = rng.randint(1, count) if count <= window else count
            inputs = torch.randn(count, DELTA.num_inputs, generator=generator)
            inputs[kept:] *= 50
            rows.append((inputs, kept))
            steps.append(tiny.Step([0] * count, length[slot], [1] * 1000, slot=slot))
        padding = rng.randint(0, 3)
        batch = tiny.make_batch(steps, 4, num_padding=padding, short=rng.choice([1, window, 50]))
        batch.request_slots[len(steps) :] = num_slots
        step_inputs = torch.cat(
            [x for x, _ in rows] + [torch.full_like(rows[0][0][:1], 9)] * padding
        )
        plan = deltanet.step_rows(batch, window_start, window)
        out = deltanet.recur_(DELTA, plan, states, stored, mixer, step_inputs)
        deltanet.move_windows_(window_start, plan, batch.positions)
        first = 0
        for slot, (inputs, kept) in zip(slots, rows, strict=True):
            before, state = snapshots[slot]
            for row in range(kept):
                want, before, state = token(DELTA, mixer, inputs[row], before, state)
                torch.testing.assert_close(out[first + row], want, rtol=1e-4, atol=1e-4)
            snapshots[slot] = (before, state)
            length[slot] += kept
            count = torch.tensor([length[slot]]) - window_start[[slot]]
            folded, seen = deltanet.fold(mixer, DELTA, states[[slot]], stored[[slot]], count)
            torch.testing.assert_close(folded[0], state, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(seen[0, :, : DELTA.num_channels], before)
            first += len(inputs)
    assert window_start[num_slots] == 999  # padding requests are left alone


def test_rows_the_device_finds_unused_are_padding(target):
    """A plan's row counts are upper bounds: rows past the real ones change nothing."""
    text = PROMPTS[1][:12]
    cache, other = (tiny.new_cache(target, 8, 4) for _ in range(2))
    blocks = [1, 2, 3, 4]
    for start in (0, 5, 7):
        end = {0: 5, 5: 7, 7: 12}[start]
        exact = tiny.make_batch([tiny.Step(text[start:end], start, blocks)], 4)
        longer = tiny.make_batch([tiny.Step([*text[start:end], 0, 0], start, blocks)], 4)
        longer.row_valid[end - start :] = False
        longer.slot_mapping[end - start :] = 0
        want = target.forward(exact, other).hidden
        got = target.forward(longer, cache).hidden[: end - start]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.states[0], other.states[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.window_start, other.window_start)


def test_rollback_memory_of_the_80b_model():
    """64 requests, K = 3, bf16: 36 DeltaNet layers of 32 states [128, 128] in fp32, and 8192
    channels with 64 gates a row."""
    memory = rollback_memory(qwen3_next_config(QWEN3_NEXT_80B), 64, 3, torch.bfloat16)
    row = 2 * (2 * 16 * 128 + 32 * 128 + 2 * 32)
    state = 4 * 32 * 128 * 128
    assert memory.window == 64 * 36 * 3 * row == 114_130_944
    assert memory.committed == 64 * 36 * (state + 3 * row) == 4_945_969_152
    assert memory.snapshots == 3 * memory.committed == 14_837_907_456
    assert memory.window < memory.snapshots / 100


@pytest.mark.parametrize("window", [1, 4])
def test_memory_counts_what_a_cache_holds(target, window):
    shape = CacheShape(num_blocks=5, block_size=4, num_slots=3, window=window)
    cache = target.new_cache(shape)
    held = sum(t.numel() * t.element_size() for t in (*cache.states, *cache.stored))
    memory = rollback_memory(target.config, 3, window - 1, torch.float32)
    assert held == memory.committed + memory.window


def test_blocks_fit_beside_the_states(target, monkeypatch):
    """What the slots keep is taken off the memory before it is shared out in blocks."""
    shape = CacheShape(num_blocks=1, block_size=4, num_slots=6, window=4)
    cache = target.new_cache(shape)
    block = sum(t.numel() * 4 for t in (*cache.keys, *cache.values))
    slots = sum(t.numel() * t.element_size() for t in (*cache.states, *cache.stored)) + 6 * 8
    monkeypatch.setattr("specdec.runtime.free_memory", lambda device: 2 * (slots + 10 * block))
    assert blocks_that_fit(target, None, shape, torch.device("cpu")) == 10
