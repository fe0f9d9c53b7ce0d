"""Small pairs in miniature: losses, balanced experts, and every stage of experiments/pairs.py."""

import csv
import json
import math
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from scripts import call, rows_of
from small_shapes import HEADS, MORE, small_changes
from small_text import VOCAB, write_small_data
from token_data import make_row_of

import specdec.conf
from specdec.build import load_models
from specdec.checks import check_keys
from specdec.config import register_schemas
from specdec.experiments import pairs as driver
from specdec.experiments import pretrain as script
from specdec.experiments import quality as judge
from specdec.models.load import load_draft, load_target
from specdec.models.tokenizer import eos_token_ids, load_tokenizer
from specdec.training import pair_config
from specdec.training.pretraining import (
    balance_loss,
    bits_per_byte,
    expert_loads,
    least_used,
    next_token_loss,
    shift_corrections_,
)

ROOT = Path(__file__).parents[1]
CPU = ["device=cpu", "dtype=float32"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_small_data(tmp_path_factory.mktemp("small"))


def composed(name, folder, *overrides):
    """A script's configuration, as the script itself would see it."""
    register_schemas()
    pair_config.register()
    folder.mkdir(exist_ok=True)
    with initialize_config_module("specdec.conf", version_base="1.3"):
        cfg = compose(name, [*overrides, f"hydra.run.dir={folder}"], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    del cfg.hydra
    check_keys(cfg)
    return cfg


def pretrained(family, data, folder, *overrides):
    shape = [f"++shape.{name}={value}" for name, value in small_changes(family).items()]
    pair = HEADS[family][0]
    cfg = composed(
        "pretrain", folder, f"+experiment={pair}_target", *shape, *CPU, "logger=none",
        f"tokenizer={data / 'tokenizer'}", f"train_data.paths=[{data / 'train'}]",
        f"heldout_path={data / 'heldout'}", "train_data.row_tokens=512", "optimizer.lr=2e-2",
        "average_decay=0.8", "log_every=5", "budget.max_seconds=null", *overrides,
    )  # fmt: skip
    script.pretrain(cfg, folder)
    with (folder / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("family", MORE)
def test_every_family_learns(family, data, tmp_path):
    quick = ["budget.max_steps=40", "balance.loss=0.3", "balance.rate=0.01", "optimizer.lr=1e-2"]
    rows, summary = pretrained(family, data, tmp_path, *quick)
    assert float(rows[0]["loss"]) > 5.0
    assert float(rows[-1]["loss"]) < 4.3
    assert summary["bits_per_byte"] < 3.6
    assert summary["finished"]
    target = load_target(tmp_path / "target")
    assert target.vocab_size == VOCAB
    assert eos_token_ids(tmp_path / "target") == (0,)
    assert load_tokenizer(tmp_path / "target").chat_template
    if "num_experts" in MORE[family] or family == "deepseek":
        assert sum(float(row["least_used_expert"]) for row in rows[-3:]) > 0.3


def test_resuming_goes_on_as_if_nothing_had_happened(data, tmp_path):
    """The biases that no optimiser knows are part of the state too."""
    whole, _ = pretrained("deepseek", data, tmp_path / "whole", "budget.max_steps=8", "log_every=1")
    part = tmp_path / "part"
    keywords = ["budget.max_steps=8", "log_every=1"]
    pretrained("deepseek", data, part, *keywords, "budget.stop_after_steps=5")
    rows, summary = pretrained("deepseek", data, part, *keywords, f"resume={part}")
    assert summary["steps_in_this_session"] == 3
    for a, b in zip(rows, whole, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-6)
    a, b = (torch.load(f / "state.pt", weights_only=True) for f in (part, tmp_path / "whole"))
    biases = [name for name in a["params"] if name.endswith("correction")]
    assert len(biases) == 2
    assert all(b["params"][name].abs().sum() > 0 for name in biases)
    for name in b["params"]:
        torch.testing.assert_close(a["params"][name], b["params"][name], rtol=1e-6, atol=1e-7)


def test_the_folder_is_all_that_resuming_needs(data, tmp_path, monkeypatch, capfd):
    """Alone; with everything repeated and in its own folder, as experiments/pairs.py does it; and
    never with another shape."""
    small = [f"++shape.{name}={value}" for name, value in small_changes("llama").items()]
    argv = [
        "+experiment=llama_eagle3_target", *small, *CPU, "logger=none", "budget.max_seconds=null",
        f"tokenizer={data / 'tokenizer'}", f"train_data.paths=[{data / 'train'}]",
        f"heldout_path={data / 'heldout'}", "train_data.row_tokens=512", "eval_every=3",
    ]  # fmt: skip
    limit = ["budget.max_steps=6"]
    whole, part = ([f"hydra.run.dir={tmp_path / name}"] for name in ("whole", "part"))
    assert call(script.main, [*argv, *limit, *whole], monkeypatch) == 0
    assert call(script.main, [*argv, *limit, "budget.stop_after_steps=3", *part], monkeypatch) == 0
    resume = f"resume={tmp_path / 'part'}"
    alone = [resume, *limit, f"hydra.run.dir={tmp_path / 'alone'}"]
    assert call(script.main, alone, monkeypatch) == 0
    capfd.readouterr()
    before = (tmp_path / "part" / "status.json").read_bytes()
    wider = [*argv, *limit, resume, "++shape.intermediate_size=96", *part]
    assert call(script.main, wider, monkeypatch) == 1
    assert "shape.intermediate_size=96 was 48 before" in capfd.readouterr().err
    assert (tmp_path / "part" / "status.json").read_bytes() == before
    assert call(script.main, [*argv, *limit, resume, *part], monkeypatch) == 0
    states = {
        name: torch.load(tmp_path / name / "state.pt", weights_only=True)
        for name in ("whole", "alone", "part")
    }
    for name in ("alone", "part"):
        for kind in ("params", "average"):
            for key, value in states["whole"][kind].items():
                assert torch.equal(states[name][kind][key], value)
        assert rows_of(tmp_path / name / "eval.csv") == rows_of(tmp_path / "whole" / "eval.csv")


def test_a_pair_from_pretraining_to_its_card(train_mtp, data, tmp_path):
    """Eagle-3 over a reduced vocabulary: each stage's script with its recipe, then the export."""
    own = tmp_path / "llama_eagle3"
    own.mkdir()
    pretrained("llama", data, own / "pretrain", "budget.max_steps=60")
    target = own / "pretrain" / "target"
    cfg = composed(
        "train_mtp", own / "head_run", "+experiment=llama_eagle3_head", *CPU, "logger=none",
        f"target.path={target}", f"train_data.paths=[{data / 'train'}]", "kernels=torch",
        "train_data.row_tokens=512", "optimizer.lr=1e-2", "log_every=5", "unroll.num_steps=3",
        "budget.max_seconds=null", "budget.max_steps=30", "average_decay=0.8",
        "head.aux_layers=[0,1,3]", "head.num_rows=200", "data.num_prompts=4",
        "sampling.max_tokens=10",
    )  # fmt: skip
    train_mtp.train(cfg, own / "head_run")
    with (own / "head_run" / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["loss"]) < 0.5 * float(rows[0]["loss"])
    # the row of the first step alone has too few labels for a share
    assert float(rows[-1]["agrees_1"]) > float(rows[1]["agrees_1"])
    draft = load_draft(own / "head_run" / "head", load_target(target))
    assert draft.vocab_size == 200
    assert draft.aux_layers == (0, 1, 3)

    cfg = composed(
        "quality", own / "quality", *CPU, "kernels=torch", f"target.path={target}",
        f"draft.path={own / 'head_run' / 'head'}", f"text.heldout_path={data / 'heldout'}",
        f"text.words_path={data / 'words.txt'}", "text.train_data.row_tokens=512",
        "text.num_samples=7", "text.max_tokens=12", "data.num_prompts=5", "builtin.num_prompts=4",
        "builtin_max_tokens=8", "sampling.max_tokens=12",
    )  # fmt: skip
    length = judge.quality(cfg, own / "quality")
    found = json.loads((own / "quality" / "quality.json").read_text())
    assert found["heldout"]["acceptance_length"] == length > 1
    assert found["heldout"]["same_texts"] == 1  # greedy, whatever drafts
    summary = json.loads((own / "pretrain" / "summary.json").read_text())
    assert found["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=0.02)
    assert 0 < found["samples"]["known_word_share"] <= 1
    assert found["samples"]["num_samples"] == 10  # two to each prompt
    low, high = found["samples"]["repeated_8gram_share_ci95"]
    assert 0 <= low <= found["samples"]["repeated_8gram_share"] <= high <= 1
    cfg.text.heldout_path = cfg.text.words_path = None  # texts that do not ship
    models = load_models(cfg, uses_draft=False)
    prompts = judge.load_prompts(cfg)
    assert judge.heldout_bits(cfg, models) is None
    assert judge.sampled(cfg, models, prompts, own)["known_word_share"] is None
    assert found["heldout"]["num_prompts"] == 5
    assert found["builtin"]["num_prompts"] == 4

    (tmp_path / "retokenize").mkdir()
    counts = {"num_tokens": 9, "vocab_size": VOCAB, "answer_bytes": 7, "num_samples": 1}
    told = {"train": counts, "heldout": counts, "prompts": 3}
    (tmp_path / "retokenize" / "summary.json").write_text(json.dumps(told))
    cfg = composed(
        "pairs", tmp_path / "run", f"path={tmp_path}", "pairs=[llama_eagle3]",
        "stages=[pretrain,head,quality,export]", f"archive_path={tmp_path / 'archives'}",
    )  # fmt: skip
    driver.make_pairs(cfg, tmp_path / "run")  # the finished stages are not run again
    shipped = tmp_path / "pretrained" / "llama_eagle3"
    names = {str(file.relative_to(shipped)) for file in shipped.rglob("*") if file.is_file()}
    assert names == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "head/config.json"),
        "head/model.safetensors",
    }
    card = (shipped / "README.md").read_text()
    assert f"{length:.3f}" in card
    assert f"{found['bits_per_byte']:.3f} bits a byte" in card
    with tarfile.open(tmp_path / "archives" / "llama_eagle3.tar") as archive:
        packed = set(archive.getnames())
    assert "llama_eagle3/head/model.safetensors" in packed
    assert "records/llama_eagle3/quality/quality.json" in packed
    load_draft(shipped / "head", load_target(shipped))


def test_the_driver_names_the_stage_that_failed(tmp_path):
    cfg = composed(
        "pairs", tmp_path / "run", f"path={tmp_path}", "stages=[retokenize]",
        "overrides.retokenize=['vocab_sise=3']",
    )  # fmt: skip
    with pytest.raises(driver.StageFailed, match=r"vocabulary failed: .*vocab_sise"):
        driver.make_pairs(cfg, tmp_path / "run")
    cfg.stages = ["bake"]
    with pytest.raises(driver.ConfigError, match="known are generate"):
        driver.make_pairs(cfg, tmp_path / "run")


def test_the_driver_asks_for_a_gpu_or_to_be_told_to_do_without(tmp_path, monkeypatch):
    """Only for stages that are left; the line that names the fix can be copied as it is."""
    ran = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "run_stage", lambda cfg, stage: ran.append(stage.name))
    path = tmp_path / "pairs"
    asked = [f"path={path}", "stages=[generate,retokenize,head]", "pairs=[qwen3_eagle]"]
    with pytest.raises(driver.ConfigError, match="no GPU for generate, head;") as refused:
        driver.make_pairs(composed("pairs", tmp_path / "run", *asked), tmp_path / "run")
    assert not path.exists()
    assert ran == []
    fix = re.findall(r'"(.*?)"', str(refused.value))
    assert len(fix) == 2
    driver.make_pairs(composed("pairs", tmp_path / "run", *asked, *fix), tmp_path / "run")
    assert ran == ["generate", "retokenize", "head"]

    (path / "generate").mkdir()
    (path / "generate" / "summary.json").write_text("{}")  # done before
    with pytest.raises(driver.ConfigError, match=r"^there is no GPU for head;"):
        driver.make_pairs(composed("pairs", tmp_path / "run", *asked), tmp_path / "run")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    driver.make_pairs(composed("pairs", tmp_path / "run", *asked), tmp_path / "run")
    assert len(ran) == 6


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("text.num_samples=0", r"text\.num_samples=0 must be an integer of at least 1"),
        ("text.temperature=-1", r"text\.temperature=-1\.0 must be"),
        ("builtin_max_tokens=0", "builtin_max_tokens=0 must be"),
        ("rival.num_draft_tokens=-1", r"rival\.num_draft_tokens=-1 must be"),
        ("text.words_path=/no/such/words.txt", "/no/such/words.txt"),
        ("text.heldout_path=/no/such/data", "/no/such/data is not a data set"),
    ],
)
def test_quality_refuses_before_it_decodes(override, said, tmp_path, monkeypatch):
    cfg = composed(
        "quality", tmp_path, *CPU, "target=qwen3_eagle", "draft=qwen3_eagle", override
    )  # fmt: skip
    monkeypatch.setattr(judge, "compare", lambda *_: pytest.fail("decoded"))
    with pytest.raises((ValueError, OSError), match=said):
        judge.quality(cfg, tmp_path)


def test_a_recipe_for_every_stage_of_every_pair(tmp_path):
    """Each composes, and asks for the head that its name says."""
    cfg = composed("pairs", tmp_path)
    folder = Path(specdec.conf.__file__).parent / "experiment"
    recipes = {file.stem for file in folder.iterdir()}
    assert recipes == {"stories", *(f"{p}_{s}" for p in cfg.pairs for s in ("target", "head"))}
    for pair in cfg.pairs:
        composed("pretrain", tmp_path, f"+experiment={pair}_target", "tokenizer=t")
        head = composed("train_mtp", tmp_path, f"+experiment={pair}_head", "target.path=t")
        assert head.draft.family == pair
        preset = composed("config", tmp_path, f"model={pair}")
        assert preset.draft.path == f"{preset.target.path}/head"
    stories = composed("generate", tmp_path, "+experiment=stories")
    assert stories.responses.num_tokens >= 24e6


def test_loss_and_bits_by_their_definition():
    row = make_row_of([5, 4])
    row = row._replace(labels=torch.tensor([2, 3, 6, 8]))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 8, generator=generator)
    lm_head = torch.randn(9, 8, generator=generator)
    nats = -sum(float((hidden[j - 1] @ lm_head.T).log_softmax(-1)[j]) for j in (2, 3, 6, 8))
    assert next_token_loss(hidden, lm_head, row).item() == pytest.approx(nats, rel=1e-5)
    num_bytes = torch.tensor([9, 9, 3, 1, 9, 9, 2, 9, 0])
    bits = bits_per_byte(lambda _: hidden, lm_head, [row, row], num_bytes)
    assert bits == pytest.approx(nats / math.log(2) / 6, rel=1e-5)


def test_balance_pulls_towards_all_experts():
    even = torch.arange(8).repeat(5).view(-1, 2)
    scores = torch.full((20, 8), 0.125)
    assert expert_loads(even, 8).tolist() == pytest.approx([1 / 8] * 8)
    assert balance_loss([scores, scores], [even, even]).item() == pytest.approx(1)
    assert least_used([expert_loads(even, 8)]) == pytest.approx(1)

    logits = torch.zeros(20, 8, requires_grad=True)
    uneven = torch.tensor([[0, 1]] * 20)
    assert least_used([expert_loads(even, 8), expert_loads(uneven, 8)]) == 0
    loss = balance_loss([logits.softmax(-1)], [uneven])
    assert loss.item() == pytest.approx(1)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[:, :2] > 0).all()
    assert (gradient[:, 2:] < 0).all()
    crowded = torch.zeros(20, 8)
    crowded[:, :2] = 0.5
    assert balance_loss([crowded], [uneven]).item() == pytest.approx(4)

    bias = [torch.zeros(8), torch.zeros(8)]
    shift_corrections_(bias, [uneven, even], 0.01)
    assert bias[0].tolist() == pytest.approx([-0.01] * 2 + [0.01] * 6)
    assert bias[1].abs().max() == 0


@pytest.mark.slow
def test_stages_as_processes(data, tmp_path):
    """The driver runs the scripts themselves, side by side, and resumes nothing that is done."""
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "retokenize").mkdir()
    counts = {"num_tokens": 9, "vocab_size": VOCAB, "answer_bytes": 7, "num_samples": 1}
    told = {"train": counts, "heldout": counts, "prompts": 3}
    (tmp_path / "retokenize" / "summary.json").write_text(json.dumps(told))
    small = ["train_data.row_tokens=512", "budget.max_steps=4", "budget.max_seconds=null"]
    short = [*small, "kernels=torch", "data.num_prompts=2", "sampling.max_tokens=4"]
    few = [
        *("text.num_samples=2", "text.max_tokens=5", "data.num_prompts=2", "builtin.num_prompts=2"),
        *("builtin_max_tokens=4", "sampling.max_tokens=5", "text.train_data.row_tokens=512"),
        "kernels=torch",
    ]
    command = [
        sys.executable, "experiments/pairs.py", f"path={tmp_path}",
        "stages=[pretrain,head,quality,export]", "pairs=[qwen3_next_mtp,deepseek_mtp]",
        "overrides.all=['device=cpu']", f"overrides.pretrain={small}", f"overrides.head={short}",
        f"overrides.quality={few}", f"hydra.run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    for told_before in (False, True):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stderr
        assert ("done before" in done.stdout) is told_before
    for pair in ("qwen3_next_mtp", "deepseek_mtp"):
        shipped = tmp_path / "pretrained" / pair
        assert load_draft(shipped / "head", load_target(shipped)).config.family == pair
        size = sum(f.stat().st_size for f in shipped.rglob("*") if f.is_file())
        assert size < 6e6
