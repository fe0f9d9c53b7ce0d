"""Bad requests: each answer names the field, and the next good request is served."""

import openai
import pytest
from serving import HTTP, VOCAB_SIZE, byte_tokenizer, error_of, post, serving, speaker

from specdec.serving.protocol import ROLES


@pytest.fixture(scope="module")
def server():
    with serving(speaker()) as running:
        yield running


NAN, INF = float("nan"), float("inf")
BAD = [
    ("temperature", [-3, NAN, INF, -INF, "hot", True, 1e9, 10**400]),
    ("top_p", [0, 7, -0.1, NAN, "x"]),
    ("top_k", [-5, 1.5, "3", True]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("max_tokens", [0, -1, 1.5, "7", 594, 10**30]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "1"]),
    ("n", [0, -1, 129, 1.5]),
    ("stop", ["", [""], ["a", 3], 7, {"a": 1}]),
    ("stream", ["yes", 1]),
    ("stream_options", [{}, {"include_usage": True}]),
    ("ignore_eos", ["no"]),
    ("prompt", ["", [], [[]], [1, "a"], 5, None, "x" * 600, [VOCAB_SIZE], [-1], [[1], [10**30]]]),
    ("prompt", [[1.0], [True], "\ud800"]),
    ("logprobs", [0, 1, 5, True]),
    ("echo", [True]),
    ("presence_penalty", [0.5]),
    ("frequency_penalty", [-1]),
    ("logit_bias", [{"5": 100}]),
    ("response_format", [{"type": "json_object"}]),
    ("guided_json", [{}]),
]


@pytest.mark.parametrize(("field", "values"), BAD, ids=[f"{f}-{len(v)}" for f, v in BAD])
def test_bad_values_are_named_and_the_next_request_is_served(server, field, values):
    """Case S5. The values reach the server as JSON, NaN and Infinity as Python writes them."""
    for value in values:
        error = error_of(post(server, **{field: value}), 400)
        assert error["param"].split("[")[0] == field, value
        assert field in error["message"]
        assert error["type"] == "invalid_request_error"
    assert post(server).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages"),  # of the template
        ({"messages": [{"role": "user", "content": "\udcff"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_bad_chats(server, fields, param):
    good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    fields = fields if "messages" in fields or not fields else good | fields
    assert error_of(post(server, "/v1/chat/completions", **fields), 400)["param"] == param
    assert post(server, "/v1/chat/completions", **good).status_code == 200


@pytest.mark.parametrize("role", ["wizard", "", "User", " user", "\ud800"])
def test_roles_that_nobody_has(server, role):
    """Named in the answer, with those that there are."""
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": "hi"}]
    error = error_of(post(server, "/v1/chat/completions", messages=messages), 400)
    assert error["param"] == "messages[1].role"
    shown = f"messages[1].role={role!r} is not a role; known are "
    assert error["message"] == f"{shown}system, developer, user, assistant, tool, function"


def test_every_known_role_reaches_the_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with serving(speaker(), tokenizer=tokenizer) as running:
        for role in ROLES:
            fields = {"messages": [{"role": role, "content": "hi"}], "max_tokens": 2}
            body = post(running, "/v1/chat/completions", **fields).json()
            assert body["usage"]["prompt_tokens"] == len(f"[{role}]hi")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": }'],
)
def test_bodies_that_are_not_requests(server, content):
    assert error_of(post(server, content=content), 400)["param"] is None
    assert post(server).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "content", "said"),
    [
        (None, b'{"prompt": "a"}', "the header Content-Type is missing; send application/json"),
        (None, b"prompt", "the header Content-Type is missing; send application/json"),
        ("text/plain", b"{}", "the header Content-Type is 'text/plain'; send application/json"),
        ("json", b"{}", "the header Content-Type is 'json'; send application/json"),
        ("application/json", b"[1]", "the body is [1]; it must be a JSON object"),
        ("application/json", b'"a"', "the body is 'a'; it must be a JSON object"),
        ("application/json", b"null", "the body is empty or null; it must be a JSON object"),
        (None, b"", "the body is empty or null; it must be a JSON object"),
    ],
)
def test_a_wrong_header_and_a_wrong_body_are_told_apart(server, content_type, content, said):
    headers = {} if content_type is None else {"content-type": content_type}
    response = HTTP.post(server.url + "/v1/completions", content=content, headers=headers)
    error = error_of(response, 400)
    assert (error["message"], error["param"]) == (said, None)


def test_neutral_and_unknown_fields_are_allowed(server):
    fields = {"logprobs": None, "echo": False, "presence_penalty": 0, "best_of": 1, "user": "me"}
    fields |= {"temperature": None, "stop": None, "n": None, "stream_options": None, "whim": 3}
    assert post(server, **fields, top_k=-1, min_p=0, top_p=1, model=None).status_code == 200


def test_unknown_models_and_paths(server):
    error = error_of(post(server, model="gpt-4\ud800"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        server.client.completions.create(model="other", prompt="a")
    error_of(HTTP.get(server.url + "/v1/nothing"), 404)
    error_of(HTTP.get(server.url + "/v1/completions"), 405)
