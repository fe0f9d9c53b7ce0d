"""Models over paged caches on the kernels: the same hidden states as in plain torch."""

import families
import pytest
import test_deepseek
import torch
from tiny import Step, make_batch, new_cache, tiny_config, tiny_draft, tiny_target

from specdec.kernels.cache_write.reference import HeadNorms, split_and_rotate
from specdec.kernels.runtime import using
from specdec.models.batch import CacheShape
from specdec.models.deepseek_checkpoint import deepseek_config, deepseek_layout
from specdec.models.layers import Rotary
from specdec.models.llama_checkpoint import llama_config, llama_layout
from specdec.models.load import build_target
from specdec.models.paged import rotate_and_attend
from specdec.models.qwen3_checkpoint import qwen3_config, qwen3_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QWEN3 = tiny_config(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=10)
FAMILIES = {
    "llama": (tiny_config(), llama_config, llama_layout),
    "qwen3": (QWEN3, qwen3_config, qwen3_layout),
    "deepseek_v3": (
        {**test_deepseek.TINY, "model_type": "deepseek_v3"},
        deepseek_config,
        deepseek_layout,
    ),
}


def outputs(target, block_size):
    """Hidden states of a prefill, of decoding rows beside a prefill, and of more decoding rows."""
    first, second = [5, 9, 20, 33, 7, 8, 1, 2, 3, 4, 60], list(range(3, 30))
    cache = target.new_cache(CacheShape(80, block_size, 4, 8))
    tables = [list(range(1, 1 + 30 // block_size + 1)), list(range(40, 40 + 30 // block_size + 1))]
    steps = [(first[:3], 0, second[:2], 0), (first[3:6], 3, second[2:14], 2)]
    steps += [(first[6:11], 6, second[14:27], 14)]
    hidden = []
    for ids, start, other, other_start in steps:
        batch = make_batch(
            [Step(ids, start, tables[0]), Step(other, other_start, tables[1])],
            block_size,
            num_padding=3,
            device=DEVICE,
        )
        hidden.append(target.forward(batch, cache).hidden[: len(ids) + len(other)])
    return torch.cat(hidden)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_kernels_equal_torch(family, block_size):
    settings, config, layout = FAMILIES[family]
    state = families.random_state(layout(config(settings)))
    target = build_target(state, settings, device=DEVICE)
    expected = outputs(target, block_size)
    with using("triton"):
        ours = outputs(target, block_size)
    assert families.relative_error(ours, expected) < 1e-4


def test_a_draft_head_runs_fused(monkeypatch):
    """Its layers' attention is the paged one itself, so that rotation and write are one launch."""
    from specdec.kernels.cache_write import kernel

    calls, write = [], kernel.cache_write_
    monkeypatch.setattr(kernel, "cache_write_", lambda *args: calls.append(1) or write(*args))
    target = tiny_target(device=DEVICE)
    draft = tiny_draft(target, num_layers=2)
    batch = make_batch([Step([4, 8, 1, 9, 5], 0, [1, 2])], 4, device=DEVICE)
    hidden = torch.randn(5, 32, device=DEVICE)
    expected = draft.forward(batch.input_ids, hidden, batch, new_cache(draft, 4, 4), 0)
    assert not calls
    with using("triton"):
        out = draft.forward(batch.input_ids, hidden, batch, new_cache(draft, 4, 4), 0)
    assert len(calls) == 2
    assert families.relative_error(out.for_logits, expected.for_logits) < 1e-4


@pytest.mark.parametrize("norms", [False, True])
def test_attention_without_pages_sees_rotated_heads(norms):
    """As training calls it, with leading dimensions of its own."""
    qkv = torch.randn(2, 3, 8, 6)
    rotation = Rotary(torch.randn(2, 3, 1, 6), torch.randn(2, 3, 1, 6))
    weights = HeadNorms(torch.randn(6), torch.randn(6), 1e-6) if norms else None
    seen = rotate_and_attend(lambda *heads: heads, qkv, rotation, 4, weights)
    expected = split_and_rotate(qkv, rotation.cos, rotation.sin, 4, weights)
    assert [heads.shape[-2] for heads in seen] == [4, 2, 2]
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    assert torch.equal(seen[2], qkv[..., 6:, :])
    if not norms:
        still = Rotary(torch.ones(6), torch.zeros(6))
        assert torch.equal(rotate_and_attend(lambda q, k, v: q, qkv, still, 4), qkv[..., :4, :])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_products_end_in_what_follows_them(family, monkeypatch):
    """Inside a stack of dense blocks no launch for norms of the stream is left."""
    from specdec.kernels.add_norm import kernel as add_norm
    from specdec.kernels.few_rows.plan import Plan
    from specdec.models import layers

    plan = Plan(cols=16, step=32, split=2, warps=2, stages=2)
    monkeypatch.setattr(layers, "_can_pack", lambda dtype: False)  # as on a GPU
    calls, norm = [], add_norm.add_norm
    monkeypatch.setattr(add_norm, "add_norm", lambda *args: calls.append(1) or norm(*args))
    settings, config, layout = FAMILIES[family]
    settings = {**settings, "num_hidden_layers": 3, "attention_bias": True}
    if family == "llama":
        settings["mlp_bias"] = True
    state = families.random_state(layout(config(settings)))
    target = build_target(state, settings, device=DEVICE)
    expected = outputs(target, 4)
    monkeypatch.setattr(layers, "_few_rows_plan", lambda x, weight, gated=False: plan)
    with using("triton"):
        ours = outputs(target, 4)
        assert len(calls) == 2 * 3  # the first and the last of each pass
        again = outputs(target.capture((2,)), 4)
        assert len(calls) == (2 + 3) * 3  # and that of a stream which somebody asked for
    assert families.relative_error(ours, expected) < 1e-4
    assert families.relative_error(again, expected) < 1e-4
