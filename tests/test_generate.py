"""Self-generation: prompts, streams of requests, what is kept, the script."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from running import tiny_engine
from tiny_chat import write_chat_model

from specdec.config import register_schemas
from specdec.errors import ConfigError, DataError
from specdec.experiments import generate as script
from specdec.generate import generate
from specdec.models.load import load_target
from specdec.models.tokenizer import load_tokenizer
from specdec.prompts import Prompt, PromptSet, render
from specdec.prompts.decontaminate import ngram_set
from specdec.schedule import Request
from specdec.training import generation
from specdec.training.data import load_dataset, merge_datasets, repeated_ngram_share
from specdec.training.packing import make_row

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"))


def config(model, *overrides):
    register_schemas()
    with initialize_config_module("specdec.conf", version_base="1.3"):
        return compose(
            "generate",
            [
                f"target.path={model}", "device=cpu", "dtype=float32", "schedule.max_num_seqs=16",
                "prompts.num_prompts=60", "instructions.num=30", "instructions.max_tokens=24",
                "responses.max_tokens=16", *overrides,
            ],
        )  # fmt: skip


def samples_of(data):
    for index in range(len(data)):
        length = int(data.lengths[index])
        row = make_row(data, np.array([index]), length)
        ids = row.input_ids.tolist()
        first = length - int(data.num_supervised[index])
        assert row.labels.tolist() == list(range(first, length))
        yield ids[:first], ids[first:], float(data.temperature[index])


def test_the_script_writes_what_the_target_says(model, tmp_path):
    cfg = config(model, f"path={tmp_path / 'data'}", "responses.max_loop_share=0.2")
    script.generate_data(cfg, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    data = load_dataset(tmp_path / "data", vocab_size=101)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["data"]

    target = load_target(model, device="cpu", dtype=torch.float32)
    engine = tiny_engine(target, k=0, max_num_seqs=16, max_model_len=400, num_blocks=2000)
    by_temperature: dict[float, int] = {}
    greedy: dict[tuple, list] = {}
    for prompt, output, temperature in samples_of(data):
        by_temperature[temperature] = by_temperature.get(temperature, 0) + 1
        assert repeated_ngram_share(output) <= 0.2
        assert len(output) == 16 or output[-1] == 2
        if temperature == 0:
            assert tuple(prompt) not in greedy
            greedy[tuple(prompt)] = output
    results = generate(engine, [Request(p, 16) for p in greedy])
    assert [list(r.token_ids) for r in results] == list(greedy.values())
    kept = {float(t): n for t, n in summary["kept_at_temperature"].items() if n}
    assert {round(t, 1): n for t, n in by_temperature.items()} == kept
    assert set(kept) == {0.0, 0.7, 1.0}
    assert summary["num_supervised"] == sum(summary["tokens_at_temperature"].values())
    assert summary["num_supervised"] <= summary["response_tokens"]
    with pytest.raises(DataError, match="exists already"):
        script.generate_data(cfg, tmp_path)


def test_limits_end_a_run(model, tmp_path):
    cfg = config(model, f"path={tmp_path / 'a'}", "instructions.num=0", "responses.num_tokens=60")
    script.generate_data(cfg, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 40 <= summary["response_tokens"] <= 60 + 16 * 16
    assert len(load_dataset(tmp_path / "a")) < 20
    for shares in ({"hot": 1.0}, {"0": 0.0}, {"-1": 1.0}, {}):
        cfg = config(model, f"path={tmp_path / 'b'}")
        cfg.responses.shares = OmegaConf.create(shares)
        with pytest.raises(ConfigError, match=r"responses\.shares"):
            script.generate_data(cfg, tmp_path)


def test_a_stream_keeps_the_batch_full_and_stops_in_time(model):
    target = load_target(model, device="cpu", dtype=torch.float32)
    engine = tiny_engine(target, k=0, max_num_seqs=4)
    requests = [Request((3 + i, 4), 3 + i % 5, ignore_eos=True) for i in range(20)]
    running = []
    written = list(
        generation.write(
            engine,
            iter(requests),
            deadline=time.perf_counter() + 60,
            on_step=lambda _, live: running.append(live),
        )
    )
    assert sorted(w.index for w in written) == list(range(20))
    assert all(len(w.token_ids) == w.request.max_tokens for w in written)
    assert max(running) == 4
    alone = generate(tiny_engine(target, k=0), [requests[7]])[0].token_ids
    assert next(w.token_ids for w in written if w.index == 7) == alone
    late = generation.write(engine, iter(requests), deadline=time.perf_counter() + 0.02)
    assert len(list(late)) < 20
    assert not engine.has_unfinished


def test_the_frame_renders_as_the_chat_template_does(model):
    tokenizer = load_tokenizer(model)
    frame = generation.chat_frame(tokenizer)
    texts = ["w7 w8 w9", "w10"]
    encoded = generation.encode(tokenizer, [frame.before + t + frame.after for t in texts])
    for text, ids in zip(texts, encoded, strict=True):
        prompt = Prompt("p", "c", (text,))
        assert ids == render(PromptSet("s", (prompt,)), prompt, tokenizer, ())
    assert frame.before == "<|im_start|> system w6 <|im_end|> <|im_start|> user "


def test_the_frame_of_the_shipped_target(smollm2_path):
    tokenizer = load_tokenizer(smollm2_path)
    frame = generation.chat_frame(tokenizer)
    text = "Why is the sky blue?\n\n1. Say it.  Then stop!"
    prompt = Prompt("p", "c", (text,))
    (ids,) = generation.encode(tokenizer, [frame.before + text + frame.after])
    assert ids == render(PromptSet("s", (prompt,)), prompt, tokenizer, ())


def test_instructions_are_filtered():
    evaluation = ngram_set(["one two three four five six seven eight nine ten eleven twelve end"])
    seen: set[str] = {"an old prompt again"}

    def usable(text):
        return generation.usable_instruction(text, 3, seen, evaluation)

    assert usable("Write me a poem")
    assert not usable("write me  a POEM")  # said before
    assert not usable("An old prompt again")
    assert not usable("Too short")
    assert not usable("What does <|im_start|> mean here")
    assert not usable(
        "Say: one two three four five six seven eight nine ten, eleven, twelve end, twice"
    )
    assert usable("one two three four five six seven eight nine ten eleven twelve")


def test_responses_follow_the_shares():
    prompts = [[i] for i in range(2000)]
    shares = {0.0: 0.4, 0.7: 0.2, 1.0: 0.4}
    once = list(generation.response_requests(prompts, shares, passes=1, max_tokens=4, seed=0))
    assert sorted(r.prompt_ids[0] for r in once) == list(range(2000))
    for temperature, share in shares.items():
        count = sum(r.temperature == temperature for r in once)
        assert abs(count / 2000 - share) < 0.04
    twice = list(generation.response_requests(prompts, shares, passes=2, max_tokens=4, seed=0))
    greedy = [r.prompt_ids for r in twice if r.temperature == 0]
    assert len(greedy) == len(set(greedy)) > 1100
    assert len({r.seed for r in twice}) == len(twice)


def test_kept_responses_are_counted():
    counts = generation.Kept.empty([0.0, 1.0])

    def keep(ids, temperature, reason="stop"):
        request = Request((1,), temperature=temperature)
        written = generation.Written(0, request, tuple(ids), reason)
        return generation.keep_response(written, counts, max_loop_share=0.5)

    assert keep(range(20), 0.0)
    assert not keep([1, 2] * 20, 1.0)
    assert not keep([5], 1.0, "error")
    assert counts.kept == {0.0: 1, 1.0: 0}
    assert counts.tokens == {0.0: 20, 1.0: 0}
    assert counts.looped == {0.0: 0, 1.0: 1}
    assert counts.failed == {0.0: 0, 1.0: 1}


def test_merged_data_sets_hold_the_samples_of_their_parts(model, tmp_path):
    for i in range(2):
        cfg = config(model, f"path={tmp_path / f'd{i}'}", f"seed={i}", "instructions.num=0")
        script.generate_data(cfg, tmp_path)
    paths = [tmp_path / "d0", tmp_path / "d1"]
    merge_datasets(paths, tmp_path / "all", meta={})
    merged, both = load_dataset(tmp_path / "all"), load_dataset(paths)
    assert list(samples_of(merged)) == list(samples_of(both))


@pytest.mark.slow
def test_processes_share_the_work(model, tmp_path):
    done = subprocess.run(
        [
            sys.executable, "experiments/generate.py", f"target.path={model}", "device=cpu",
            "dtype=float32", "num_processes=2", "prompts.num_prompts=10", "instructions.num=8",
            "instructions.max_tokens=24", "responses.max_tokens=16", "prompts.passes=1",
            f"path={tmp_path / 'data'}", f"hydra.run.dir={tmp_path / 'run'}",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 5 <= summary["prompts"] <= 18
    kept = sum(summary["kept_at_temperature"].values())
    assert kept == summary["num_samples"] == len(load_dataset(tmp_path / "data"))
