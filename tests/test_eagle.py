"""The Eagle head: its arithmetic against straight-line code, its axes, its checkpoints."""

from dataclasses import replace

import pytest
import tiny
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from specdec.errors import CheckpointError, ConfigError
from specdec.models.axes import EAGLE_LLAMA, HeadAxes, head_axes
from specdec.models.eagle import EagleConfig, eagle_block, eagle_draft, fuse, init_head
from specdec.models.eagle_checkpoint import save_head
from specdec.models.layers import map_tree, tree_leaves
from specdec.models.load import load_draft, open_checkpoint

TOKENS = [7, 3, 60, 2, 9, 41, 5, 1, 13]


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target(rope_theta=3e4)


def straight_line(state, config, embed, ids, hidden):
    """Eagle for Llama as the seed text has it: fc(cat(embed, hidden)), layers, hidden + residual.

    One whole sequence [S] at positions 0..S-1, written with the checkpoint's own tensors.
    """
    size, heads, kv = config.head_dim, config.num_heads, config.num_kv_heads
    length = len(ids)

    def norm(x, weight):
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    def rope(x):  # [heads, S, D]
        freq = config.rope.theta ** (-torch.arange(0, size, 2).double() / size)
        angle = torch.outer(torch.arange(length).double(), freq)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    x = torch.cat((embed[ids], hidden), dim=-1) @ state["fc.weight"].T
    residual = None
    for index in range(config.num_layers):
        w = {
            name.split(f"layers.{index}.")[1].removesuffix(".weight"): tensor
            for name, tensor in state.items()
            if name.startswith(f"layers.{index}.")
        }
        residual = x if residual is None else x + residual
        x = residual if index == 0 else norm(residual, w["input_layernorm"])
        q, k, v = (
            (x @ w[f"self_attn.{p}_proj"].T).view(length, n, size).transpose(0, 1)
            for p, n in (("q", heads), ("k", kv), ("v", kv))
        )
        k, v = (t.repeat_interleave(heads // kv, dim=0) for t in (rope(k), v))
        x = scaled_dot_product_attention(rope(q), k, v, is_causal=True)
        residual = residual + x.transpose(0, 1).reshape(length, -1) @ w["self_attn.o_proj"].T
        x = norm(residual, w["post_attention_layernorm"])
        x = silu(x @ w["mlp.gate_proj"].T) * (x @ w["mlp.up_proj"].T)
        x = x @ w["mlp.down_proj"].T
    return x + residual


@pytest.mark.parametrize("num_layers", [1, 2])
def test_three_draft_steps_equal_the_straight_line(target, tmp_path, num_layers):
    """Step 1 over the whole prompt with the target's hidden states, steps 2 and 3 over one row
    each with the head's own; ids shifted by one, positions and hidden states not."""
    head, config = tiny.tiny_head(target, num_layers=num_layers)
    save_head(tmp_path, head, config, dtype=torch.float32)
    draft, state = load_draft(tmp_path, target), dict(open_checkpoint(tmp_path))
    block_size, blocks = 4, [3, 1, 2, 5]
    hidden = tiny.prefill(target, [TOKENS], tiny.new_cache(target, 8, 4), 4)[0]

    cache = tiny.new_cache(draft, 8, block_size)
    batch = tiny.make_batch([tiny.Step(TOKENS, 0, blocks)], block_size)
    shifted, fed = [*TOKENS[1:], 44], hidden
    out = draft.forward(torch.tensor(shifted), fed, batch, cache, 0)
    assert out.for_logits is out.recycle
    for step in (1, 2, 3):
        expected = straight_line(state, draft.config.block, target.embed, shifted, fed)
        assert (out.recycle[-1] - expected[-1]).norm() <= 1e-5 * expected[-1].norm()
        logits = draft.logits(out.for_logits[-1:], step - 1)
        torch.testing.assert_close(logits, expected[-1:] @ target.lm_head.T, rtol=1e-4, atol=1e-4)
        drafted = logits[0].argmax().item()
        shifted, fed = [*shifted, drafted], torch.cat((fed, expected[-1:]))
        row = tiny.make_batch([tiny.Step([0], len(shifted) - 1, blocks)], block_size)
        out = draft.forward(torch.tensor([drafted]), out.recycle[-1:], row, cache, step)


def test_the_paged_head_equals_the_same_block_unpaged(target):
    """`eagle_block` with an attention of one's own, as training calls it."""
    head, config = tiny.tiny_head(target, num_layers=2)
    draft = eagle_draft(head, config, target)
    ids, hidden = torch.tensor(TOKENS), torch.randn(len(TOKENS), 32)
    batch = tiny.make_batch([tiny.Step(TOKENS, 0, [1, 2, 3])], 4)
    paged = draft.forward(ids, hidden, batch, tiny.new_cache(draft, 4, 4), 0).recycle
    seen = []

    def attention(query, key, value, layer):
        seen.append(layer)
        query, key, value = (t.transpose(-3, -2) for t in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(-3, -2)

    embeds, positions = target.embed[ids][None], torch.arange(len(TOKENS))[None]
    dense = eagle_block(head, config, embeds, hidden[None], positions, attention)
    torch.testing.assert_close(dense.recycle[0], paged, rtol=1e-4, atol=1e-5)
    assert seen == [0, 1]


def test_a_new_head_starts_as_the_targets_own(target):
    block = replace(target.config, num_layers=1)
    draft = eagle_draft(init_head(block), EagleConfig(block), target)
    hidden = torch.randn(len(TOKENS), 32)
    batch = tiny.make_batch([tiny.Step(TOKENS, 0, [1, 2, 3])], 4)
    out = draft.forward(torch.tensor(TOKENS), hidden, batch, tiny.new_cache(draft, 4, 4), 0)
    torch.testing.assert_close(draft.logits(out.for_logits, 0), target.logits(hidden))


def test_gradients_reach_every_parameter_of_the_head(target):
    head, config = tiny.tiny_head(target)
    head = map_tree(lambda t: t.clone().requires_grad_(), head)

    def attention(query, key, value, layer):
        query, key, value = (t.transpose(-3, -2) for t in (query, key, value))
        return scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(-3, -2)

    ids = torch.tensor([TOKENS])
    out = eagle_block(
        head, config, target.embed[ids], torch.randn(1, 9, 32), torch.arange(9), attention
    )
    (out.for_logits @ target.lm_head.T).logsumexp(-1).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.any() for leaf in tree_leaves(head))
    assert not target.embed.requires_grad


@pytest.mark.parametrize(("half", "norm"), [(0, None), (1, None), (0, "embed"), (1, "hidden")])
def test_fusion_is_embedding_then_hidden(target, half, norm):
    """K1: fc = [I | 0] passes the embedding on, [0 | I] the hidden state; each after its own norm
    where the family has two."""
    axes = head_axes({"fusion": "norm_cat"} if norm else {})
    block = replace(target.config, num_layers=1)
    eye = torch.zeros(32, 64)
    eye[:, 32 * half : 32 * half + 32] = torch.eye(32)
    head = init_head(block, axes)._replace(fc=eye)
    if norm:
        head = head._replace(embed_norm=torch.rand(32), hidden_norm=torch.rand(32))
    inputs = torch.randn(3, 32), torch.randn(3, 32)
    expected = inputs[half]
    if norm:
        weight = (head.embed_norm, head.hidden_norm)[half]
        expected = torch.nn.functional.rms_norm(expected, (32,), weight, block.rms_norm_eps)
    fused = fuse(head, EagleConfig(block, axes), *inputs, torch.arange(3))
    torch.testing.assert_close(fused, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("value", "differs"), [("kept", True), ("zeroed", False)])
def test_position_zero(target, value, differs):
    """K1: with zeroing, the token behind row 0 has no effect on row 0."""
    head, config = tiny.tiny_head(target)
    config = replace(config, axes=HeadAxes(position0_embedding=value))
    hidden, positions = torch.randn(2, 32), torch.tensor([0, 1])
    a, b = (fuse(head, config, torch.full((2, 32), x), hidden, positions) for x in (1.0, 2.0))
    assert (not torch.equal(a[0], b[0])) == differs
    assert not torch.equal(a[1], b[1])


def run_axes(target, num_layers, step, **axes):
    """(output, input hidden, head, layers that attended) of one row."""
    row = head_axes(axes)
    block = replace(target.config, num_layers=num_layers)
    head, attended = init_head(block, row), []
    generator = torch.Generator().manual_seed(3)
    head = map_tree(lambda t: t + 0.3 * torch.randn(t.shape, generator=generator), head)
    hidden = torch.randn(1, 32, generator=generator)

    def attention(query, key, value, layer):
        attended.append(layer)
        return query

    embeds = torch.randn(1, 32, generator=generator)
    config = EagleConfig(block, row)
    out = eagle_block(head, config, embeds, hidden, torch.tensor([1]), attention, step)
    return out, hidden, head, attended


@pytest.mark.parametrize(
    ("num_layers", "rule", "expected"),
    [
        (3, "cycle", [[0], [1], [2], [0], [1]]),
        (1, "cycle", [[0], [0], [0]]),
        (2, "stack", [[0, 1], [0, 1]]),
    ],
)
def test_depth_rule(target, num_layers, rule, expected):
    """K5: which layers each draft step runs."""
    axes = {"depth_rule": rule, "first_input_norm": True}
    steps = [run_axes(target, num_layers, step, **axes)[3] for step in range(len(expected))]
    assert steps == expected


def test_what_is_recycled(target):
    plain, *_ = run_axes(target, 1, 0)
    normed, hidden, head, _ = run_axes(target, 1, 0, final_norm=True)
    after, *_ = run_axes(target, 1, 0, final_norm=True, recycle="post_norm")
    pinned, same, *_ = run_axes(target, 1, 0, recycle="pinned")
    assert plain.recycle is plain.for_logits
    eps = target.config.rms_norm_eps
    expected = torch.nn.functional.rms_norm(normed.recycle, (32,), head.norm, eps)
    torch.testing.assert_close(normed.for_logits, expected)
    assert torch.equal(after.recycle, after.for_logits)
    assert torch.equal(pinned.recycle, same)
    assert not torch.equal(normed.recycle, hidden)


def test_axes_that_do_not_exist_are_named():
    tiny.one_line_error(
        lambda: head_axes({"fushion": "cat"}), ConfigError, "'fushion'; known: fusion"
    )
    tiny.one_line_error(
        lambda: head_axes({"recycle": "x"}), ConfigError, "pre_norm, post_norm, pinned"
    )
    match = "needs final_norm"
    tiny.one_line_error(lambda: head_axes({"recycle": "post_norm"}), ConfigError, match)
    assert head_axes({}) == EAGLE_LLAMA


def test_a_draft_reads_the_targets_last_hidden(target):
    out = target.forward(
        tiny.make_batch([tiny.Step(TOKENS, 0, [1, 2, 3])], 4), tiny.new_cache(target, 4, 4)
    )
    assert tiny.tiny_draft(target).features(out) is out.hidden


def test_a_draft_differs_in_width_only_by_error(target, tmp_path):
    folder = tiny.write_draft(tmp_path, target)
    wide = tiny.tiny_target(hidden_size=40)
    tiny.one_line_error(lambda: load_draft(folder, wide), CheckpointError, "hidden_size=32")
