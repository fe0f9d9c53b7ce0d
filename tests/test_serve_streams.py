"""The events of a stream as they go over the wire: text first, then the reason alone."""

import json

import pytest
from serving import END, MODEL, post, serving, speaker

CHAT = {"messages": [{"role": "user", "content": "Tell"}]}  # as many tokens as PROMPT
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
OPENING = {"chat": {"delta": {"role": "assistant", "content": ""}}, "text": {"text": ""}}
LAST = {"chat": {"delta": {}}, "text": {"text": ""}}


@pytest.fixture(scope="module")
def server():
    """Says "word word ..."."""
    with serving(speaker()) as running:
        yield running


def events(server, kind, **fields):
    """(choices of the events that have one, the last event) of a stream."""
    fields = (CHAT if kind == "chat" else {}) | {"max_tokens": 7, "stream": True} | fields
    *texts, done, nothing = post(server, PATHS[kind], **fields).text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    bodies = [json.loads(text.removeprefix("data: ")) for text in texts]
    return [choice for body in bodies for choice in body["choices"]], bodies[-1]


def text_of(choice):
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    ("fields", "reason", "num_tokens"),
    [({}, "length", 7), ({"stop": ["rd"]}, "stop", 4), ({"stop": ["zz", "d wx"]}, "length", 7)],
    ids=["length", "stop string", "held back"],
)
def test_the_reason_comes_after_all_text(server, kind, fields, reason, num_tokens):
    whole = post(server, PATHS[kind], **(CHAT if kind == "chat" else {}), max_tokens=7, **fields)
    (answer,) = whole.json()["choices"]
    expected = answer["message"]["content"] if kind == "chat" else answer["text"]
    choices, usage = events(server, kind, **fields, stream_options={"include_usage": True})
    *before, last = choices
    assert last == {"index": 0, **LAST[kind], "logprobs": None, "finish_reason": reason}
    assert {choice["finish_reason"] for choice in before} == {None}
    assert all(text_of(choice) for choice in before)
    assert "".join(map(text_of, before)) == expected != ""
    assert usage["usage"] == whole.json()["usage"]
    assert usage["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("kind", PATHS)
def test_each_choice_has_a_reason_of_its_own(server, kind):
    choices, _ = events(server, kind, n=3)
    for index in range(3):
        *before, last = (choice for choice in choices if choice["index"] == index)
        assert (last["finish_reason"], text_of(last)) == ("length", "")
        assert {choice["finish_reason"] for choice in before} == {None}
        assert len("".join(map(text_of, before))) == 7


@pytest.mark.parametrize("kind", PATHS)
def test_a_stream_without_text_is_opened_and_ended(kind):
    with serving(speaker([END])) as server:
        choices, _ = events(server, kind)
    opening, last = choices
    assert opening == {"index": 0, **OPENING[kind], "logprobs": None, "finish_reason": None}
    assert last == {"index": 0, **LAST[kind], "logprobs": None, "finish_reason": "stop"}


def test_the_client_gathers_the_whole_message(server):
    """openai's own accumulator, which reads the deltas and the last chunk."""
    ask = {"model": MODEL, **CHAT, "stop": "rd"}
    with server.client.chat.completions.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        (choice,) = stream.get_final_completion().choices
    whole = server.client.chat.completions.create(**ask).choices[0]
    assert choice.message.content == whole.message.content == "wo"
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert kinds.count("content.done") == 1
