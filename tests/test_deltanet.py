"""The DeltaNet layers' caches: random steps row by row, padding, memory, capture in a graph."""

import random

import pytest
import tiny
import tiny_qwen3_next as tiny_next
import torch
from snapshots import empty, token
from tiny_qwen3_next import QWEN3_NEXT_80B

from specdec.kernels.runtime import using
from specdec.models import delta_windows, deltanet
from specdec.models.batch import CacheShape
from specdec.models.deltanet import DeltaNet, DeltaNetConfig
from specdec.models.layers import map_tree, tree_leaves
from specdec.models.qwen3_next import qwen3_next_target, rollback_memory
from specdec.models.qwen3_next_checkpoint import load_qwen3_next_params, qwen3_next_config
from specdec.runtime import blocks_that_fit

DELTA = DeltaNetConfig(
    num_key_heads=2, num_value_heads=4, key_dim=5, value_dim=6, conv_width=4, norm_eps=1e-6
)
TEXT = list(range(3, 40))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def target():
    return tiny_next.tiny_target()


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


KERNEL_STEPS = [("triton", 5, 4, 0), pytest.param("triton", 25, 2, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("kernels", "turns", "window", "seed"),
    [("torch", 25, window, seed) for window in (1, 2, 4, 7) for seed in range(3)] + KERNEL_STEPS,
)
def test_random_steps_equal_one_row_at_a_time(kernels, turns, window, seed):
    """Slots that decode, prefill in chunks of any length, end, start anew and pause, with padding
    rows in between; the caches start full of NaN."""
    rng, mixer = random.Random(seed), map_tree(lambda t: t.to(DEVICE), random_mixer(seed))
    generator = torch.Generator().manual_seed(seed)
    num_slots = 4
    states = deltanet.new_states(DELTA, num_slots + 1, DEVICE).fill_(float("nan"))
    stored = delta_windows.new_inputs(DELTA, num_slots + 1, window, DEVICE, torch.float32)
    stored.fill_(float("nan"))
    window_start = torch.full((num_slots + 1,), 999, device=DEVICE)
    start = tuple(t.to(DEVICE) for t in empty(DELTA))
    length, snapshots = [0] * num_slots, [start for _ in range(num_slots)]
    for _ in range(turns):
        slots = rng.sample(range(num_slots), rng.randint(1, num_slots))
        steps, rows = [], []
        for slot in slots:
            if rng.random() < 0.15:
                length[slot], snapshots[slot] = 0, start
            count = rng.choice([rng.randint(1, window), rng.randint(window + 1, 40)])
            kept = rng.randint(1, count) if count <= window else count
            inputs = torch.randn(count, DELTA.num_inputs, generator=generator).to(DEVICE)
            inputs[kept:] *= 50
            rows.append((inputs, kept))
            steps.append(tiny.Step([0] * count, length[slot], [1] * 1000, slot=slot))
        padding = rng.randint(0, 3)
        short = rng.choice([1, window, 50])
        batch = tiny.make_batch(steps, 4, num_padding=padding, short=short, device=DEVICE)
        batch.request_slots[len(steps) :] = num_slots
        step_inputs = torch.cat(
            [x for x, _ in rows] + [torch.full_like(rows[0][0][:1], 9)] * padding
        )
        with using(kernels):
            plan = delta_windows.begin_step_(DELTA, batch, window_start, window)
            out = delta_windows.recur_(DELTA, plan, states, stored, mixer, step_inputs)
        first = 0
        for slot, (inputs, kept) in zip(slots, rows, strict=True):
            before, state = snapshots[slot]
            for row in range(kept):
                want, before, state = token(DELTA, mixer, inputs[row], before, state)
                torch.testing.assert_close(out[first + row], want, rtol=1e-4, atol=1e-4)
            snapshots[slot] = (before, state)
            length[slot] += kept
            count = length[slot] - window_start[[slot]]
            folded, seen = delta_windows.fold(mixer, DELTA, states[[slot]], stored[[slot]], count)
            torch.testing.assert_close(folded[0], state, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(seen[0, :, : DELTA.num_channels], before)
            first += len(inputs)
    assert window_start[num_slots] == 999  # padding requests are left alone


def test_rows_the_device_finds_unused_are_padding(target):
    """A plan's row counts are upper bounds: rows past the real ones change nothing."""
    text = TEXT[:12]
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


def build(settings, device):
    config = qwen3_next_config(settings)
    state = tiny_next.state_of(settings)
    params = load_qwen3_next_params(state, config, device, torch.bfloat16)
    return qwen3_next_target(params, config)


def verify_step(device):
    """A decoding request, a prefill chunk, and padding rows."""
    steps = [tiny.Step(TEXT[4:8], 4, [1, 2]), tiny.Step(TEXT[:20], 0, [3, 4, 5, 6, 7])]
    return tiny.make_batch(steps, 4, num_padding=2, device=device)


@pytest.mark.parametrize("settings", [tiny_next.settings(), tiny_next.dense_settings()])
def test_a_forward_depends_on_shapes_alone(settings):
    """Meta tensors have no values: any look at one, as a graph could not do, is an error."""
    target = build(settings, "meta")
    out = target.forward(verify_step("meta"), tiny.new_cache(target, 8, 4))
    assert out.hidden.shape == (26, 32)


@pytest.mark.gpu
def test_a_captured_forward_equals_an_eager_one():
    target = build(tiny_next.settings(), "cuda")
    first = tiny.make_batch([tiny.Step(TEXT[:4], 0, [1, 2])], 4, device="cuda")
    batch = verify_step("cuda")
    eager, captured = (tiny.new_cache(target, 8, 4) for _ in range(2))
    for cache in (eager, captured):
        target.forward(first, cache)
    start = map_tree(torch.clone, captured)
    target.forward(batch, captured)  # sizes workspaces
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = target.forward(batch, captured)
    for mine, theirs in zip(tree_leaves(captured), tree_leaves(start), strict=True):
        mine.copy_(theirs)
    graph.replay()
    expected = target.forward(batch, eager)
    torch.testing.assert_close(out.hidden[:24], expected.hidden[:24])
    for mine, theirs in zip(captured.states, eager.states, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(captured.window_start, eager.window_start)
