"""Timing of steps: what is counted, where the time goes, and the script in miniature."""

import json
from functools import partial

import pytest
import torch
from running import tiny_engine
from scripts import call
from tiny import tiny_draft, tiny_target

from specdec.experiments import speed
from specdec.experiments.random_models import num_parameters, random_draft, random_target
from specdec.experiments.roofline import matrices
from specdec.experiments.steps import (
    arrive,
    lockstep,
    part_seconds,
    random_requests,
    stamped_stages,
    stamped_target,
    trace,
)
from specdec.kernels.stamps import new_stamps, read
from specdec.propose.autoregressive import autoregressive
from specdec.verify import traits_of
from specdec.verify.synthetic import synthetic

MINIATURE = [
    *("shape=llama_tiny", "draft_shape=eagle3_tiny", "vocab_size=512", "batch_sizes=[1,2]"),
    *("prompt_tokens=9", "sampling.max_tokens=30", "repeats=1", "device=cpu", "dtype=float32"),
    "num_threads=1",
]


def two_of_three():
    target = tiny_target()
    rule = partial(synthetic, accepted=2)
    return tiny_engine(target, tiny_draft(target), autoregressive, rule, k=3, eos=())


def test_a_pass_counts_full_steps():
    """Two requests of 1 + 9 * 3 tokens: nine rounds, the last of which ends them."""
    engine = two_of_three()
    seen = []
    one = lockstep(engine, random_requests(2, 101, 5, max_tokens=28), seen.append)
    assert one.tokens_per_step == 3
    assert one.num_tokens == 56
    assert seen == list(range(1, 9))
    assert len(one.intervals) == 7 - 5
    assert 0 < sum(one.intervals) < one.seconds


def test_requests_are_random_and_repeat():
    first, again = (random_requests(3, 50, 8, seed=4, max_tokens=6) for _ in range(2))
    assert first == again
    assert len({request.prompt_ids for request in first}) == 3
    assert len({request.seed for request in first}) == 3
    assert all(request.ignore_eos and len(request.prompt_ids) == 8 for request in first)


def test_arrivals():
    """A slow stream keeps few requests at a time, a fast one many; every token is there."""
    engine = two_of_three()
    requests = random_requests(20, 101, 5, max_tokens=10)
    lockstep(engine, requests[:2])
    slow, fast = arrive(engine, requests, 20.0), arrive(engine, requests, 2000.0)
    assert slow.mean_batch < fast.mean_batch <= 20
    assert slow.tokens_per_second == pytest.approx(10 * 20, rel=0.6)
    assert not engine.has_unfinished


def test_parts_of_a_step():
    """Medians over the middle of the run; steps without all stamps are passed over."""
    marks = []
    for start in (0, 1000, 2000, 3000, 4000):
        times = (0, 500, 600, 610, 900)
        marks += [(mark, start + at) for mark, at in enumerate(times)]
    marks[6:6] = [(0, 1001)]  # a step that ended before its logits
    parts = part_seconds([(mark, 1000 * at) for mark, at in marks])
    found = [parts[n] * 1e6 for n in ("target", "verification", "postprocess", "drafting", "rest")]
    assert found == pytest.approx([500, 100, 10, 290, 100])
    assert part_seconds([]) == {}


def test_an_engine_stamps_its_parts():
    stamps = new_stamps("cpu")
    engine = two_of_three()
    plain = lockstep(engine, random_requests(1, 101, 5, max_tokens=28))
    target = tiny_target()
    rule = partial(synthetic, accepted=2)
    stamped = tiny_engine(
        stamped_target(target, stamps), tiny_draft(target), autoregressive, rule, k=3, eos=()
    )
    stamped.runner.stages = stamped_stages(stamped.runner.stages, stamps)
    again = lockstep(stamped, random_requests(1, 101, 5, max_tokens=28))
    assert again.num_tokens == plain.num_tokens
    parts = part_seconds(read(stamps))
    assert set(parts) == {"target", "verification", "postprocess", "drafting", "rest"}
    assert min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(sum(again.intervals) / len(again.intervals), rel=1)


def test_stamped_stages_keep_their_traits():
    engine = two_of_three()
    stages = stamped_stages(engine.runner.stages, new_stamps("cpu"))
    assert traits_of(stages.verify) == traits_of(synthetic)


def test_a_trace_is_busy_where_spans_overlap():
    spans = [("a", 0.0, 10.0), ("b", 5.0, 15.0), ("a", 20.0, 30.0), ("c", 40.0, 50.0)]
    found = trace(spans, num_steps=2)
    assert found.idle_share == pytest.approx(15 / 50)
    assert found.busy_ms == pytest.approx(35 / 2 / 1e3)
    assert found.num_kernels == 2
    assert found.kernels[0] == {"name": "a", "ms": pytest.approx(0.01), "calls": 1.0}


def settings(**changes):
    from small_shapes import small_shape

    return small_shape("llama") | changes


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next", "deepseek"])
def test_random_models_are_finite_and_never_zero(family):
    from small_shapes import small_shape

    target = random_target(small_shape(family), device="cpu", dtype=torch.bfloat16)
    again = random_target(small_shape(family), device="cpu", dtype=torch.bfloat16)
    assert torch.equal(target.embed, again.embed)
    assert target.embed.count_nonzero() > 0.99 * target.embed.numel()
    engine = tiny_engine(target, eos=())
    one = lockstep(engine, random_requests(2, 101, 5, max_tokens=6))
    assert one.num_tokens == 12  # no row was without a distribution


@pytest.mark.parametrize("own", [24, None])
def test_a_random_head_with_a_reduced_vocabulary_or_the_targets(own):
    target = random_target(settings(), device="cpu", dtype=torch.float32)
    shape = settings(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=own,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    draft = random_draft(shape, target)
    assert draft.logits_size == (own or 101)
    assert draft.aux_layers == (0, 1, 2)
    if own:
        assert (draft.vocab_map.d2t.diff() > 0).all()


def test_matrices_are_counted_once():
    """No vector is counted, nor the table of embeddings, of which a step reads a few rows."""
    shape = settings(tie_word_embeddings=False)
    target = random_target(shape, device="cpu", dtype=torch.bfloat16)
    layer = 32 * 8 * (4 + 2 * 2) + 32 * 8 * 4 + 3 * 32 * 48
    num_bytes, num_weights = matrices((target.params, target.params), skip=target.embed)
    assert num_weights == target.config.num_layers * layer + 101 * 32
    assert num_bytes == 2 * num_weights
    norms = 32 * (2 * target.config.num_layers + 1)
    assert num_parameters(shape) == num_weights + norms + 101 * 32


def test_in_miniature(tmp_path, monkeypatch, capsys):
    argv = [*MINIATURE, f"hydra.run.dir={tmp_path}", "arrivals.batch=2"]
    argv += ["arrivals.num_requests=10", "arrivals.attempts=1"]
    assert call(speed.main, argv, monkeypatch) == 0
    summary = json.loads((tmp_path / "speed.json").read_text())
    assert [row["batch"] for row in summary["rows"]] == [1, 2]
    for row in summary["rows"]:
        assert row["tokens_per_step"] == 3
        assert row["tokens_per_second"] == pytest.approx(
            row["batch"] * 3000 / row["step_ms"], rel=1e-6
        )
        assert min(row[f"{part}_ms"] for part in ("target", "verification", "drafting")) > 0
    assert summary["arrivals"]["ratio"] > 0
    assert (tmp_path / "speed.png").stat().st_size > 5000
    assert "tokens/s" in capsys.readouterr().out


def test_plain_decoding_builds_no_head(tmp_path, monkeypatch):
    argv = [*MINIATURE, "propose=none", "batch_sizes=[1]", "measure_parts=false"]
    assert call(speed.main, [*argv, f"hydra.run.dir={tmp_path}"], monkeypatch) == 0
    summary = json.loads((tmp_path / "speed.json").read_text())
    assert summary["num_draft_tokens"] == 0
    assert summary["rows"][0]["tokens_per_step"] == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("batch_sizes=[]", "batch_sizes=[] must be a list"),
        ("shape.model_type=gpt2", "shape.model_type='gpt2' is not one of llama"),
        ("vocab_size=null", "set vocab_size"),
        ("+draft_shape.head_family=eagle9", "draft_shape.head_family='eagle9' is not one of"),
        ("sampling.max_tokens=2", "raise sampling.max_tokens"),
        ("shape.num_hidden_layers=0", "num_hidden_layers=0 must be a number"),
        ("draft_shape.hidden_size=wide", "hidden_size='wide' must be a number"),
        ("draft_shape.draft_vocab_size=5000", "draft_vocab_size=5000 exceeds"),
        ("draft_shape=eagle3_8b", "or name another (draft_shape=eagle3_tiny)"),
    ],
)
def test_what_is_refused(override, said, tmp_path, monkeypatch, capsys):
    argv = [*MINIATURE, f"hydra.run.dir={tmp_path}", override]
    assert call(speed.main, argv, monkeypatch) == 1
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_a_shape_for_a_gpu_is_refused_without_one(tmp_path, monkeypatch, capsys):
    """Llama-3.1-8B has 8.03 billion parameters: minutes and 16 GB before the first step."""
    assert call(speed.main, [f"hydra.run.dir={tmp_path}/run"], monkeypatch) == 1
    assert "8.0 billion parameters is for a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0, 1])
def test_on_a_gpu(temperature, tmp_path, monkeypatch):
    """From graphs: the parts stamped inside them add up to the step; the profiler sees kernels.

    Deep, so that the GPU takes longer than the host: gaps between short steps differ by pass.
    """
    argv = [*MINIATURE, "device=cuda", "dtype=bfloat16", "sampling.max_tokens=240"]
    argv += ["shape.num_hidden_layers=32", "shape.hidden_size=512", "draft_shape.hidden_size=512"]
    argv += [f"sampling.temperature={temperature}", f"hydra.run.dir={tmp_path}"]
    assert call(speed.main, argv, monkeypatch) == 0
    for row in json.loads((tmp_path / "speed.json").read_text())["rows"]:
        parts = ("target", "verification", "postprocess", "drafting", "rest")
        assert sum(row[f"{part}_ms"] for part in parts) == pytest.approx(row["step_ms"], rel=0.5)
        assert row["tokens_per_step"] == 3
        assert 0 <= row["idle_share"] < 1
        assert row["num_kernels"] > 20
        assert 0 < row["floor_ms"] < row["step_ms"]
    assert all(json.loads((tmp_path / "kernels.json").read_text()).values())
