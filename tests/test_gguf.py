"""GGUF files against the Hugging Face folders they were made from."""

import pytest
import tiny
import torch

from specdec.errors import CheckpointError
from specdec.models.gguf import gguf_tensors
from specdec.models.llama_checkpoint import llama_config
from specdec.models.load import load_target, open_checkpoint
from specdec.models.rope import Rope, inv_freq

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_gguf(file, config, state, kinds, factors=None):
    """The file that llama.cpp's converter makes: its names, and q and k rows interleaved."""
    import gguf

    settings = llama_config(config)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(settings.max_position)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_block_count(settings.num_layers)
    writer.add_head_count(settings.num_heads)
    writer.add_head_count_kv(settings.num_kv_heads)
    writer.add_rope_freq_base(settings.rope.theta)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_vocab_size(settings.vocab_size)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for number, (name, tensor) in enumerate(state.items()):
        array = tensor.numpy()
        heads = {"q_proj": settings.num_heads, "k_proj": settings.num_kv_heads}
        count = heads.get(name.split(".")[-2])
        if count:
            rows = array.reshape(count, 2, settings.head_dim // 2, *array.shape[1:])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        for theirs, llama_cpp in names.items():
            name = name.replace(theirs, llama_cpp)
        kind = kinds[number % len(kinds)] if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_gguf_equals_the_folder_it_was_made_from(tmp_path, tied, biased):
    import gguf

    config = tiny.tiny_config(tie_word_embeddings=tied, attention_bias=biased, rope_theta=3e4)
    state = tiny.tiny_state(config)
    kinds = [gguf.GGMLQuantizationType.F32]
    file = write_gguf(tmp_path / "m.gguf", config, state, kinds)
    folder = tiny.write_checkpoint(tmp_path / "hf", config, state)
    stored = dict(open_checkpoint(file))
    assert stored.keys() == state.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, state[name]), name
    assert load_target(file).config == load_target(folder).config
    assert torch.equal(tiny.logits(load_target(file)), tiny.logits(load_target(folder)))


def test_gguf_quantised_tensors_are_near(tmp_path):
    import gguf

    config = tiny.tiny_config(hidden_size=64, intermediate_size=96)
    state = tiny.tiny_state(config)
    kind = gguf.GGMLQuantizationType
    file = write_gguf(tmp_path / "m.gguf", config, state, [kind.Q8_0, kind.F16, kind.Q4_1])
    for name, (shape, read) in gguf_tensors(file).items():
        assert read().shape == torch.Size(shape) == state[name].shape
        assert (read() - state[name]).abs().max() <= 0.08 * state[name].abs().max(), name
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 5000)
    copy = file.with_name("short.gguf")
    copy.write_bytes(file.read_bytes())
    match = "the file ends within"
    tiny.one_line_error(lambda: open_checkpoint(copy), CheckpointError, match)


def test_gguf_frequency_factors_are_llama3_scaling(tmp_path):
    import gguf

    config = tiny.tiny_config(rope_scaling=LLAMA3, rope_theta=5e5)
    settings = llama_config(config)
    plain = inv_freq(Rope(5e5), settings.head_dim)
    factors = plain / inv_freq(settings.rope, settings.head_dim)
    kinds = [gguf.GGMLQuantizationType.F32]
    file = write_gguf(tmp_path / "m.gguf", config, tiny.tiny_state(config), kinds, factors)
    ours = load_target(file).config.rope
    torch.testing.assert_close(
        inv_freq(ours, settings.head_dim), inv_freq(settings.rope, settings.head_dim)
    )
