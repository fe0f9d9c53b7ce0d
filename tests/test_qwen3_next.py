"""Qwen3-Next and dense Qwen3.5 against transformers: whole, chunked, and in verify-shaped steps."""

import pytest
import tiny
import tiny_qwen3_next as tiny_next
import torch
from tiny_qwen3_next import VARIANTS
from token_data import row_of_texts

from specdec.experiments.targets import packed_forward
from specdec.models.layers import map_tree, unpack
from specdec.models.load import build_target, load_target
from specdec.models.parts import read_layout, shapes_of
from specdec.models.qwen3_next_checkpoint import qwen3_next_config, qwen3_next_layout

PROMPTS = [[7, 3, 60, 2, 9, 9, 41, 5, 1, 13, 22], [11], [(n * n) % 66 for n in range(75)]]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def reference_model(config):
    """transformers' model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", experts_implementation="eager"
    )
    model = model.float().eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(tiny_next.random_tensors(shapes))
    model.tie_weights()
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(our target, transformers' model) from one checkpoint that transformers wrote."""
    theirs = reference_model(VARIANTS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder, max_shard_size="40KB")
    return load_target(folder), theirs


@torch.no_grad()
def reference_logits(theirs, prompt):
    return theirs(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("chunk", [0, 1, 3, 7])
def test_logits_equal_transformers_whole_and_in_chunks(pair, chunk):
    ours, theirs = pair
    hidden = tiny.prefill(ours, PROMPTS, tiny.new_cache(ours, 40, 4), 4, chunk)
    for prompt, rows in zip(PROMPTS, hidden, strict=True):
        assert relative_error(ours.logits(rows), reference_logits(theirs, prompt)) <= 1e-4


@pytest.mark.parametrize("window", [1, 2, 4])
def test_decode_rows_equal_transformers(pair, window):
    """Steps of K + 1 rows of which the first 1, 2, ... are committed, beside a prefill in chunks
    and padding rows."""
    ours, theirs = pair
    text, other = PROMPTS[2][:20], PROMPTS[2][20:60]
    cache = tiny.new_cache(ours, 80, 5, window=window)
    tables = [list(range(1, 8)), list(range(20, 40))]
    start, other_start, rows, other_rows = 0, 0, [], []
    while start < len(text):
        right = 1 + (start % window)
        ids = [*text[start : start + right], *[(x + 1) % 66 for x in range(window - right)]]
        kept = len(text[start : start + right])
        piece = other[other_start : other_start + 7]
        batch = tiny.make_batch(
            [tiny.Step(ids, start, tables[0]), tiny.Step(piece, other_start, tables[1])][
                : 1 + bool(piece)
            ],
            5,
            num_padding=2,
        )
        hidden = ours.forward(batch, cache).hidden
        rows.append(hidden[:kept])
        other_rows.append(hidden[len(ids) : len(ids) + len(piece)])
        start, other_start = start + kept, other_start + len(piece)
    for prompt, parts in ((text, rows), (other[:other_start], other_rows)):
        logits = ours.logits(torch.cat(parts))
        assert relative_error(logits, reference_logits(theirs, prompt)) <= 1e-4


def test_streams_equal_transformers(pair):
    """Auxiliary states: the residual stream after each number of layers, before the final norm."""
    ours, theirs = pair
    depth = len(ours.params.layers)
    captured = ours.capture(tuple(range(depth)))
    cache = tiny.new_cache(ours, 8, 4)
    out = captured.forward(tiny.make_batch([tiny.Step(PROMPTS[0], 0, [1, 2, 3])], 4), cache)
    with torch.no_grad():
        streams = theirs(torch.tensor([PROMPTS[0]]), output_hidden_states=True).hidden_states
    for mine, stream in zip(out.aux, streams, strict=False):
        assert relative_error(mine, stream[0]) <= 1e-4


def test_packed_texts_equal_transformers(pair):
    """Whole texts without a cache, from plain parameters, as training runs them; causal."""
    ours, theirs = pair
    config = ours.config
    layout = qwen3_next_layout(config)
    params = read_layout(plain_checkpoint(theirs, layout), layout, "cpu", torch.float32)
    params = params._replace(lm_head=params.embed if params.lm_head is None else params.lm_head)
    ids = torch.tensor([PROMPTS[2], PROMPTS[2][::-1]])
    leaf = params._replace(embed=params.embed.requires_grad_())
    hidden = packed_forward(leaf, config, row_of_texts(ids.tolist())).hidden.unflatten(0, (2, -1))
    for row in range(2):
        expected = reference_logits(theirs, ids[row].tolist())
        assert relative_error(hidden[row] @ params.lm_head.T, expected) <= 1e-4
    (gradient,) = torch.autograd.grad(hidden[:, 9].square().sum(), leaf.embed)
    future = set(PROMPTS[2][10:]) & set(PROMPTS[2][::-1][10:]) - set(ids[:, :10].flatten().tolist())
    assert gradient.norm() > 0
    assert all(gradient[token].norm() == 0 for token in future)


def test_texts_end_to_end_equal_texts_apart():
    """Packed rows, as training runs them, and their gradients."""
    target = tiny_next.tiny_target(config=tiny_next.dense_settings())
    config, texts = target.config, [PROMPTS[0], PROMPTS[1], PROMPTS[2][:30]]
    apart = [tiny.prefill(target, [text], tiny.new_cache(target, 40, 4), 4)[0] for text in texts]
    params = target.params._replace(embed=target.embed.clone().requires_grad_())
    params = params._replace(layers=tuple(map_tree(unpack, layer) for layer in params.layers))
    hidden = packed_forward(params, config, row_of_texts(texts)).hidden
    lengths = [len(text) for text in texts]
    for mine, text in zip(hidden.split(lengths), apart, strict=True):
        assert relative_error(mine, text) <= 1e-4
    (gradient,) = torch.autograd.grad(hidden[-1].square().sum(), params.embed)
    others = set(texts[0] + texts[1]) - set(texts[2])
    assert gradient[texts[2]].norm() > 0
    assert all(gradient[token].norm() == 0 for token in others)


def plain_checkpoint(theirs, layout):
    """transformers' tensors under published names, experts one by one."""
    state, found = theirs.state_dict(), {}
    for name, shape in shapes_of(layout).items():
        if ".experts." in name:
            prefix, expert, kind, _ = name.rsplit(".", 3)
            fused = state[f"{prefix}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"]
            halves = {"gate_proj": slice(0, shape[0]), "up_proj": slice(shape[0], None)}
            found[name] = fused[int(expert)][halves.get(kind, slice(None))]
        else:
            found[name] = state[name]
    return tiny.InMemory(found)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_bfloat16_is_as_near_as_transformers(prompt):
    """Of the dense model; with experts, rounding now and then chooses another one."""
    theirs = reference_model(tiny_next.dense_settings())
    exact = reference_logits(theirs, prompt)
    state = plain_checkpoint(theirs, qwen3_next_layout(qwen3_next_config(VARIANTS["qwen3_5"])))
    ours = build_target(state, VARIANTS["qwen3_5"], dtype=torch.bfloat16)
    hidden = tiny.prefill(ours, [prompt], tiny.new_cache(ours, 40, 4), 4, chunk=3)[0]
    assert hidden.dtype == torch.bfloat16
    error = relative_error(ours.logits(hidden).float(), exact)
    theirs_rounded = reference_logits(theirs.to(torch.bfloat16), prompt).float()
    assert error <= 1.25 * relative_error(theirs_rounded, exact)
