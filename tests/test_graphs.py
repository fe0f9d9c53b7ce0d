"""Steps replayed from CUDA graphs do what the same functions do when they are called."""

import random

import pytest
import torch
from running import requests, tiny_engine
from tiny import tiny_draft, tiny_target

from specdec import runner as runner_module
from specdec.errors import ConfigError
from specdec.generate import generate
from specdec.graph import graphed
from specdec.propose.autoregressive import autoregressive
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def uncaptured(fn, example_args, pool=None):
    """`graphed` without a graph, at the same shapes."""
    device = example_args[0].device
    return lambda *args: fn(*(arg.to(device) for arg in args))


def engine_of(verify=rejection, dtype=torch.bfloat16, **keywords):
    target = tiny_target(device="cuda", dtype=dtype)
    keywords = {"draft_sampling": "sample", "max_num_batched_tokens": 32, "eos": (2,), **keywords}
    return tiny_engine(
        target,
        tiny_draft(target),
        autoregressive,
        verify,
        kernels="triton",
        graphs=True,
        **keywords,
    )


def arrivals(num_steps, seed):
    """For each step the requests that arrive before it, of all kinds and lengths."""
    draw = random.Random(seed)
    for _ in range(num_steps):
        yield [
            requests(
                [[draw.randrange(3, 60) for _ in range(draw.choice([1, 3, 9, 40]))]],
                max_tokens=draw.choice([1, 5, 30]),
                temperature=draw.choice([0.0, 0.0, 1.0, 0.7]),
                top_k=draw.choice([0, 0, 5]),
                top_p=draw.choice([1.0, 0.9]),
                repetition_penalty=draw.choice([1.0, 1.0, 1.0, 1.3]),
                frequency_penalty=draw.choice([0.0, 0.0, 0.0, 0.2]),
                seed=draw.randrange(1000),
            )[0]
            for _ in range(draw.choice([0, 0, 0, 1, 2]))
        ]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_equals_the_functions_over_a_thousand_steps(overlap, monkeypatch):
    replayed = engine_of(overlap=overlap, penalties=True)
    monkeypatch.setattr(runner_module, "graphed", uncaptured)
    called = engine_of(overlap=overlap, penalties=True)
    num_tokens = 0
    for step, fresh in enumerate(arrivals(1000, seed=4)):
        for request in fresh:
            replayed.add(request), called.add(request)
        if not called.has_unfinished:
            continue
        monkeypatch.setattr(runner_module, "graphed", graphed)
        got = replayed.step()
        monkeypatch.setattr(runner_module, "graphed", uncaptured)
        want = called.step()
        assert got == want, f"step {step}"
        num_tokens += sum(len(output.token_ids) for output in want)
    assert num_tokens > 2000
    assert len(replayed.runner.steps) > 5
    assert {shape.penalties for shape in replayed.runner.steps} == {False, True}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("verify", "mode"), [(rejection, "sample"), (rejection, "greedy"), (gumbel, "greedy")]
)
def test_a_graph_decodes_as_plain_steps_do(verify, mode):
    """fp32, so that rows beside a request's own change nothing that decides a token."""
    keywords = {"verify": verify, "draft_sampling": mode, "dtype": torch.float32}
    asked = [request for fresh in arrivals(60, seed=1) for request in fresh]
    got = generate(engine_of(**keywords, overlap=True, penalties=True), asked)
    target = tiny_target(device="cpu")
    engine = tiny_engine(
        target, tiny_draft(target), autoregressive, verify, draft_sampling=mode,
        max_num_batched_tokens=32, penalties=True,
    )  # fmt: skip
    want = generate(engine, asked)
    same = [a.token_ids == b.token_ids for a, b in zip(got, want, strict=True)]
    assert sum(same) >= 0.97 * len(same), f"{sum(same)} of {len(same)} texts agree"


@pytest.mark.gpu
@pytest.mark.parametrize("penalties", [False, True])
def test_warm_up_captures_every_shape(penalties, monkeypatch):
    captured = []
    engine = engine_of(max_num_seqs=4, penalties=penalties)
    before = engine.state.token_ids.clone(), engine.state.num_tokens.clone()
    engine.runner.warm_up(on_shape=lambda: captured.append(1))
    kinds = 6 if penalties else 3
    assert len(captured) == engine.runner.num_shapes == len(engine.runner.steps) / kinds
    assert torch.equal(engine.state.num_tokens, before[1])
    plain = requests([[7, 3, 60], [4] * 20], max_tokens=9)
    plain += requests([[9]], max_tokens=9, presence_penalty=0.1 if penalties else 0.0)
    monkeypatch.setattr(runner_module, "graphed", None)  # nothing is left to capture
    assert [len(r.token_ids) for r in generate(engine, plain)] == [9, 9, 9]


def test_graphs_need_a_gpu_and_triton():
    target = tiny_target()
    with pytest.raises(ConfigError, match=r"kernels=torch on cpu.*graphs=false"):
        tiny_engine(target, graphs=True)
