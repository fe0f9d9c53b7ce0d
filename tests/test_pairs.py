"""The small pairs that ship: presets, exact greedy decoding, acceptance, templates and cards."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from safetensors import safe_open

import specdec.models
from specdec import metrics
from specdec.build import build_stages, load_models
from specdec.checks import check_keys, plain
from specdec.config import register_schemas
from specdec.experiments.acceptance import load_prompts
from specdec.experiments.decoding import decode_prompts
from specdec.prompts.records import PromptSet

PRETRAINED = Path(specdec.models.__file__).parent / "pretrained"
K = 3


class Pair(NamedTuple):
    family: str  # of the target's config.json
    head_family: str
    floor: float  # far below the acceptance length of the card, on prompts of its own kind


PAIRS = {
    "llama_eagle3": Pair("llama", "llama_eagle3", 1.7),
    "qwen3_eagle": Pair("qwen3", "qwen3_eagle", 2.0),
    "qwen3_moe_eagle": Pair("qwen3_moe", "qwen3_moe_eagle", 2.0),
    "qwen3_next_mtp": Pair("qwen3_next", "qwen3_next_mtp", 1.8),
    "deepseek_mtp": Pair("deepseek_v3", "deepseek_mtp", 1.8),
}
EVERY_PAIR = pytest.mark.parametrize("name", PAIRS)


def composed(name, *overrides):
    """The main job's configuration with the preset of a pair, in fp32 on one core."""
    register_schemas()
    overrides = [f"model={name}", "device=cpu", "dtype=float32", "num_threads=1", *overrides]
    with initialize_config_module("specdec.conf", version_base="1.3"):
        cfg = compose("config", overrides)
    check_keys(cfg)
    return cfg


def decoded(cfg, models, prompts, **propose):
    cfg = OmegaConf.create({**plain(cfg), "propose": {**plain(cfg.propose), **propose}})
    return decode_prompts(cfg, models, build_stages(cfg), prompts).outputs


def some(prompts, num):
    return PromptSet(prompts.name, prompts.prompts[:num], prompts.turns)


@EVERY_PAIR
def test_a_shipped_pair(name):
    """Its preset loads it, its head changes no greedy token and is worth its drafts."""
    cfg = composed(name, "data=simple", "sampling.max_tokens=32", f"propose.num_draft_tokens={K}")
    models = load_models(cfg, uses_draft=True)
    assert models.draft.config.family == PAIRS[name].head_family
    prompts = some(load_prompts(cfg), 5)
    plainly = decoded(cfg, models, prompts, _target_="specdec.propose.none.none")
    drafted = decoded(cfg, models, prompts)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plainly]
    found = metrics.summarize(drafted, K)
    assert found["acceptance_length"] > PAIRS[name].floor
    assert all(0 < share < 1 for share in found["per_position_joint"])

    asked = [{"role": "user", "content": "Tell me a story."}]
    text = models.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>Tell me a story.<|end|><|assistant|>"
    assert models.tokenizer.decode(list(models.eos_token_ids)) == "<|end|>"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch", [1, 5])
@EVERY_PAIR
def test_greedy_texts_of_every_depth(name, batch):
    """K = 1 to 5 by the head and by n-grams, on prompts of the pair's own kind and on others."""
    limits = ["sampling.max_tokens=64", f"schedule.max_num_seqs={batch}"]
    for data in ("simple", "builtin"):
        cfg = composed(name, f"data={data}", *limits)
        models = load_models(cfg, uses_draft=True)
        prompts = some(load_prompts(cfg), 10)
        nothing = {"_target_": "specdec.propose.none.none", "num_draft_tokens": 0}
        plainly = [o.token_ids for o in decoded(cfg, models, prompts, **nothing)]
        for k in (1, 2, 3, 5):
            drafted = decoded(cfg, models, prompts, num_draft_tokens=k)
            assert [o.token_ids for o in drafted] == plainly, f"{data} K={k}"
            assert metrics.summarize(drafted, k)["acceptance_length"] > 1.3
        ngram = {"_target_": "specdec.propose.ngram.ngram", "num_draft_tokens": K}
        copied = decoded(cfg, models, prompts, **ngram)
        assert [o.token_ids for o in copied] == plainly, f"{data} n-gram"


@EVERY_PAIR
def test_its_files(name):
    """Small, of the family that its name says, and with a card that counts its parameters."""
    folder = PRETRAINED / name
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 6e6
    for file in files:
        if file.suffix in (".json", ".md"):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"(?<![\w.])/(tmp|work|home|root|mnt)/", text), file.name
    assert json.loads((folder / "config.json").read_text())["model_type"] == PAIRS[name].family
    card = (folder / "README.md").read_text(encoding="utf-8")
    for part in ("", "head/"):
        with safe_open(folder / part / "model.safetensors", "pt") as weights:
            shapes = [weights.get_slice(key).get_shape() for key in weights.keys()]  # noqa: SIM118
        count = sum(_size(shape) for shape in shapes)
        assert count < 3e6
        if part == "" or name != "llama_eagle3":  # whose d2t and t2d are no parameters
            assert f"{count:,}" in card


def test_all_of_them_are_small():
    assert sum(file.stat().st_size for file in PRETRAINED.rglob("*") if file.is_file()) <= 40e6


def _size(shape):
    total = 1
    for length in shape:
        total *= length
    return total
