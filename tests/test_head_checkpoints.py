"""Checkpoints of draft heads: which head one holds, whole and published ones, and export."""

import json
from types import SimpleNamespace

import head_files as files
import head_runs
import pytest
import tiny
import torch
from head_runs import HEADS

from specdec.errors import CheckpointError
from specdec.models.axes import FAMILIES
from specdec.models.checkpoint import Checkpoint
from specdec.models.eagle_checkpoint import save_head
from specdec.models.fp8 import dequantised
from specdec.models.heads import detect_head, read_draft
from specdec.models.layers import map_tree, tree_leaves, unpack
from specdec.models.llama_checkpoint import llama_config
from specdec.models.load import load_draft, open_checkpoint
from specdec.models.rope import inv_freq


@pytest.fixture(scope="module")
def llama():
    return head_runs.load(HEADS["llama_eagle"]).target


@pytest.mark.parametrize("name", HEADS)
def test_the_family_is_detected(name):
    case = HEADS[name]
    state = head_runs.head_state(case)
    stem = name.removesuffix("_for_qwen3").removesuffix("_norms").removesuffix("_narrow")
    family = stem.removesuffix("_2_layers").removesuffix("_3_layers")
    assert detect_head(case.head, files.checkpoint(state)) == family
    if FAMILIES[family].method == "mtp":
        return
    # published heads call themselves what their target is; the tensors tell
    vague = case.head | {"architectures": ["LlamaForCausalLM"]}
    assert detect_head(vague, files.checkpoint(state)) == family.replace(
        "qwen3_eagle3", "llama_eagle3"
    )


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("LlamaForCausalLMEagle3", "llama_eagle3"),
        ("Eagle3LlamaForCausalLM", "llama_eagle3"),
        ("Eagle3DraftModel", "llama_eagle3"),
        ("EagleLlamaForCausalLM", "llama_eagle"),
        ("EagleLlamaModel", "llama_eagle"),
        ("Eagle3Qwen3ForCausalLM", "qwen3_eagle3"),
        ("Qwen3NextMTP", "qwen3_next_mtp"),
        ("Qwen3_5MTP", "qwen_mtp"),
        ("DeepSeekMTPModel", "deepseek_mtp"),
        ("ErnieMTPModel", "ernie_mtp"),
    ],
)
def test_architectures(architecture, family):
    empty = files.checkpoint({})
    assert detect_head({"architectures": [architecture], "model_type": "llama"}, empty) == family


def test_what_is_not_a_head_is_named(llama):
    settings = files.LLAMA
    state = files.checkpoint(files.random_state(files.target(settings)))
    for call, match in (
        (lambda: detect_head(settings, state), "holds no draft head that is known"),
        (
            lambda: detect_head({"speculators_model_type": "dflash"}, state),
            "speculators_model_type='dflash' is not supported",
        ),
        (lambda: read_draft(state, settings, llama, family="medusa"), "unknown head family"),
    ):
        tiny.one_line_error(call, CheckpointError, match)


def test_a_family_can_be_forced(llama):
    """The override wins over what config.json says."""
    case = HEADS["llama_eagle"]
    settings = case.head | {"architectures": ["Qwen3NextMTP"]}
    state = files.checkpoint(head_runs.head_state(case))
    draft = read_draft(state, settings, llama, family="llama_eagle")
    assert draft.config.family == "llama_eagle"


ROPES = {
    "theta": ({"rope_theta": 1e6}, 0.64938),
    "parameters": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 0.64938),
    "default": ({}, 0.74989),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("name", ["llama_eagle", "llama_eagle3", "qwen3_eagle"])
@pytest.mark.parametrize("layout", [*ROPES, "scaling", "scaled parameters"])
def test_a_heads_rope_is_its_own_configs(name, layout):
    """C3: wherever a config.json keeps theta and scaling, and whatever the target's are."""
    settings = HEADS[name].head | {"head_dim": 64}
    del settings["rope_theta"]
    case = HEADS[name]._replace(head=settings)
    if name == "llama_eagle3":
        shapes = files.eagle3(settings, 32)
    else:
        shapes = files.eagle(settings) if name == "llama_eagle" else files.eagle_qwen3(settings)
    case = case._replace(shapes=shapes)
    if layout in ROPES:
        rope, second = ROPES[layout]
        read = head_runs.load(case._replace(head=settings | rope)).draft.config.block.rope
        assert inv_freq(read, 64)[1].item() == pytest.approx(second, abs=1e-5)
        return
    rope = {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    if layout == "scaled parameters":
        rope = {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    pair = head_runs.load(case._replace(head=settings | rope))
    target = llama_config(files.LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    ours = inv_freq(pair.draft.config.block.rope, 64)
    assert torch.equal(ours, inv_freq(target.rope, 64))
    assert not torch.equal(ours, inv_freq(pair.target.config.rope, 64))


@pytest.mark.parametrize("name", [n for n in HEADS if n != "ernie_mtp"])
def test_a_head_is_written_as_it_was_read(name, tmp_path):
    """Exported under its published names, its shared tables left out, and read back the same."""
    case, pair = HEADS[name], head_runs.load(HEADS[name])
    tree = map_tree(unpack, pair.draft.params)
    own = {}
    if "lm_head.weight" in pair.head_state:
        own = {"lm_head": pair.head_state["lm_head.weight"], "d2t": head_runs.REDUCED}
    if "embed_tokens.weight" in pair.head_state:
        own["embed"] = pair.head_state["embed_tokens.weight"]
    save_head(tmp_path, tree, pair.draft.config, dtype=torch.float32, **own)
    settings = json.loads((tmp_path / "config.json").read_text())
    again = load_draft(tmp_path, pair.target)
    assert again.config == pair.draft.config
    for ours, theirs in zip(tree_leaves(again.params), tree_leaves(tree), strict=True):
        assert torch.equal(unpack(ours), theirs)
    repeated = {
        n
        for n in pair.head_state
        if n.startswith("model.layers.") and n.endswith(("embed_tokens.weight", "head.head.weight"))
    }
    assert set(open_checkpoint(tmp_path)) == set(pair.head_state) - repeated
    assert settings["hidden_size"] == case.head["hidden_size"]
    if "t2d" in pair.head_state:
        stored = open_checkpoint(tmp_path)
        assert all(torch.equal(stored[n], pair.head_state[n]) for n in ("d2t", "t2d"))


def test_an_eagle_head_in_the_speculators_layout(llama):
    """fusion_fc and transformer.* instead of fc and layers.0.*, its settings one level down."""
    case = HEADS["llama_eagle"]
    state = {
        name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor
        for name, tensor in head_runs.head_state(case).items()
    }
    state["fusion_fc.bias"] = torch.full((32,), 0.5)
    settings = {
        "architectures": ["EagleSpeculator"],
        "model_type": "speculators",
        "speculators_model_type": "eagle",
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_config": case.head,
    }
    checkpoint = files.checkpoint(state)
    assert detect_head(settings, checkpoint) == "llama_eagle"
    draft = read_draft(checkpoint, settings, llama)
    assert torch.equal(draft.params.fc_bias, state["fusion_fc.bias"])
    state["embedding_layernorm.weight"] = torch.ones(32)
    tiny.one_line_error(
        lambda: read_draft(files.checkpoint(state), settings, llama),
        CheckpointError,
        "unknown tensors: embedding_layernorm.weight",
    )


class Listening(Checkpoint):
    """A checkpoint that knows which of its tensors were read."""

    def __init__(self, path, tensors, read=None):
        super().__init__(path, tensors)
        self.read = set() if read is None else read

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def renamed(self, rename):
        return Listening(self.path, super().renamed(rename)._tensors, self.read)

    def only(self, wanted):
        return Listening(self.path, super().only(wanted)._tensors, self.read)


LLAMA_8B = files.LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "max_position_embeddings": 2048,
}
EAGLE3_8B = LLAMA_8B | {"draft_vocab_size": 32000}
QWEN3_8B_EAGLE3 = EAGLE3_8B | {
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "head_dim": 128,
    "architectures": ["LlamaForCausalLMEagle3"],
}
QWEN3_NEXT_80B = files.QWEN3_NEXT | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rope_theta": 1e7,
}
DEEPSEEK_V3 = files.DEEPSEEK | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
PUBLISHED = {
    "EAGLE-LLaMA3.1-Instruct-8B": (
        LLAMA_8B,
        files.eagle(LLAMA_8B) | {"embed_tokens.weight": (128256, 4096)},
        32,
    ),
    "EAGLE3-LLaMA3.1-Instruct-8B": (EAGLE3_8B, files.eagle3(EAGLE3_8B, 4096), 32),
    "Qwen3-8B eagle3": (QWEN3_8B_EAGLE3, files.eagle3(QWEN3_8B_EAGLE3, 4096), 36),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT_80B, files.qwen_mtp(QWEN3_NEXT_80B), 48),
    "DeepSeek-V3": (DEEPSEEK_V3, files.deepseek_mtp(DEEPSEEK_V3), 61),
}


def scaled(shapes):
    """DeepSeek-V3's fp8 matrices, and the factors of their blocks beside them."""
    tensors = files.on_meta(shapes)
    plain = ("norm", "gate.weight", "embed_tokens", "shared_head", "eh_proj", "correction_bias")
    for name, shape in shapes.items():
        if len(shape) == 2 and not any(word in name for word in plain):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            blocks = tuple(-(-size // 128) for size in shape)
            tensors[f"{name}_scale_inv"] = torch.empty(blocks, device="meta")
    return tensors


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_heads_use_or_share_every_tensor(llama, name):
    """On the meta device, from names and shapes: nothing unknown, nothing missing, nothing unread
    but what repeats the target's own tables."""
    settings, shapes, num_layers = PUBLISHED[name]
    tensors = scaled(shapes) if name == "DeepSeek-V3" else files.on_meta(shapes)
    if "draft_vocab_size" in settings:
        tensors["d2t"] = torch.arange(32000)
        tensors["t2d"] = torch.zeros(settings["vocab_size"], dtype=torch.bool)
        tensors["t2d"][torch.arange(32000) * 2] = True
    stored = files.checkpoint(tensors)
    readers = dequantised(stored._tensors, stored.path, settings)
    checkpoint = Listening(stored.path, readers)
    table = torch.empty(settings["vocab_size"], settings["hidden_size"], device="meta")
    target = llama._replace(
        config=SimpleNamespace(num_layers=num_layers),
        embed=table,
        lm_head=table,
        vocab_size=settings["vocab_size"],
    )
    draft = read_draft(checkpoint, settings, target)
    leaves = tree_leaves(draft.params)
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    repeated = {
        n for n in shapes if n.endswith(("shared_head.head.weight", ".61.embed_tokens.weight"))
    }
    plain = {n.replace("midlayer.", "layers.0.") for n in checkpoint}
    assert checkpoint.read == plain - repeated
    stored_numbers = sum(torch.Size(shapes[n]).numel() for n in shapes if n not in repeated)
    tables = [shapes[n] for n in ("lm_head.weight", "embed_tokens.weight") if n in shapes]
    in_tables = sum(torch.Size(shape).numel() for shape in tables)
    assert sum(leaf.numel() for leaf in leaves) == stored_numbers - in_tables
    if name != "DeepSeek-V3":
        return
    cut = {n: t for n, t in readers.items() if n != "model.layers.61.shared_head.norm.weight"}
    tiny.one_line_error(
        lambda: read_draft(Checkpoint(stored.path, cut), settings, target),
        CheckpointError,
        "lacks model.layers.61.shared_head.norm.weight$",
    )
