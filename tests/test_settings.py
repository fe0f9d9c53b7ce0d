"""Values of a config.json that no model can have are refused by name, before a tensor is read."""

import json
import math

import pytest
import tiny

from specdec.errors import CheckpointError
from specdec.models.load import load_draft, load_target
from specdec.models.settings import check_settings

WRONG = [
    ("hidden_size", 0, "hidden_size=0 must be a number: an integer of at least 1"),
    ("hidden_size", 1.5, "hidden_size=1.5 must be"),
    ("num_hidden_layers", True, "num_hidden_layers=True must be"),
    ("num_attention_heads", -1, "num_attention_heads=-1 must be"),
    ("num_key_value_heads", "two", "num_key_value_heads='two' must be"),
    ("max_position_embeddings", None, "max_position_embeddings=null must be a number"),
    ("rms_norm_eps", None, "rms_norm_eps=null must be a number"),
    ("rms_norm_eps", "small", "rms_norm_eps='small' must be a finite number"),
    ("rope_theta", "abc", "rope_theta='abc' must be a finite number above 0"),
    ("rope_theta", math.inf, "rope_theta=inf must be"),
    ("rope_parameters", 5, "rope_parameters=5 must be an object"),
    ("rope_scaling", "yarn", "rope_scaling='yarn' must be an object"),
    ("rope_scaling", {"rope_type": "linear", "factor": 0}, "factor=0 must be"),
    ("text_config", {"hidden_size": "x"}, "hidden_size='x' must be"),
    ("tie_word_embeddings", "maybe", "tie_word_embeddings='maybe' must be true or false"),
    ("architectures", "LlamaForCausalLM", "architectures='LlamaForCausalLM' must be a list"),
    ("layer_types", [None], "layer_types=.None. must be a list of names"),
    ("eagle_aux_hidden_state_layer_ids", [1, "2"], "must be a list of integers"),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_a_wrong_value_is_named(key, value, message):
    with pytest.raises(CheckpointError, match=message):
        check_settings({"vocab_size": 100, key: value})


def test_absent_null_and_unknown_values_are_left_alone():
    check_settings({})
    check_settings(
        {"head_dim": None, "q_lora_rank": None, "rope_scaling": None, "layer_types": None}
    )
    check_settings({"num_experts": 0, "tie_word_embeddings": 0, "rope_theta": 10000})
    check_settings({"num_labels": "many", "chunk_size_feed_forward": -3})


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_file_is_named_of_a_target_and_of_a_head(tmp_path):
    folder = tiny.write_target(tmp_path / "target")
    target = load_target(folder)
    head = tiny.write_draft(tmp_path / "head", target)
    edit(head, rms_norm_eps="x")
    with pytest.raises(CheckpointError, match=r"head/config.json: rms_norm_eps='x'"):
        load_draft(head, target)
    edit(head, rms_norm_eps=1e-6, partial_rotary_factor=0.5)
    with pytest.raises(CheckpointError, match=r"head.*: partial_rotary_factor other than 1"):
        load_draft(head, target)
    edit(folder, num_hidden_layers=1.5)
    with pytest.raises(CheckpointError, match=r"target/config.json: num_hidden_layers=1.5"):
        load_target(folder)


def test_a_head_of_odd_dimensions_cannot_turn(tmp_path):
    with pytest.raises(CheckpointError, match="and 7 are no pairs"):
        load_target(tiny.write_target(tmp_path, head_dim=7))
