"""The Llama family against transformers, whole, chunked, ragged, and in verify-shaped steps."""

import pytest
import tiny
import torch

from specdec.models import layers
from specdec.models.load import load_target

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": False},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "odd": {
        "hidden_size": 42,
        "intermediate_size": 51,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "vocab_size": 67,
        "num_hidden_layers": 3,
    },
    "multi_head": {"num_key_value_heads": 4},
    "biased": {"attention_bias": True, "mlp_bias": True},
}
PROMPTS = [[7, 3, 60, 2, 9, 9, 41, 5, 1, 13, 22], [11], list(range(2, 40))]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(our target, transformers' model) from one checkpoint that transformers wrote."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = tiny.tiny_config(**VARIANTS[request.param])
    theirs = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    state = tiny.tiny_state(config)
    theirs.load_state_dict(state, strict=False)
    theirs.tie_weights()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder, max_shard_size="20KB")
    return load_target(folder), theirs


@torch.no_grad()
def reference_logits(theirs, prompt):
    return theirs(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("chunk", [0, 1, 3, 7])
def test_logits_equal_transformers_whole_and_in_chunks(pair, chunk):
    ours, theirs = pair
    hidden = tiny.prefill(ours, PROMPTS, tiny.new_cache(ours, 40, 4), 4, chunk)
    for prompt, rows in zip(PROMPTS, hidden, strict=True):
        expected = reference_logits(theirs, prompt)
        assert relative_error(ours.logits(rows), expected) <= 1e-4


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_decode_rows_equal_transformers(pair, block_size):
    """Verify-shaped steps of K + 1 rows, with a prefill chunk and padding rows beside them."""
    ours, theirs = pair
    first, second = [5, 9, 20, 33, 7, 8, 1, 2, 3, 4, 60], list(range(3, 30))
    cache = tiny.new_cache(ours, 80, block_size)
    tables = [list(range(1, 1 + 30 // block_size + 1)), list(range(40, 40 + 30 // block_size + 1))]
    steps = [(first[:3], 0, second[:2], 0), (first[3:6], 3, second[2:14], 2)]
    steps += [(first[6:11], 6, second[14:27], 14)]
    rows = [[], []]
    for ids, start, other, other_start in steps:
        batch = tiny.make_batch(
            [tiny.Step(ids, start, tables[0]), tiny.Step(other, other_start, tables[1])],
            block_size,
            num_padding=3,
        )
        hidden = ours.forward(batch, cache).hidden
        assert torch.isfinite(hidden).all()
        rows[0].append(hidden[: len(ids)])
        rows[1].append(hidden[len(ids) : len(ids) + len(other)])
    for prompt, parts in zip((first, second), rows, strict=True):
        logits = ours.logits(torch.cat(parts))
        assert relative_error(logits, reference_logits(theirs, prompt)) <= 1e-4


def test_a_rejected_draft_leaves_no_trace(pair):
    """Rows written past the committed length are overwritten by the next step's."""
    ours, theirs = pair
    prompt, cache = [5, 9, 20, 33, 7, 8], tiny.new_cache(ours, 8, 4)
    ours.forward(tiny.make_batch([tiny.Step([5, 9, 61, 62, 63], 0, [1, 2])], 4), cache)
    out = ours.forward(tiny.make_batch([tiny.Step(prompt[2:], 2, [1, 2])], 4), cache).hidden
    expected = reference_logits(theirs, prompt)[2:]
    assert relative_error(ours.logits(out), expected) <= 1e-4


@pytest.mark.parametrize("chunk", [0, 3])
def test_bfloat16_stays_near_float32(chunk):
    exact, rounded = tiny.tiny_target(), tiny.tiny_target(dtype=torch.bfloat16)
    for a, b in zip(
        tiny.prefill(exact, PROMPTS, tiny.new_cache(exact, 40, 4), 4),
        tiny.prefill(rounded, PROMPTS, tiny.new_cache(rounded, 40, 4), 4, chunk),
        strict=True,
    ):
        assert b.dtype == torch.bfloat16
        assert relative_error(b.float(), a) < 0.05


def test_real_weights_equal_transformers(smollm2_path):
    """SmolLM2-135M-Instruct, dequantised, in fp32, over one prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from specdec.models.load import open_checkpoint, read_config

    ours = load_target(smollm2_path)
    config = LlamaConfig(**read_config(smollm2_path), dtype=torch.float32)
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    state = dict(open_checkpoint(smollm2_path))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 2, 198, 1, 4093, 198, 49151, 0, 17, 300, 4000]
    cache = tiny.new_cache(ours, 4, 16)
    logits = ours.logits(tiny.prefill(ours, [prompt], cache, 16, chunk=6)[0])
    expected = reference_logits(theirs.eval(), prompt)
    assert relative_error(logits, expected) <= 1e-4
    assert ((logits - expected).abs().max() / expected.abs().max()).item() <= 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 17])
def test_packed_products_equal_plain(dtype, rows):
    x, weight, bias = torch.randn(rows, 37), torch.randn(53, 37), torch.randn(53)
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    packed = layers.pack(weight)
    assert torch.equal(layers.unpack(packed), weight)
    expected = layers.linear(x.double(), weight.double(), bias.double())
    close = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.1}
    torch.testing.assert_close(layers.linear(x, packed, bias).double(), expected, **close)
    torch.testing.assert_close(layers.linear(x, weight, bias).double(), expected, **close)
    batched = layers.linear(x[None], packed)
    torch.testing.assert_close(batched[0].double(), expected - bias.double(), **close)


def test_rms_norm_computes_in_float32():
    x = torch.randn(5, 64).to(torch.bfloat16) * 300
    weight = torch.rand(64).to(torch.bfloat16)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = exact * weight.double()
    error = (layers.rms_norm(x, weight, 1e-5).double() - exact).abs()
    assert (error <= 2**-8 * exact.abs() + 1e-6).all()


def test_tied_tables_are_one_tensor():
    tied, untied = tiny.tiny_target(), tiny.tiny_target(tie_word_embeddings=False)
    assert tied.embed is tied.lm_head
    assert untied.embed is not untied.lm_head


def test_trees():
    params, _ = tiny.tiny_params()
    leaves = layers.tree_leaves(params)
    assert len(leaves) == 3 + 2 * 6  # embed, norm, lm_head; no biases
    doubled = layers.map_tree(lambda t: 2 * t, params)
    assert type(doubled) is type(params)
    assert type(doubled.layers[1]) is type(params.layers[1])
    assert torch.equal(doubled.layers[1].down, 2 * params.layers[1].down)
    assert doubled.layers[0].qkv_bias is None
