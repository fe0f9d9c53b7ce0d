"""On a GPU, kernels and graphs: speculation changes no greedy token of any family."""

import head_runs
import pytest
from head_runs import HEADS
from running import requests, tiny_engine

from specdec.generate import generate
from specdec.propose.autoregressive import autoregressive
from specdec.propose.ngram import ngram
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

PROMPTS = [*head_runs.PROMPTS, [50, 60, 70], [4, 4, 5, 5, 4, 4, 5]]
GRAPHS = {"kernels": "triton", "graphs": True, "overlap": True, "max_num_batched_tokens": 32}


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", HEADS)
def test_speculation_equals_plain_decoding(name, batch):
    """fp32: the head with both ways to draft and n-grams, beside plain decoding in torch."""
    pair = head_runs.load(HEADS[name], device="cuda")
    asked = requests(PROMPTS, max_tokens=24)

    def run(*stages, **options):
        engine = tiny_engine(pair.target, *stages, max_num_seqs=batch, **options)
        return [result.token_ids for result in generate(engine, asked)]

    plain = run()
    assert run(**GRAPHS) == plain
    assert run(pair.draft, autoregressive, rejection, **GRAPHS) == plain
    sampled = {"draft_sampling": "sample", "k": 4, **GRAPHS}
    assert run(pair.draft, autoregressive, gumbel, **sampled) == plain
    assert run(None, ngram, min_ngram=1, max_ngram=3, **GRAPHS) == plain


@pytest.mark.parametrize("name", ["llama_eagle3", "qwen3_next_mtp", "deepseek_mtp"])
def test_gumbel_equals_plain_sampling(name):
    """Token for token, for any K."""
    pair = head_runs.load(HEADS[name], device="cuda")
    asked = requests(PROMPTS, max_tokens=24, temperature=1.3, top_p=0.95, seed=5)
    plain = generate(tiny_engine(pair.target, verify=gumbel), asked)
    for k in (1, 4):
        options = {"draft_sampling": "sample", "k": k, **GRAPHS}
        engine = tiny_engine(pair.target, pair.draft, autoregressive, gumbel, **options)
        results = generate(engine, asked)
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
