"""SmolLM2-135M-Instruct with its shipped head: greedy output equals that of transformers."""

import os
from pathlib import Path

import pytest
import torch
from running import tiny_engine

from specdec.generate import generate
from specdec.models.load import load_draft, load_target, open_checkpoint, read_config
from specdec.models.tokenizer import load_tokenizer
from specdec.prompts import builtin, mt_bench, render
from specdec.propose.autoregressive import autoregressive
from specdec.propose.none import none
from specdec.schedule import Request

HEAD = "pretrained/smollm2_135m_eagle"
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def target(smollm2_path):
    return load_target(smollm2_path)


@pytest.fixture(scope="module")
def theirs(smollm2_path):
    """transformers' Llama over the same dequantised weights, fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**read_config(smollm2_path), dtype=torch.float32)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = dict(open_checkpoint(smollm2_path))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


@torch.inference_mode()
def follows_greedily(theirs, prompt, token_ids):
    """Is every token the argmax of transformers' logits after what precedes it?

    By induction this is equality with its greedy decoding, at the cost of one pass.
    """
    logits = theirs(torch.tensor([[*prompt, *token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist() == list(token_ids)


def check(target, theirs, prompts, drafts):
    asked = [Request(tuple(prompt), NUM_TOKENS, ignore_eos=True) for prompt in prompts]
    sizes = {"max_model_len": max(map(len, prompts)) + NUM_TOKENS, "max_num_batched_tokens": 256}
    reference = None
    for k, draft in drafts:
        engine = tiny_engine(
            target,
            draft,
            autoregressive if draft else none,
            k=k,
            block_size=16,
            num_blocks=len(prompts) * (sizes["max_model_len"] // 16 + 2) + 1,
            max_num_seqs=len(prompts),
            **sizes,
        )
        results = generate(engine, asked)
        ids = [r.token_ids for r in results]
        if reference is None:
            reference = ids
            for prompt, output in zip(prompts, ids, strict=True):
                assert len(output) == NUM_TOKENS
                assert follows_greedily(theirs, prompt, output)
        assert ids == reference, f"K={k} changed the output"
        if draft:
            assert sum(r.accepted for result in results for r in result.rounds) > 0


def rendered(prompt_set, path):
    tokenizer = load_tokenizer(path)
    return [render(prompt_set, prompt, tokenizer, []) for prompt in prompt_set.prompts]


def test_greedy_equals_transformers(target, theirs, smollm2_path):
    """Five prompts, speculation off and with K = 1, 3, 5, whole and reduced draft vocabulary."""
    whole = load_draft(HEAD, target)
    reduced = load_draft(HEAD, target, logits_from="auto")
    assert reduced.vocab_size == 8192
    prompts = rendered(builtin(num_prompts=5), smollm2_path)
    check(target, theirs, prompts, [(0, None), (1, whole), (3, reduced), (5, whole)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_equals_transformers_on_mt_bench(target, theirs, smollm2_path):
    data = os.environ.get("SPECDEC_DATA")
    if data is None:
        pytest.skip("set SPECDEC_DATA to a folder that holds mt_bench/question.jsonl")
    questions = mt_bench(path=str(Path(data) / "mt_bench" / "question.jsonl"), num_prompts=20)
    whole = load_draft(HEAD, target)
    prompts = rendered(questions, smollm2_path)
    check(target, theirs, prompts, [(0, None), (1, whole), (3, whole), (5, whole)])
