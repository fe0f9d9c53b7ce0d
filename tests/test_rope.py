"""Rotary settings in every layout, against transformers and printed values."""

import json

import pytest
import tiny
import torch

from specdec.errors import CheckpointError
from specdec.models.load import load_draft
from specdec.models.rope import Rope, inv_freq, read_rope, rope_settings

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def refused(call, match):
    tiny.one_line_error(call, CheckpointError, match)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": None},
    ],
)
def test_theta_in_either_layout(config):
    """C3, with its printed value."""
    assert inv_freq(read_rope(config), 64)[1].item() == pytest.approx(0.64938, abs=5e-6)


def test_theta_without_a_setting_is_the_default():
    assert inv_freq(read_rope({}), 64)[1].item() == pytest.approx(0.74989, abs=5e-6)


def test_a_draft_uses_its_own_rope(tmp_path):
    """C3: scaling on the draft gives the target's frequencies, and a different theta does not."""
    target = tiny.tiny_target(rope_theta=5e5, rope_scaling=LLAMA3)
    folder = tiny.write_draft(tmp_path, target)
    config = json.loads((folder / "config.json").read_text())

    def frequencies(**changes):
        changed = {k: v for k, v in (config | changes).items() if v != "drop"}
        (folder / "config.json").write_text(json.dumps(changed))
        block = load_draft(folder, target).config.block
        return inv_freq(block.rope, block.head_dim)

    expected = inv_freq(target.config.rope, target.config.head_dim)
    assert not torch.equal(expected, inv_freq(Rope(5e5), target.config.head_dim))
    assert torch.equal(frequencies(), expected)
    parameters = {**LLAMA3, "rope_theta": 5e5}
    moved = frequencies(rope_theta="drop", rope_scaling="drop", rope_parameters=parameters)
    assert torch.equal(moved, expected)
    older = {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()}
    assert torch.equal(frequencies(rope_scaling=older), expected)
    assert torch.equal(frequencies(rope_theta=2e4, rope_scaling=None), inv_freq(Rope(2e4), 8))


SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_frequencies_equal_transformers(scaling, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = tiny.tiny_config(
        head_dim=head_dim,
        rope_parameters={**scaling, "rope_theta": 5e5},
        max_position_embeddings=4096,
    )
    theirs = LlamaRotaryEmbedding(LlamaConfig(**config))
    ours = read_rope(config)
    torch.testing.assert_close(inv_freq(ours, head_dim), theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling)
    assert read_rope(rope_settings(ours)) == ours


def test_rope_that_is_not_understood_is_named():
    refused(lambda: read_rope({"rope_scaling": {"type": "dynamic", "factor": 2}}), "'dynamic'")
    refused(lambda: read_rope({"rope_scaling": {"type": "linear"}}), "needs 'factor'")
    broken = {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}
    refused(lambda: read_rope({"rope_scaling": broken}), "low_freq_factor")
    refused(lambda: read_rope({"rope_parameters": {"full": {"rope_theta": 1.0}}}), "layer type")
    refused(lambda: read_rope({"partial_rotary_factor": 0.5}), "partial_rotary_factor")


def test_positions_past_the_trained_length_run():
    """K7: the rotation is computed for the rows at hand, so no position is out of a table."""
    target = tiny.tiny_target(max_position_embeddings=8)
    prompt = [3 + i % 90 for i in range(50)]
    assert tiny.logits(target, prompt).isfinite().all()
    longer = tiny.tiny_target(max_position_embeddings=4096)
    assert torch.equal(tiny.logits(target, prompt), tiny.logits(longer, prompt))
