"""Every kind of head against straight-line code written from the seed text."""

import head_runs
import pytest
from head_runs import HEADS
from running import requests, tiny_engine

from specdec.generate import generate
from specdec.propose.autoregressive import autoregressive


@pytest.fixture(scope="module", params=HEADS)
def pair(request):
    return head_runs.load(HEADS[request.param])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_drafts_equal_the_straight_line(pair, k):
    """After prefills, and after rounds that kept any number of drafts (K1, K2)."""
    rounds = head_runs.record(pair.target, pair.draft, k, max_tokens=9)
    for drafted in [*rounds[:3], *rounds[-3:]]:
        head_runs.check(pair, drafted)


@pytest.mark.parametrize("name", ["llama_eagle3", "qwen3_next_mtp_2_layers", "deepseek_mtp"])
@pytest.mark.parametrize(("budget", "block_size"), [(5, 4), (9, 1), (64, 16)])
def test_prefill_in_chunks(name, budget, block_size):
    pair = head_runs.load(HEADS[name])
    options = {"max_num_batched_tokens": budget, "block_size": block_size, "max_tokens": 7}
    for drafted in head_runs.record(pair.target, pair.draft, 3, **options):
        head_runs.check(pair, drafted)


DEEPSEEK_STAGES = [
    ({"recycle": "pre_norm"}, {"recycle": "pre_norm"}),
    ({"recycle": "pinned"}, {"recycle": "pinned"}),
    ({"position0_embedding": "kept"}, {"zeroed": False}),
]


@pytest.mark.parametrize(("axes", "straight"), DEEPSEEK_STAGES)
@pytest.mark.parametrize("name", ["deepseek_mtp", "deepseek_mtp_2_layers"])
def test_contested_stages_of_deepseek(name, axes, straight):
    """Public practice differs: what is recycled, and whether position 0 is masked."""
    pair = head_runs.load(HEADS[name], axes=axes, straight=straight)
    for drafted in head_runs.record(pair.target, pair.draft, 3, max_tokens=6)[-3:]:
        head_runs.check(pair, drafted)


@pytest.mark.parametrize("name", ["llama_eagle_2_layers", "qwen3_eagle", "qwen3_moe_eagle"])
@pytest.mark.parametrize("batch", [1, 5])
def test_speculation_equals_plain_decoding(name, batch):
    """The Eagle heads; Eagle-3 and MTP heads in their own files."""
    pair = head_runs.load(HEADS[name])
    asked = requests([*head_runs.PROMPTS, [50, 60, 70], [4] * 9], max_tokens=12)
    plain = generate(tiny_engine(pair.target, max_num_seqs=batch), asked)
    engine = tiny_engine(pair.target, pair.draft, autoregressive, max_num_seqs=batch)
    assert [r.token_ids for r in generate(engine, asked)] == [r.token_ids for r in plain]
