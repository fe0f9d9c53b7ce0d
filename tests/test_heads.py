"""Every kind of head against straight-line code written from the seed text; axes; detection."""

import json
import zlib
from types import SimpleNamespace

import head_files as files
import head_runs
import pytest
import tiny
import torch
from head_runs import HEADS

from specdec.errors import CheckpointError, ConfigError
from specdec.models.axes import CHOICES, FAMILIES, head_axes
from specdec.models.blocks import BLOCKS
from specdec.models.checkpoint import Checkpoint
from specdec.models.eagle import eagle_draft
from specdec.models.eagle_checkpoint import save_head
from specdec.models.fp8 import dequantised
from specdec.models.head import head_layout, init_head
from specdec.models.heads import detect_head, read_draft
from specdec.models.layers import map_tree, tree_leaves, unpack
from specdec.models.load import load_draft
from specdec.models.parts import map_parts


@pytest.fixture(scope="module", params=HEADS)
def pair(request):
    return head_runs.load(HEADS[request.param])


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_drafts_equal_the_straight_line(pair, k):
    """After prefills, and after rounds that kept any number of drafts (K1, K2)."""
    rounds = head_runs.record(pair.target, pair.draft, k, max_tokens=9)
    for drafted in [*rounds[:3], *rounds[-3:]]:
        head_runs.check(pair, drafted)


@pytest.mark.parametrize("name", ["llama_eagle3", "qwen3_next_mtp_2_layers", "deepseek_mtp"])
@pytest.mark.parametrize(("budget", "block_size"), [(5, 4), (9, 1), (64, 16)])
def test_prefill_in_chunks(name, budget, block_size):
    pair = head_runs.load(HEADS[name])
    options = {"max_num_batched_tokens": budget, "block_size": block_size, "max_tokens": 7}
    for drafted in head_runs.record(pair.target, pair.draft, 3, **options):
        head_runs.check(pair, drafted)


DEEPSEEK_STAGES = [
    ({"recycle": "pre_norm"}, {"recycle": "pre_norm"}),
    ({"recycle": "pinned"}, {"recycle": "pinned"}),
    ({"position0_embedding": "kept"}, {"zeroed": False}),
]


@pytest.mark.parametrize(("axes", "straight"), DEEPSEEK_STAGES)
@pytest.mark.parametrize("name", ["deepseek_mtp", "deepseek_mtp_2_layers"])
def test_contested_stages_of_deepseek(name, axes, straight):
    """Public practice differs: what is recycled, and whether position 0 is masked."""
    pair = head_runs.load(HEADS[name], axes=axes, straight=straight)
    for drafted in head_runs.record(pair.target, pair.draft, 3, max_tokens=6)[-3:]:
        head_runs.check(pair, drafted)


SETTINGS = {
    "llama": files.LLAMA,
    "qwen3": files.QWEN3 | {"rope_theta": 1e4, "head_dim": 8, "rms_norm_eps": 1e-5},
    "qwen3_moe": files.QWEN3_MOE | {"rope_theta": 1e4, "head_dim": 8},
    "qwen3_next": files.QWEN3_NEXT,
    "deepseek": files.DEEPSEEK,
}
FLIPS = [
    ("llama_eagle", 1, "fusion", "norm_cat"),
    ("llama_eagle", 1, "fusion", "wide"),
    ("llama_eagle", 1, "block", "qwen3"),
    ("qwen3_eagle", 1, "block", "qwen3_moe"),
    ("qwen3_eagle", 1, "block", "qwen3_next"),
    ("qwen3_eagle", 1, "block", "deepseek"),
    ("llama_eagle3", 1, "residual", "normed"),
    ("llama_eagle", 1, "position0_embedding", "zeroed"),
    ("qwen_mtp", 2, "depth_rule", "stack"),
    ("deepseek_mtp", 2, "depth_owns", "block"),
    ("llama_eagle", 1, "first_input_norm", True),
    ("llama_eagle", 1, "final_norm", True),
    ("qwen3_eagle", 1, "recycle", "pre_norm"),
    ("qwen3_eagle", 1, "recycle", "pinned"),
    ("llama_eagle3", 1, "recycle", "post_norm"),
    ("llama_eagle3", 1, "input_features", "last_hidden"),
    ("llama_eagle3", 1, "aux_norm", "joint"),
    ("llama_eagle3", 1, "aux_norm", "each"),
]
OF_TABLES = {"logits_from", "embed", "lm_head"}  # flipped below


def named_head(family, layers, **axes):
    """A head of any axes whose tensors depend on their names and shapes alone."""
    row = head_axes(axes, FAMILIES[family].axes)
    block = BLOCKS[row.block].config(SETTINGS[row.block], layers)
    config = SimpleNamespace(block=block, axes=row, family=family, first_layer=2)
    config.aux_layers, config.aux_size = ((1, 2, 4), 32) if row.input_features == "aux" else ((), 0)

    def make(part):
        name = next(iter(part.names)).replace("fc_norm.0", "input_norm")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        random = torch.randn(part.full_shape, generator=generator) * 0.3
        return random + 1 if "norm" in name else random

    return map_parts(make, head_layout(config)), config


@pytest.fixture(scope="module")
def llama():
    return head_runs.load(HEADS["llama_eagle"]).target


@pytest.mark.parametrize(("family", "layers", "axis", "value"), FLIPS)
def test_every_axis_changes_what_is_drafted(llama, family, layers, axis, value):
    before, after = (
        eagle_draft(*named_head(family, layers, **axes), llama) for axes in ({}, {axis: value})
    )
    drafted = [
        head_runs.record(llama, draft, 3, prompts=head_runs.PROMPTS[:1], max_tokens=3)[0].logits
        for draft in (before, after)
    ]
    errors = [(a - b).norm() / a.norm() for a, b in zip(*drafted, strict=True)]
    assert max(errors) > 1e-3
    if axis == "recycle":
        assert errors[0] == 0  # nothing was recycled into the first draft


def test_no_axis_is_left_out():
    assert {axis for _, _, axis, _ in FLIPS} | OF_TABLES == set(CHOICES)
    for axis, values in CHOICES.items():
        assert getattr(head_axes({}), axis) in values


def test_table_axes(llama, tmp_path):
    """An own table is used, or refused; a head over some of the target's rows."""
    own = llama.embed.clone()
    own[5:] += 1
    folders = [
        tiny.write_draft(tmp_path / name, llama, **tables)
        for name, tables in (("none", {}), ("embed", {"embed": own}), ("head", {"lm_head": own}))
    ]
    drafts = [load_draft(folder, llama) for folder in folders]
    seen = [
        head_runs.record(llama, draft, 1, prompts=head_runs.PROMPTS[:1], max_tokens=4)[0].logits[0]
        for draft in drafts
    ]
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2])
    for folder, axis in zip(folders[1:], ("embed", "lm_head"), strict=True):
        load = lambda folder=folder, axis=axis: load_draft(folder, llama, axes={axis: "shared"})  # noqa: E731
        tiny.one_line_error(load, CheckpointError, f"the axis {axis}")
    assert load_draft(folders[0], llama, axes={"embed": "shared", "lm_head": "shared"})


def test_axes_that_exclude_each_other_are_named():
    for axes, match in (
        ({"residual": "normed"}, "residual='normed' needs fusion=wide"),
        ({"depth_owns": "all"}, "depth_owns='all' needs depth_rule=cycle"),
        ({"aux_norm": "each"}, "aux_norm='each' needs input_features=aux"),
        ({"fusion": "wide", "block": "deepseek"}, "needs block=llama or qwen3, not deepseek"),
    ):
        tiny.one_line_error(lambda axes=axes: head_axes(axes), ConfigError, match)


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
    written = set(tiny_names(tmp_path))
    spelled = {n.replace("midlayer.", "layers.0.") for n in pair.head_state} - {"t2d"}
    repeated = {n for n in spelled if n.endswith(("shared_head.head.weight",))} | {
        n for n in spelled if n.startswith("model.layers") and n.endswith("embed_tokens.weight")
    }
    assert written == spelled - repeated
    assert settings["hidden_size"] == case.head["hidden_size"]


def tiny_names(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_starts_at_the_targets_scale(llama, family):
    """Its block adds nothing, so what it passes on is its input, normed where the family norms."""
    row = FAMILIES[family].axes
    block = BLOCKS[row.block].config(SETTINGS[row.block], 1)
    aux = {"aux_layers": (1, 2, 4), "aux_size": 32} if row.input_features == "aux" else {}
    head = init_head(block, row, **aux)
    config = SimpleNamespace(block=block, axes=row, family=family, first_layer=2)
    config.aux_layers, config.aux_size = aux.get("aux_layers", ()), aux.get("aux_size", 0)
    draft = eagle_draft(head, config, llama)
    text = [5, 9, 2, 60]
    hidden, streams = head_runs.features(llama, draft, text)
    given = streams[-1] if row.input_features == "aux" else hidden
    features = draft.features(SimpleNamespace(hidden=hidden, aux=tuple(streams)))
    torch.testing.assert_close(features, given)
    batch = tiny.make_batch([tiny.Step(text, 0, [1])], 4)
    out = draft.forward(batch.input_ids, features, batch, tiny.new_cache(draft, 2, 4), 0)
    expected = given
    if row.fusion == "norm_cat":
        expected = torch.nn.functional.rms_norm(expected, (32,), eps=block.rms_norm_eps)
    if row.final_norm:
        expected = torch.nn.functional.rms_norm(expected, (32,), eps=block.rms_norm_eps)
    torch.testing.assert_close(out.for_logits, expected, rtol=1e-4, atol=1e-4)


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
