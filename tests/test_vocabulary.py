"""Padded and unequal vocabularies (C5): ids past the real ones are never drafted nor emitted, and
a draft with another tokenizer is refused at start."""

import json
from dataclasses import replace

import families
import pytest
import tiny
import torch
from running import requests, tiny_engine

from specdec.errors import CheckpointError
from specdec.generate import generate
from specdec.models import eagle_checkpoint
from specdec.models.deepseek_checkpoint import deepseek_config, deepseek_layout
from specdec.models.load import load_draft, load_target
from specdec.models.qwen3_moe_checkpoint import qwen3_moe_config, qwen3_moe_layout
from specdec.models.tokenizer import check_same_tokenizer, token_strings
from specdec.propose.autoregressive import autoregressive
from specdec.propose.ngram import ngram
from specdec.verify.rejection import rejection

TARGET, DRAFT, REAL = 104, 100, 98  # rows of the matrices, and ids of the tokenizer
PROMPTS = [[5, 9, 11], list(range(3, 40)), [7] * 9, [97, 60, 70, 80]]


def write_tokenizer(folder, num_ids=REAL, **changed):
    names = [f"t{i}" for i in range(num_ids)]
    for old, new in changed.items():
        names[int(old.removeprefix("id"))] = new
    added = [{"id": i, "content": names[i]} for i in range(num_ids - 3, num_ids)]
    vocab = {name: i for i, name in enumerate(names[: num_ids - 3])}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    return folder


def write_llama(folder):
    config = tiny.tiny_config(vocab_size=TARGET, tie_word_embeddings=False)
    return config, tiny.tiny_state(config)


def write_qwen3_moe(folder):
    from test_qwen3_moe import TINY

    config = {**TINY, "model_type": "qwen3_moe", "vocab_size": TARGET}
    return config, families.random_state(qwen3_moe_layout(qwen3_moe_config(config)))


def write_deepseek(folder):
    from test_deepseek import TINY

    config = {**TINY, "model_type": "deepseek_v3", "vocab_size": TARGET}
    return config, families.random_state(deepseek_layout(deepseek_config(config)))


@pytest.fixture(scope="module", params=[write_llama, write_qwen3_moe, write_deepseek])
def folder(request, tmp_path_factory):
    """A target whose padding rows would win often if they were not left out."""
    folder = tmp_path_factory.mktemp("target")
    config, state = request.param(folder)
    state["lm_head.weight"][REAL:] *= 8
    write_tokenizer(tiny.write_checkpoint(folder, config, dict(state)))
    return folder


def write_draft(folder, target):
    """An Eagle head with tables of its own, of another width."""
    llama = target if hasattr(target.config, "mlp_bias") else tiny.tiny_target(vocab_size=TARGET)
    head, config = tiny.tiny_head(llama)
    config = replace(config, block=replace(config.block, vocab_size=DRAFT))
    lm_head = target.lm_head[:DRAFT].clone()
    lm_head[REAL:] *= 8
    own = {"embed": target.embed[:DRAFT].clone(), "lm_head": lm_head}
    eagle_checkpoint.save_head(folder, head, config, dtype=torch.float32, **own)
    return write_tokenizer(folder)


def test_padding_ids_never_appear(folder, tmp_path):
    target = load_target(folder)
    assert (target.vocab_size, target.lm_head.shape[0]) == (REAL, TARGET)
    assert tiny.logits(target).shape[-1] == TARGET
    logits = tiny.logits(target, list(range(3, 60)))
    assert (logits.argmax(-1) >= REAL).float().mean() > 0.1
    draft = load_draft(write_draft(tmp_path, target), target)
    assert draft.vocab_size == REAL
    is_llama = hasattr(target.config, "mlp_bias")
    rounds = 5 if is_llama else 1  # 2,000 tokens once, some of every family
    drafters = [(autoregressive, draft, "sample"), (ngram, None, "greedy")][: 1 + is_llama]
    hot = requests(PROMPTS * rounds, max_tokens=104, temperature=2.0, ignore_eos=True)
    for proposer, head, mode in drafters:
        engine = tiny_engine(
            target,
            head,
            proposer,
            rejection,
            draft_sampling=mode,
            max_model_len=160,
            max_num_seqs=20,
            max_num_batched_tokens=128,
        )
        ids = [i for result in generate(engine, hot) for i in result.token_ids]
        assert len(ids) >= 400 * rounds
        assert max(ids) < REAL


def test_greedy_equals_plain(folder, tmp_path):
    target = load_target(folder)
    draft = load_draft(write_draft(tmp_path, target), target)
    cold = requests(PROMPTS, max_tokens=24)
    plain = [r.token_ids for r in generate(tiny_engine(target), cold)]
    assert all(i < REAL for ids in plain for i in ids)
    for proposer, head in ((autoregressive, draft), (ngram, None)):
        results = generate(tiny_engine(target, head, proposer), cold)
        assert [r.token_ids for r in results] == plain


def test_a_prompt_with_a_padding_id_is_refused(folder):
    from specdec.errors import RequestError

    engine = tiny_engine(load_target(folder))
    with pytest.raises(RequestError, match="98 is outside the vocabulary of 98"):
        engine.add(requests([[5, REAL]])[0])


def test_token_strings(tmp_path):
    assert token_strings(write_tokenizer(tmp_path / "a"))[97] == "t97"
    unigram = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    assert token_strings(tmp_path) == {0: "a", 1: "b"}
    (tmp_path / "none").mkdir()
    assert token_strings(tmp_path / "none") is None


def test_another_tokenizer_is_refused(tmp_path):
    target = write_tokenizer(tmp_path / "target")

    def refused(match, **changed):
        draft = write_tokenizer(tmp_path / "draft", **changed)
        tiny.one_line_error(lambda: check_same_tokenizer(target, draft), CheckpointError, match)

    refused("id 40 is 't41' and 't40'", id40="t41", id41="t40")
    refused("id 97 is '<x>' and 't97'", id97="<x>")  # among the added tokens
    refused("id 0 is 'other'", num_ids=50, id0="other")
    check_same_tokenizer(target, write_tokenizer(tmp_path / "draft"))
    check_same_tokenizer(target, write_tokenizer(tmp_path / "draft", num_ids=120))
    check_same_tokenizer(target, write_tokenizer(tmp_path / "draft", num_ids=90))
    (tmp_path / "draft" / "tokenizer.json").unlink()
    check_same_tokenizer(target, tmp_path / "draft")


def test_real_tokenizer_equals_itself(smollm2_path):
    assert len(token_strings(smollm2_path)) == 49152
    check_same_tokenizer(smollm2_path, smollm2_path)


def test_start_up_refuses_another_tokenizer(tmp_path):
    from hydra import compose, initialize_config_module

    from specdec import build
    from specdec.config import register_schemas

    config, state = write_llama(tmp_path)
    target = tiny.write_checkpoint(tmp_path / "target", config, state)
    write_tokenizer(target)
    draft = write_draft(tmp_path / "draft", load_target(target))
    write_tokenizer(draft, id7="t8", id8="t7")
    register_schemas()
    with initialize_config_module("specdec.conf", version_base="1.3"):
        overrides = [f"target.path={target}", f"draft.path={draft}", "device=cpu"]
        cfg = compose("config", overrides=[*overrides, "dtype=float32"])
    with pytest.raises(CheckpointError, match=r"another tokenizer.* id 7 is 't8' and 't7'"):
        build.load_models(cfg, uses_draft=True)
