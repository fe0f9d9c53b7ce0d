import pickle

import pytest

from specdec.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RequestError,
    SpecdecError,
    did_you_mean,
)


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, RequestError, DataError])
def test_is_one_line_and_a_value_error(kind):
    error = kind("K=8 exceeds\n    the 4 lookahead slots")
    assert str(error) == "K=8 exceeds the 4 lookahead slots"
    assert isinstance(error, SpecdecError)
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_did_you_mean():
    valid = ["num_draft_tokens", "temperature"]
    assert did_you_mean("num_draft_token", valid) == "; did you mean 'num_draft_tokens'?"
    assert did_you_mean("zzz", valid) == ""
    assert did_you_mean("temprature", iter(valid)) == "; did you mean 'temperature'?"
