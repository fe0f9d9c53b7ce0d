"""Checkpoint folders and files, and one clear line for each that cannot be read."""

import json
import sys

import pytest
import tiny
import torch

from specdec.errors import CheckpointError
from specdec.models.llama_checkpoint import llama_config, llama_config_json
from specdec.models.load import load_draft, load_target, open_checkpoint, read_config, resolve_path


def refused(call, match):
    tiny.one_line_error(call, CheckpointError, match)


def write_shards(folder, config, state, *shards):
    """`state` spread over files by the given lists of names."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_equals_single(tmp_path, tied):
    config = tiny.tiny_config(tie_word_embeddings=tied)
    state = tiny.tiny_state(config)
    names = sorted(state)
    single = tiny.write_checkpoint(tmp_path / "single", config, state)
    sharded = write_shards(
        tmp_path / "sharded", config, state, names[::3], names[1::3], names[2::3]
    )
    assert torch.equal(tiny.logits(load_target(single)), tiny.logits(load_target(sharded)))
    file = single / "model.safetensors"
    assert torch.equal(tiny.logits(load_target(file)), tiny.logits(load_target(sharded)))


def test_tensors_are_read_when_asked_for(tmp_path):
    config = tiny.tiny_config()
    state = tiny.tiny_state(config)
    checkpoint = open_checkpoint(tiny.write_checkpoint(tmp_path, config, state))
    assert set(checkpoint) == set(state)
    for name, tensor in state.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint[name], tensor)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16])
def test_dtype_is_converted_on_load(tmp_path, stored, dtype):
    config = tiny.tiny_config(tie_word_embeddings=False)
    state = {name: t.to(stored) for name, t in tiny.tiny_state(config).items()}
    target = load_target(tiny.write_checkpoint(tmp_path, config, state), dtype=dtype)
    wanted = torch.float32 if dtype == "float32" else dtype
    assert torch.equal(target.lm_head, state["lm_head.weight"].to(wanted))
    assert torch.equal(target.embed, state["model.embed_tokens.weight"].to(wanted))
    assert torch.equal(target.params.norm, state["model.norm.weight"].to(wanted))
    assert tiny.logits(target).dtype == wanted


def test_every_missing_tensor_is_named(tmp_path):
    config = tiny.tiny_config(tie_word_embeddings=False, num_hidden_layers=1)
    state = tiny.tiny_state(config)
    for number, name in enumerate(state):
        rest = {key: tensor for key, tensor in state.items() if key != name}
        folder = tiny.write_checkpoint(tmp_path / str(number), config, rest)
        with pytest.raises(CheckpointError, match=rf"lacks {name}$"):
            load_target(folder)


def test_unknown_and_misshapen_tensors_are_named(tmp_path):
    config = tiny.tiny_config()
    state = tiny.tiny_state(config)
    extra = {**state, "model.layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}
    with pytest.raises(
        CheckpointError, match=r"unknown tensors: model.layers.2.mlp.up_proj.weight"
    ):
        load_target(tiny.write_checkpoint(tmp_path / "a", config, extra))
    bent = {**state, "model.layers.1.mlp.up_proj.weight": torch.zeros(47, 32)}
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight is \[47, 32\].*48, 32"):
        load_target(tiny.write_checkpoint(tmp_path / "b", config, bent))
    buffers = {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert (
        tiny.logits(load_target(tiny.write_checkpoint(tmp_path / "c", config, buffers)))
        .isfinite()
        .all()
    )


def test_a_tied_checkpoint_may_repeat_its_head(tmp_path):
    config = tiny.tiny_config()
    state = tiny.tiny_state(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    target = load_target(tiny.write_checkpoint(tmp_path, config, state))
    assert target.embed is target.lm_head


def test_paths_that_hold_nothing(tmp_path):
    refused(lambda: load_target(tmp_path / "absent"), "no checkpoint at .*absent")
    refused(lambda: load_target("package:no_such_package_here/x.gguf"), "is not installed")
    refused(lambda: resolve_path("package:json/x.gguf"), "has no file x.gguf")
    refused(lambda: resolve_path("pretrained/absent"), "pretrained/absent")
    refused(lambda: load_target(tmp_path), "neither model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    refused(lambda: open_checkpoint(tmp_path), "not a readable safetensors file")
    refused(lambda: read_config(tmp_path), "no config.json")
    (tmp_path / "config.json").write_text("{")
    refused(lambda: read_config(tmp_path), "not valid JSON")
    (tmp_path / "config.json").write_text("[]")
    refused(lambda: read_config(tmp_path), "config.json is not a JSON object")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": "one"}')
    refused(lambda: read_config(tmp_path), "num_hidden_layers='one' must be a number")
    (tmp_path / "model.gguf").write_bytes(b"GGUX" + bytes(40))
    refused(lambda: open_checkpoint(tmp_path / "model.gguf"), "not a readable GGUF file")
    (tmp_path / "notes.txt").write_text("")
    refused(lambda: open_checkpoint(tmp_path / "notes.txt"), "neither a safetensors nor a GGUF")


def test_a_missing_shard_is_named(tmp_path):
    config = tiny.tiny_config()
    state = tiny.tiny_state(config)
    names = sorted(state)
    folder = write_shards(tmp_path / "m", config, state, names[:5], names[5:])
    (folder / "model-1.safetensors").unlink()
    refused(lambda: load_target(folder), "lacks model-1.safetensors")
    write_shards(folder, config, state, names[:5], names[5:])
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {
        "ghost.weight": "model-0.safetensors"
    }
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(lambda: load_target(folder), "no shard holds ghost.weight")
    for damaged, message in (
        ("{", "index.json is not valid JSON"),
        ("{}", "index.json has no weight_map"),
        ('{"weight_map": {"a": 1}}', "index.json has no weight_map"),
    ):
        index.write_text(damaged)
        refused(lambda: load_target(folder), message)


def test_settings_that_cannot_run_are_named(tmp_path):
    def load(number, **overrides):
        return load_target(tiny.write_target(tmp_path / str(number), **overrides))

    folder = tiny.write_target(tmp_path / "gelu")
    config = tiny.tiny_config(hidden_act="gelu")
    (folder / "config.json").write_text(json.dumps(config))
    refused(lambda: load_target(folder), "hidden_act='gelu'")
    del config["hidden_size"], config["hidden_act"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(lambda: load_target(folder), "lacks 'hidden_size'")
    refused(lambda: load(1, model_type="mamba"), "family 'mamba'")
    refused(lambda: llama_config(tiny.tiny_config(num_key_value_heads=3)), "multiple")
    refused(lambda: load_target(tmp_path / "1", family="llama", dtype="int8"), "dtype='int8'")
    assert load_target(tiny.write_target(tmp_path / "x", model_type="mamba"), family="llama")


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickled_weights_are_refused_unread(tmp_path, suffix):
    marker, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    torch.save({"fc.weight": Bomb(marker)}, folder / f"pytorch_model{suffix}")
    (folder / "config.json").write_text(json.dumps(tiny.tiny_config()))
    refused(lambda: load_target(folder), "pickled")
    refused(lambda: load_target(folder / f"pytorch_model{suffix}"), "pickled")
    refused(lambda: load_draft(folder, tiny.tiny_target()), "pickled")
    assert not marker.exists()


def test_a_package_file_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "weights_for_test"
    tiny.write_target(package / "model")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_target("package:weights_for_test/model").vocab_size == 101
    assert "weights_for_test" not in sys.modules


def test_padded_rows_are_not_ids(tmp_path):
    """C5: ids past the tokenizer's are not part of the vocabulary."""
    folder = tiny.write_target(tmp_path, vocab_size=104)
    assert load_target(folder).vocab_size == 104
    vocab = {f"t{i}": i for i in range(90)}
    added = [{"id": i, "content": f"<{i}>"} for i in range(90, 98)]
    tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    target = load_target(folder)
    assert target.vocab_size == 98
    assert tiny.logits(target).shape[-1] == 104
    assert load_target(folder, vocab_size=7).vocab_size == 7


def test_settings_survive_writing():
    config = tiny.tiny_config(
        rope_scaling={"rope_type": "linear", "factor": 2.0}, head_dim=10, attention_bias=True
    )
    assert llama_config(llama_config_json(llama_config(config))) == llama_config(config)
