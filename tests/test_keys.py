"""Philox against published vectors and Triton's, and keys as independent streams (case R1)."""

import json
import os
import subprocess
import sys

import pytest
import torch
from scipy.stats import chisquare, kstest

from specdec.kernels.philox.reference import philox, to_exponential, to_uniform
from specdec.keys import Keys, Purpose, exponential, target_exponential, uniform

KNOWN_ANSWERS = [  # counter, key, words: Random123's philox4x32-10 vectors
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def signed(low, high):
    """The int64 whose bits are two 32-bit words."""
    value = low | high << 32
    return value - (1 << 64) if value >> 63 else value


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    seed = torch.tensor([signed(*key)])
    out = philox(seed, *(torch.tensor([c]) for c in counter))
    assert [int(word) for word in out] == words


TRITON = """
import json, sys, torch, triton, triton.language as tl

@triton.jit
def kernel(counters, out, seed, n: tl.constexpr):
    lane = tl.arange(0, n)
    c = [tl.load(counters + i * n + lane) for i in tl.static_range(4)]
    words = tl.philox(seed, c[0], c[1], c[2], c[3])
    for i in tl.static_range(4):
        tl.store(out + i * n + lane, words[i])

seed, counters = json.load(sys.stdin)
counters = torch.tensor(counters, dtype=torch.int64).to(torch.int32)
out = torch.zeros_like(counters)
kernel[(1,)](counters, out, seed, n=counters.shape[1])
print(json.dumps((out.long() & 0xFFFFFFFF).tolist()))
"""


def test_equals_tritons_generator(tmp_path):
    """Bit for bit in the interpreter, with a 63-bit seed and counters of all sizes."""
    script = tmp_path / "generator.py"  # the interpreter reads a kernel's source from its file
    script.write_text(TRITON)
    rng = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (4, 64), generator=rng)
    counters[:, :8] = torch.arange(8)
    counters[:, 8] = 2**32 - 1
    seed = 0x5DEECE66D12345
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps([seed, counters.tolist()]),
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [w.tolist() for w in philox(torch.tensor([seed]), *counters)]


def test_uniforms_lie_in_the_half_open_interval():
    words = torch.tensor([0, 1, 255, 256, 2**31, 2**32 - 1])
    draws = to_uniform(words)
    assert draws.tolist() == [0.0, 0.0, 0.0, 2.0**-24, 0.5, 1 - 2.0**-24]
    assert draws.dtype == torch.float32


def test_races_have_no_zero_and_no_nan():
    draws = to_exponential(torch.tensor([0, 1, 2**31, 2**32 - 129, 2**32 - 1]))
    assert float(draws[0]) == pytest.approx(2.0**-33)
    assert float(draws[1]) == pytest.approx(1.5 * 2.0**-32)
    assert bool((draws[1:] > draws[:-1]).all())
    assert draws[-1] == torch.inf  # loses every race


def keys(n, start=0):
    return Keys(torch.arange(n), torch.full((n,), start))


def test_uniforms_are_uniform():
    draws = uniform(keys(50_000, 17), Purpose.ACCEPT, 2)
    assert kstest(draws.numpy(), "uniform").pvalue > 1e-4
    grid = uniform(keys(50_000, 17), Purpose.ACCEPT, torch.arange(4)[None])
    assert grid.shape == (50_000, 4)
    assert kstest(grid.flatten().numpy(), "uniform").pvalue > 1e-4


def test_races_are_exponential():
    draws = exponential(keys(2000, 3), Purpose.TARGET, 0, 37)
    assert draws.shape == (2000, 37)
    assert kstest(draws.flatten().numpy(), "expon").pvalue > 1e-4


def test_a_race_is_a_draw():
    probs = torch.tensor([0.05, 0.5, 0.15, 0.3])
    draws = exponential(keys(40_000, 3), Purpose.TARGET, 0, 4)
    winners = (probs.log() - draws.log()).argmax(-1)
    counts = torch.bincount(winners, minlength=4).numpy()
    assert chisquare(counts, 40_000 * probs.double().numpy(), sum_check=False).pvalue > 1e-4


def streams(seed=9, start=30):
    """Numbers of one request under every purpose, some offsets and nodes."""
    own = Keys(torch.tensor([seed]), torch.tensor([start]))
    numbers = {}
    for purpose in Purpose:
        for offset in range(5):
            for node in (0, 1, 63):
                numbers[purpose, offset, node] = float(uniform(own, purpose, offset, node))
    return numbers


def test_every_part_of_the_key_makes_another_stream():
    base = streams()
    assert len(set(base.values())) == len(base) == 75
    for other in (streams(seed=10), streams(start=31), streams(seed=9 + (1 << 32))):
        assert not set(base.values()) & set(other.values())
    assert streams() == base


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((Purpose.ACCEPT, 0, 0, 0), (Purpose.RECOVER, 0, 0, 0)),
        ((Purpose.ACCEPT, 0, 0, 0), (Purpose.DRAFT, 0, 0, 0)),
        ((Purpose.BONUS, 0, 0, 0), (Purpose.RECOVER, 0, 0, 0)),
        ((Purpose.ACCEPT, 0, 0, 0), (Purpose.ACCEPT, 1, 0, 0)),
        ((Purpose.ACCEPT, 0, 0, 0), (Purpose.ACCEPT, 0, 1, 0)),
        ((Purpose.ACCEPT, 1, 0, 0), (Purpose.ACCEPT, 0, 0, 1)),  # the same position, another round
    ],
)
def test_streams_are_independent(left, right):
    """Joint of two streams over 100,000 seeds is flat on a 10 x 10 grid."""

    def draws(purpose, offset, node, later):
        return uniform(keys(100_000, 50 + later), purpose, offset, node)

    cells = (draws(*left) * 10).long() * 10 + (draws(*right) * 10).long()
    assert chisquare(torch.bincount(cells, minlength=100).numpy()).pvalue > 1e-4


def test_neighbouring_seeds_are_independent():
    draws = uniform(keys(100_001), Purpose.ACCEPT, 0)
    cells = (draws[1:] * 10).long() * 10 + (draws[:-1] * 10).long()
    assert chisquare(torch.bincount(cells, minlength=100).numpy()).pvalue > 1e-4


def test_a_request_never_depends_on_its_neighbours():
    batch = Keys(torch.tensor([5, 42, -7, 2**62]), torch.tensor([3, 90, 11, 4]))
    offsets = torch.arange(6)[None]
    together = uniform(batch, Purpose.ACCEPT, offsets)
    own_offset = uniform(batch, Purpose.BONUS, torch.tensor([2, 0, 5, 1]))
    races = target_exponential(*batch, 21)
    for r in range(4):
        own = Keys(batch.seeds[r : r + 1], batch.round_start[r : r + 1])
        assert torch.equal(uniform(own, Purpose.ACCEPT, offsets)[0], together[r])
        offset = torch.tensor([[2, 0, 5, 1][r]])
        assert torch.equal(uniform(own, Purpose.BONUS, offset)[0], own_offset[r])
        assert torch.equal(target_exponential(*own, 21)[0], races[r])
        for j in range(6):
            assert uniform(own, Purpose.ACCEPT, j)[0] == together[r, j]


def test_a_lane_does_not_depend_on_how_many_there_are():
    wide = target_exponential(torch.tensor([3]), torch.tensor([8]), 1026)
    for lanes in (1, 3, 4, 1025):
        narrow = target_exponential(torch.tensor([3]), torch.tensor([8]), lanes)
        assert torch.equal(narrow, wide[:, :lanes])
