"""Targets and heads of every family as training makes them: files that both readers agree on."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from small_shapes import HEADS, MORE, small_shape
from tiny import logits
from token_data import make_row_of

from specdec.errors import CheckpointError, ConfigError
from specdec.experiments.heads import head_config, target_output, trained_head
from specdec.experiments.targets import new_target, packed_forward
from specdec.models.load import load_draft, load_target
from specdec.training.objective import divergence, unrolled_loss

PROMPT = (5, 9, 20, 33, 7, 61, 4)


def noisy(params, scale=0.1, seed=0):
    """Parameters away from their start, exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (p + scale * torch.randn(p.shape, generator=generator)).bfloat16().float()
        for name, p in params.items()
    }


def made(family):
    settings = small_shape(family)
    model = new_target(settings, seed=1)
    params = noisy(model.params)
    return settings, model, params, model.target(params, torch.float32, 101)


@pytest.mark.parametrize("family", MORE)
def test_a_saved_target_is_the_one_that_was_trained(family, tmp_path):
    settings, model, params, target = made(family)
    model.save(tmp_path, params, settings)
    expected = logits(target, PROMPT)
    loaded = logits(load_target(tmp_path), PROMPT)
    torch.testing.assert_close(loaded, expected, rtol=1e-5, atol=1e-5)
    row = make_row_of([len(PROMPT)])
    row = row._replace(input_ids=torch.tensor(PROMPT))
    tree = model.tree(params, torch.float32)
    packed = packed_forward(tree, model.config, row).hidden @ tree.lm_head.T
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)

    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        published = theirs(torch.tensor([PROMPT])).logits[0]
    assert (published - expected).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("family", MORE)
def test_a_fresh_target_is_near_uniform_and_learns_everywhere(family):
    settings = small_shape(family)
    model = new_target(settings, seed=1)
    params = {n: p.requires_grad_() for n, p in model.params.items() if "correction" not in n}
    row = make_row_of([40, 24])
    row = row._replace(input_ids=torch.randint(0, 101, (64,)))
    tree = model.tree(model.params, torch.float32)
    hidden = packed_forward(tree, model.config, row).hidden
    loss = torch.nn.functional.cross_entropy(hidden @ tree.lm_head.T, row.input_ids.roll(-1))
    assert abs(loss.item() - np.log(101)) < 0.2
    loss.backward()
    still = [n for n, p in params.items() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not still


@pytest.mark.parametrize("family", MORE)
def test_routings_are_seen_in_the_order_of_layers(family):
    _, model, params, _ = made(family)
    seen = []
    row = make_row_of([30, 11])
    row = row._replace(input_ids=torch.randint(0, 101, (41,)))
    tree = model.tree(params, torch.float32)
    observe = seen.append if hasattr(model.config, "num_experts") else None
    packed_forward(tree, model.config, row, observe=observe)
    wanted = {"qwen3_moe": 3, "qwen3_next": 4, "deepseek": 2}.get(family, 0)
    assert len(seen) == wanted
    assert all(routing.experts.shape == (41, 2) for routing in seen)


@pytest.mark.parametrize("family", MORE)
def test_a_saved_head_is_the_one_that_was_trained(family, tmp_path):
    _, _, _, target = made(family)
    name, options = HEADS[family]
    num_rows = 40 if name == "llama_eagle3" else None
    ranking = torch.randperm(101, generator=torch.Generator().manual_seed(3))
    config = head_config(target, name, **options)
    head = trained_head(target, config, seed=2, num_rows=num_rows, ranking=ranking)
    params = noisy(head.params)
    d2t = None if num_rows is None else ranking[:num_rows].sort().values
    head.save(tmp_path, params, ranking=ranking, d2t=d2t)
    draft, loaded = head.draft(params, d2t=d2t), load_draft(tmp_path, target)
    assert loaded.config == draft.config
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 101
    row = make_row_of([9, 14])
    row = row._replace(input_ids=torch.randint(0, 101, (23,)))
    out = target_output(target, row, config.aux_layers)
    expected = head.unroll(params, out, row, 3)
    again = trained_head(target, start=loaded)
    torch.testing.assert_close(again.unroll(again.params, out, row, 3), expected)
    hidden = expected.flatten(0, 1)
    torch.testing.assert_close(loaded.logits(hidden, 0), draft.logits(hidden, 0))
    if num_rows is not None:
        assert torch.equal(loaded.vocab_map.d2t, d2t)
        torch.testing.assert_close(again.params["lm_head"], params["lm_head"])


def test_a_whole_lm_head_of_its_own_is_trained_further(tmp_path):
    _, _, _, target = made("qwen3")
    head = trained_head(target, head_config(target), seed=2)
    own = (target.lm_head[: target.vocab_size] + 0.5).bfloat16().float()  # as it is stored
    head.save(tmp_path, {**head.params, "lm_head": own})
    again = trained_head(target, start=load_draft(tmp_path, target))
    torch.testing.assert_close(again.params["lm_head"], own)
    head.save(tmp_path / "shared", head.params)
    shared = load_draft(tmp_path / "shared", target)
    assert "lm_head" not in trained_head(target, start=shared).params


def test_a_new_eagle3_head_of_rows_begins_as_the_target_s():
    _, _, _, target = made("llama")
    config = head_config(target, "llama_eagle3", aux_layers=(0, 1, 3))
    ranking = torch.arange(100, -1, -1)
    head = trained_head(target, config, num_rows=30, ranking=ranking)
    torch.testing.assert_close(head.params["lm_head"], target.lm_head[71:])
    for num_rows in (0, 102):
        with pytest.raises(ConfigError, match=f"head.num_rows={num_rows}"):
            trained_head(target, config, num_rows=num_rows, ranking=ranking)


def test_heads_that_do_not_fit_are_refused():
    target = made("qwen3")[3]
    with pytest.raises(ConfigError, match="made of llama blocks and the target of qwen3"):
        head_config(target, "llama_eagle")
    with pytest.raises(ConfigError, match=r"head\.aux_layers=\[1, 2\] are of Eagle-3 heads"):
        head_config(target, aux_layers=(1, 2))
    with pytest.raises(ConfigError, match=r"draft\.family=eagle9 is not one of"):
        head_config(target, "eagle9")
    with pytest.raises(CheckpointError, match="repeat"):
        head_config(target, "qwen3_eagle3", aux_layers=(1, 1, 2))
    with pytest.raises(ConfigError, match=r"head\.num_layers=2"):
        head_config(made("deepseek")[3], num_layers=2)
    with pytest.raises(ConfigError, match=r"shape\.model_type='gpt2'"):
        new_target({"model_type": "gpt2"})


@pytest.mark.parametrize("reduced", [False, True])
def test_an_own_lm_head_takes_the_gradient(reduced):
    row = make_row_of([11, 6, 4, 13])
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    ids = torch.arange(0, 101, 2) if reduced else torch.arange(101)
    t2d = torch.full((101,), -1)
    t2d[ids] = torch.arange(len(ids))
    hidden, target, lm_head = random(3, 34, 16).requires_grad_(), random(34, 16), random(101, 16)
    own = random(len(ids), 16).requires_grad_()
    weights, total = [0.5, 0.3, 0.2], 0.0
    for k, weight in enumerate(weights):
        columns = [j for j in row.labels.tolist() if row.positions[j] >= k + 2]
        j = torch.tensor([j for j in columns if t2d[row.input_ids[j]] >= 0])
        log_q = (hidden[k][j - 2 - k] @ own.T).log_softmax(-1)
        log_p = (target[j - 1] @ lm_head[ids].T).log_softmax(-1)
        total = total + weight * (log_p.exp() * (log_p - log_q)).sum()
    wanted = torch.autograd.grad(total, (hidden, own))
    for num_chunks in (1, 5):
        loss, _ = unrolled_loss(
            hidden, target, lm_head[ids], row, partial(divergence, kl=1.0), weights,
            own_head=own, t2d=t2d if reduced else None, num_chunks=num_chunks,
        )  # fmt: skip
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-5)
        got = torch.autograd.grad(2 * loss, (hidden, own))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, 2 * b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", MORE)
def test_a_head_learns_and_its_target_does_not(family):
    """A few steps on one row bring the head nearer to its target, at every unroll step."""
    _, _, _, target = made(family)
    name, options = HEADS[family]
    num_rows = 60 if name == "llama_eagle3" else None
    ranking, ids = torch.arange(101), torch.arange(101)
    t2d = None
    if num_rows is not None:
        ids = ranking[:num_rows]
        t2d = torch.full((101,), -1)
        t2d[ids] = torch.arange(num_rows)
    head = trained_head(
        target, head_config(target, name, **options), num_rows=num_rows, ranking=ranking
    )
    params = {n: p.requires_grad_() for n, p in head.params.items()}
    row = make_row_of([30, 34])
    generator = torch.Generator().manual_seed(0)
    row = row._replace(input_ids=torch.randint(0, 60, (64,), generator=generator))
    before = target.embed.clone()
    out = target_output(target, row, head.config.aux_layers)
    optimizer = torch.optim.AdamW(params.values(), lr=0.01)
    overlaps = []
    for _ in range(25):
        loss, sums = unrolled_loss(
            head.unroll(params, out, row, 3), out.hidden, target.lm_head[ids], row,
            partial(divergence, kl=1.0), [0.01] * 3, own_head=head.lm_head(params), t2d=t2d,
        )  # fmt: skip
        overlaps.append(sums.overlap)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (overlaps[-1] > overlaps[0] + 2).all()
    untrained = [n for n, p in params.items() if p.grad is None and "correction" not in n]
    assert not untrained
    assert torch.equal(target.embed, before)
    assert not target.embed.requires_grad
