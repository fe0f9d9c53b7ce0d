"""Axes of draft heads: each changes what is drafted, and is set in one place."""

import zlib
from dataclasses import fields
from types import SimpleNamespace

import head_files as files
import head_runs
import pytest
import tiny
import tiny_chat
import torch
from head_runs import HEADS
from hydra import compose, initialize_config_module

from specdec.build import load_models
from specdec.config import AxesConfig, register_schemas
from specdec.errors import CheckpointError, ConfigError
from specdec.models.axes import CHOICES, FAMILIES, HeadAxes, head_axes
from specdec.models.blocks import BLOCKS
from specdec.models.eagle import eagle_draft
from specdec.models.head import head_layout, init_head
from specdec.models.load import load_draft, load_target
from specdec.models.parts import map_parts

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


def test_family_and_axes_are_configuration(tmp_path):
    """`draft.family` and `draft.axes.*`, each axis under its own name."""
    names = {field.name for field in fields(AxesConfig)}
    assert names | {"logits_from"} == {field.name for field in fields(HeadAxes)}
    target = tiny_chat.write_chat_model(tmp_path / "target")
    draft = tiny.write_draft(tmp_path / "draft", load_target(target))
    register_schemas()
    overrides = [f"target.path={target}", f"draft.path={draft}", "dtype=float32", "device=cpu"]
    overrides.append("draft.logits_from=shared")  # the default preset drafts over a ranking
    chosen = ["draft.family=llama_eagle", "draft.axes.recycle=pinned"]
    with initialize_config_module("specdec.conf", version_base="1.3"):
        for more, recycle in (([], "pre_norm"), (chosen, "pinned")):
            models = load_models(compose("config", [*overrides, *more]), uses_draft=True)
            assert models.draft.config.axes == HeadAxes(recycle=recycle)
        wrong = compose("config", [*overrides, "draft.family=medusa"])
        tiny.one_line_error(
            lambda: load_models(wrong, uses_draft=True), CheckpointError, "'medusa'; known: llama"
        )


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
