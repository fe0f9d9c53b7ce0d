"""The Llama family against transformers, whole, chunked, ragged, and in verify-shaped steps."""

import families
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


@pytest.mark.parametrize("chunk", [0, 1, 3, 7])
def test_logits_equal_transformers_whole_and_in_chunks(pair, chunk):
    families.check_chunks(*pair, chunk)


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_decode_rows_equal_transformers(pair, block_size):
    families.check_decode(*pair, block_size)


def test_a_rejected_draft_leaves_no_trace(pair):
    families.check_rejected_rows(*pair)


def test_captured_streams_are_transformers_hidden_states(pair):
    ours, theirs = pair
    families.check_captured(ours, theirs, theirs.model.norm.weight, ours.config.rms_norm_eps)


def test_packed_texts_equal_transformers(pair):
    families.check_packed(*pair)


@pytest.mark.parametrize("chunk", [0, 3])
def test_bfloat16_stays_near_float32(chunk):
    families.check_bfloat16(tiny.tiny_target(), tiny.tiny_target(dtype=torch.bfloat16), chunk)


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
    expected = families.reference_logits(theirs.eval(), prompt)
    assert families.relative_error(logits, expected) <= 1e-4
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
