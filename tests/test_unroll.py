"""The unrolled training pass equals what drafting does, paged and step by step."""

from functools import partial

import numpy as np
import pytest
import torch
from head_runs import HEADS, load
from tiny import Step, make_batch, new_cache, prefill, tiny_draft, tiny_target

from specdec.engine import Engine
from specdec.experiments.heads import target_output, trained_head
from specdec.generate import generate
from specdec.models.axes import FAMILIES
from specdec.postprocess import postprocess
from specdec.propose.autoregressive import autoregressive
from specdec.schedule import Limits, Request, schedule
from specdec.step import Stages
from specdec.training.data import load_dataset, response, write_dataset
from specdec.training.packing import make_row
from specdec.verify.greedy import greedy

BLOCK = 4
STEPS = 5


@pytest.fixture
def target():
    return tiny_target()


def packed(tmp_path, texts: list[list[int]], row_tokens: int):
    samples = [response(text[:2], text[2:], 0.0) for text in texts]
    write_dataset(tmp_path / "d", samples, vocab_size=101, meta={})
    data = load_dataset(tmp_path / "d")
    return make_row(data, np.arange(len(texts)), row_tokens)


def random_texts(lengths: list[int]) -> list[list[int]]:
    return [np.random.default_rng(n).integers(3, 101, n).tolist() for n in lengths]


PAIRS = {name: case for name, case in HEADS.items() if name in FAMILIES}


@pytest.mark.parametrize("name", PAIRS)
def test_packed_target_equals_paged(tmp_path, name):
    target = load(PAIRS[name]).target
    texts = random_texts([13, 6, 21])
    row = packed(tmp_path, texts, 45)
    packed_hidden = target_output(target, row).hidden[: row.num_tokens]
    paged = prefill(target, texts, new_cache(target, 20, BLOCK), BLOCK)
    error = (packed_hidden - torch.cat(paged)).norm() / packed_hidden.norm()
    assert error < 1e-5


@pytest.mark.parametrize("name", PAIRS)
def test_unroll_equals_the_draft_chain(tmp_path, name):
    """From every column of every document: a paged first pass over the true rows up to it, then
    one row a step on the head's own hidden state and the text's next token."""
    target, draft = load(PAIRS[name])[:2]
    texts = random_texts([9, 4, 13])
    row = packed(tmp_path, texts, 28)
    taken = target_output(target, row, draft.aux_layers)
    hidden = draft.features(taken)
    head = trained_head(target, start=draft)
    unrolled = head.unroll(head.params, taken, row, STEPS)

    compared = 0
    for text, first in zip(texts, row.cu_seqlens.tolist(), strict=False):
        blocks = list(range(1, 2 + (len(text) + STEPS) // BLOCK))
        for start in range(len(text) - 1):
            cache = new_cache(draft, len(blocks) + 1, BLOCK, num_slots=1)
            true_rows = make_batch([Step(text[1 : start + 2], 0, blocks)], BLOCK)
            features = hidden[first : first + start + 1]
            out = draft.forward(true_rows.input_ids, features, true_rows, cache, 0)
            for step in range(STEPS):
                expected = out.for_logits[-1]
                error = (unrolled[step, first + start] - expected).norm() / expected.norm()
                assert error < 1e-5
                compared += 1
                if start + 2 + step >= len(text):
                    break
                ids = [text[start + 2 + step]]
                single = make_batch([Step(ids, start + 1 + step, blocks)], BLOCK)
                out = draft.forward(single.input_ids, out.recycle[-1:], single, cache, step + 1)
    assert compared > 60


def test_unroll_predicts_every_round_of_the_engine(tmp_path, target):
    """Greedy drafts are kept exactly as far as the unrolled head's argmax follows the text."""
    draft = tiny_draft(target)
    prompts = random_texts([9, 4, 6])
    limits = Limits(4, 64, 128, BLOCK, 200, STEPS)
    stages = Stages(
        partial(schedule, num_draft_tokens=STEPS, max_num_seqs=4, max_num_batched_tokens=64),
        greedy,
        postprocess,
        partial(autoregressive, num_draft_tokens=STEPS, draft_sampling="greedy"),
    )
    # A head that agrees with the target now and then: the target's own hidden, disturbed.
    head = trained_head(target, seed=3)
    generator = torch.Generator().manual_seed(0)
    params = {
        name: p + 0.05 * torch.randn(p.shape, generator=generator)
        for name, p in head.params.items()
    }
    draft = head.draft(params)
    engine = Engine(target, draft, stages, limits, eos_token_ids=(2,))
    results = generate(engine, [Request(tuple(p), 60, ignore_eos=True) for p in prompts])

    texts = [[*result.prompt_ids, *result.token_ids] for result in results]
    row = packed(tmp_path, texts, sum(map(len, texts)) + 3)
    unrolled = head.unroll(params, target_output(target, row), row, STEPS)
    choices = draft.logits(unrolled.flatten(0, 1)).argmax(-1).view(STEPS, -1).tolist()
    kept = []
    for result, text, first in zip(results, texts, row.cu_seqlens.tolist(), strict=False):
        committed = len(result.prompt_ids) + 1
        for drafted, accepted, tokens in result.rounds:
            column = first + committed - 2
            right = [choices[k][column] == text[committed + k] for k in range(drafted)]
            expected = right.index(False) if False in right else drafted
            assert accepted == expected
            kept.append(accepted)
            committed += tokens
    assert len(set(kept)) > 1  # not all rounds alike


@pytest.mark.gpu
def test_unroll_in_half_precision_on_a_gpu(tmp_path):
    from specdec.training.packing import to_device

    row = packed(tmp_path, random_texts([40, 7, 90, 33]), 180)
    on_cpu = tiny_target()
    wanted = trained_head(on_cpu, seed=1)
    noise = torch.Generator().manual_seed(2)  # a new head's zero matrices would hide gradients
    start = {n: p + 0.1 * torch.randn(p.shape, generator=noise) for n, p in wanted.params.items()}
    params = {name: p.clone().requires_grad_() for name, p in start.items()}
    features = target_output(on_cpu, row)
    expected = wanted.unroll(params, features, row, STEPS)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    expected.backward(gradient)

    device = torch.device("cuda")
    on_gpu = tiny_target(device="cuda", dtype=torch.bfloat16)
    head = trained_head(on_gpu, seed=1)
    gpu_params = {name: p.to(device).requires_grad_() for name, p in start.items()}
    gpu_row = to_device(row, device)
    gpu_features = target_output(on_gpu, gpu_row)
    actual = head.unroll(gpu_params, gpu_features, gpu_row, STEPS)
    actual.backward(gradient.to(device, torch.bfloat16))

    def error(a, b):
        return ((a.detach().float().cpu() - b.detach()).norm() / b.detach().norm()).item()

    assert error(gpu_features.hidden, features.hidden) < 0.05
    assert error(actual, expected) < 0.05
    for name, p in params.items():
        assert p.grad.norm() > 0, name
        assert error(gpu_params[name].grad, p.grad) < 0.1, name
