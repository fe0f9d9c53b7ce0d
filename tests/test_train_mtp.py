"""train_mtp.py on tiny models: frozen weights, resuming, accumulation, learning, export."""

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import token_data
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from tiny_chat import write_chat_model

from specdec import build
from specdec.errors import ConfigError
from specdec.experiments.heads import target_output, trained_head
from specdec.models import layers
from specdec.models.load import load_draft, load_target
from specdec.schedule import Request
from specdec.training.data import Sample, response, write_dataset

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"))


def equal_samples(num: int, length: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [response(ids[:3], ids[3:], 0.0) for ids in rng.integers(3, 101, (num, length)).tolist()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Ten samples of 12 tokens."""
    path = tmp_path_factory.mktemp("data") / "d"
    write_dataset(path, equal_samples(10, 12), vocab_size=101, meta={})
    return path


def run(train_mtp, model, data, folder, *overrides):
    """Rows of train.csv and the summary of one run in `folder`."""
    folder.mkdir(exist_ok=True)
    with initialize_config_module("specdec.conf", version_base="1.3"):
        cfg = compose(
            "train_mtp",
            [
                f"target.path={model}",
                f"train_data.paths=[{data}]",
                "train_data.row_tokens=24",
                "dtype=float32",
                "device=cpu",
                "logger=none",
                "log_every=1",
                "eval_every=0",
                "budget.max_tokens=null",
                "unroll.num_steps=3",
                *overrides,
                f"hydra.run.dir={folder}",
            ],
            return_hydra_config=True,
        )
    HydraConfig.instance().set_config(cfg)
    del cfg.hydra
    train_mtp.train(cfg, folder)
    with (folder / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "summary.json").read_text())


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_head_trains(train_mtp, tmp_path, data, tied, monkeypatch):
    """CASES T2, C1c: five steps leave the target's tensors bitwise as they were."""
    model = write_chat_model(tmp_path / "model", tie_word_embeddings=tied)
    build._target.cache_clear()
    target = build._target(str(model), torch.device("cpu"), torch.float32, None, "none")
    base = [target.embed, target.lm_head, target.params.norm]
    base += [p.to_dense() if p.is_mkldnn else p for p in target.params.layers[0] if p is not None]
    before, storage = digest(*base), target.lm_head.data_ptr()
    assert (target.embed.data_ptr() == storage) is tied

    seen = {}
    import specdec.training.optimizer as optimizer

    def adamw(params, **keywords):
        optimizers = original(params, **keywords)
        seen["names"] = set(params)
        seen["ids"] = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        seen["own"] = {id(p) for p in params.values()}
        seen["start"] = {name: p.detach().clone() for name, p in params.items()}
        seen["params"] = params
        return optimizers

    original = optimizer.adamw
    monkeypatch.setattr(optimizer, "adamw", adamw)
    run(train_mtp, model, data, tmp_path / "run", "budget.max_steps=5")
    assert digest(*base) == before
    assert target.lm_head.data_ptr() == storage
    assert not target.embed.requires_grad
    assert not target.lm_head.requires_grad
    layer = {f"layers.0.{field}" for field in ("qkv", "out", "post_norm", "gate_up", "down")}
    assert seen["names"] == {"fc"} | layer
    assert seen["ids"] == seen["own"]
    changed = [n for n, p in seen["params"].items() if not torch.equal(p, seen["start"][n])]
    assert set(changed) == seen["names"]

    from safetensors import safe_open

    with safe_open(tmp_path / "run" / "last" / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert not any("embed" in name or "lm_head" in name for name in names)
    draft = load_draft(tmp_path / "run" / "last", target)
    logits = draft.logits(torch.eye(target.embed.shape[1]), 0)
    torch.testing.assert_close(logits, target.lm_head.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_equals_an_uninterrupted_run(train_mtp, tmp_path, model, data, optimizer):
    """CASES T4: two epochs of five rows, left after step 7."""
    keywords = ["budget.epochs=2", f"optimizer={optimizer}"]
    whole, summary = run(train_mtp, model, data, tmp_path / "whole", *keywords)
    assert [row["step"] for row in whole] == [str(i) for i in range(1, 11)]
    assert summary["finished"]

    part = tmp_path / "part"
    rows, summary = run(train_mtp, model, data, part, *keywords, "budget.stop_after_steps=7")
    assert len(rows) == 7
    assert not summary["finished"]
    rows, summary = run(train_mtp, model, data, part, *keywords, f"resume={part}")
    assert [row["step"] for row in rows] == [row["step"] for row in whole]
    for resumed, straight in zip(rows, whole, strict=True):
        for key in ("loss", "lr", "grad_norm", "agrees_1", "tokens", "epoch"):
            assert float(resumed[key]) == pytest.approx(float(straight[key]), rel=1e-6, abs=1e-9)
    assert summary["finished"]
    assert summary["steps_in_this_session"] == 3
    a, b = (torch.load(f / "state.pt", weights_only=True) for f in (part, tmp_path / "whole"))
    for name in a["params"]:
        torch.testing.assert_close(a["params"][name], b["params"][name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a["average"][name], b["average"][name], rtol=1e-6, atol=1e-7)


def test_a_short_window_is_averaged_over_what_it_holds(train_mtp, tmp_path, model, data):
    """CASES T4: ten rows by four are three steps, and the third's gradient is that of two rows."""
    keywords = ["train_data.row_tokens=12", "budget.epochs=1", "clip_norm=1e9"]
    still = ["optimizer.lr=0.0"]
    rows, _ = run(train_mtp, model, data, tmp_path / "by4", *keywords, *still, "accumulation=4")
    assert len(rows) == 3
    alone, _ = run(train_mtp, model, data, tmp_path / "by1", *keywords, *still)
    assert len(alone) == 10
    losses = [float(row["loss"]) for row in alone]
    means = [np.mean(losses[:4]), np.mean(losses[4:8]), np.mean(losses[8:])]
    assert [float(row["loss"]) for row in rows] == pytest.approx(means, rel=1e-6)
    pair, _ = run(train_mtp, model, data, tmp_path / "by2", *keywords, *still, "accumulation=2")
    assert float(rows[2]["grad_norm"]) == pytest.approx(float(pair[4]["grad_norm"]), rel=1e-5)


def test_a_reduced_lm_head_of_its_own_is_trained_further(train_mtp, tmp_path, model, data):
    """It keeps its ids, whatever the new data would rank first."""
    new = ["draft.family=llama_eagle3", "head.num_rows=40", "head.aux_layers=[0,1,2]"]
    few = ["budget.max_steps=2", "eval_every=2", "sampling.max_tokens=4", "data.num_prompts=2"]
    run(train_mtp, model, data, tmp_path / "first", *few, *new)
    other = tmp_path / "other"
    write_dataset(other, equal_samples(10, 12, seed=9), vocab_size=101, meta={})
    head = tmp_path / "first" / "head"
    run(train_mtp, model, other, tmp_path / "second", *few, f"draft.path={head}")
    target = load_target(model, device="cpu", dtype=torch.float32)
    before, after = (load_draft(path, target) for path in (head, tmp_path / "second" / "head"))
    assert torch.equal(after.vocab_map.d2t, before.vocab_map.d2t)
    unit = torch.eye(target.embed.shape[1])
    assert not torch.equal(after.logits(unit, 0), before.logits(unit, 0))
    with pytest.raises(ConfigError, match=r"head\.num_rows=40 is for a new head"):
        run(train_mtp, model, other, tmp_path / "third", f"draft.path={head}", "head.num_rows=40")


def test_an_embedding_of_its_own_is_used_and_kept(train_mtp, tmp_path, model, data):
    """The head trains on the table that it decodes with, and is saved with it."""
    target = load_target(model, device="cpu", dtype=torch.float32)
    table = target.embed.flip(0).bfloat16().float()
    start = tiny.write_draft(tmp_path / "start", target, embed=table)
    draft = load_draft(start, target)
    head = trained_head(target, start=draft)
    row = token_data.row_of_texts([[5, 9, 3, 7, 4], [8, 6, 4]])
    own = head.unroll(head.params, target_output(target, row), row, 2)
    theirs = trained_head(target._replace(embed=table), start=draft._replace(embed=table))
    assert torch.equal(own, theirs.unroll(head.params, target_output(target, row), row, 2))
    shared = trained_head(target, start=draft._replace(embed=target.embed))
    assert not torch.equal(own, shared.unroll(head.params, target_output(target, row), row, 2))

    few = ["budget.max_steps=2", "sampling.max_tokens=4", "data.num_prompts=2", "eval_every=2"]
    run(train_mtp, model, data, tmp_path / "run", *few, f"draft.path={start}")
    for name in ("head", "last"):
        kept = load_draft(tmp_path / "run" / name, target)
        assert torch.equal(kept.embed, table)
    state = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    assert not torch.equal(state["params"]["fc"], layers.unpack(draft.params.fc))
    assert not any("embed" in name for name in state["params"])


def test_a_loss_that_is_not_a_number_ends_the_run(train_mtp, tmp_path, model, data):
    overrides = ["budget.max_steps=4", "optimizer.lr=1e30"]
    with pytest.raises(ConfigError, match=r"the loss is nan at step \d; lower optimizer\.lr"):
        run(train_mtp, model, data, tmp_path / "run", *overrides)


def test_masked_data_ends_before_the_first_step(tmp_path, model):
    """CASES T1: through the command line, one clear line, and no folder is left."""
    write_dataset(
        tmp_path / "masked", [Sample([3, 4, 5], [False] * 3, 0.0)], vocab_size=101, meta={}
    )
    done = subprocess.run(
        [
            sys.executable, "train_mtp.py", f"target.path={model}",
            f"train_data.paths=[{tmp_path / 'masked'}]",
            f"hydra.run.dir={tmp_path / 'run'}",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: no supervised token in ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def own_text(model: Path, num: int) -> list[Sample]:
    """What the tiny target writes, greedily, after random prompts."""
    from running import tiny_engine

    from specdec.generate import generate

    target = load_target(model, device="cpu", dtype=torch.float32)
    engine = tiny_engine(target, k=0, max_num_batched_tokens=512, max_num_seqs=64)
    rng = np.random.default_rng(1)
    prompts = [tuple(ids) for ids in rng.integers(6, 101, (num, 4)).tolist()]
    results = generate(engine, [Request(p, 24, ignore_eos=True) for p in prompts])
    return [response(r.prompt_ids, r.token_ids, 0.0) for r in results]


@pytest.mark.parametrize("reduced", [False, True])
def test_a_head_learns_its_targets_text(train_mtp, tmp_path, model, reduced):
    write_dataset(tmp_path / "d", own_text(model, 16), vocab_size=101, meta={})
    overrides = [
        "train_data.row_tokens=448", "budget.max_steps=60", "optimizer.lr=0.01",
        "eval_every=30", "sampling.max_tokens=12", "data.num_prompts=6", "average_decay=0.9",
    ]  # fmt: skip
    if reduced:
        overrides += ["draft.logits_from=target_rows", "draft.num_draft_rows=40"]
    rows, summary = run(train_mtp, model, tmp_path / "d", tmp_path / "run", *overrides)
    first, last = rows[0], rows[-1]
    assert float(last["loss"]) < 0.5 * float(first["loss"])
    assert float(last["agrees_1"]) > float(first["agrees_1"]) + 0.2
    assert float(last["overlap_1"]) > float(first["overlap_1"])
    with (tmp_path / "run" / "eval.csv").open() as file:
        evaluations = list(csv.DictReader(file))
    assert [row["step"] for row in evaluations] == ["30", "60"]
    lengths = [float(row["acceptance_length"]) for row in evaluations]
    assert summary["acceptance_length"] == max(lengths)
    assert summary["best_step"] == (30, 60)[lengths.index(max(lengths))]
    target = load_target(model, device="cpu", dtype=torch.float32)
    draft = load_draft(
        tmp_path / "run" / "head", target, logits_from="target_rows", num_draft_rows=40
    )
    assert draft.vocab_size == 40
