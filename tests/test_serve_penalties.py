"""Penalties over the HTTP API."""

from running import tiny_engine
from serving import END, MODEL, PROMPT, error_of, post, scripted_target, serving

from specdec.generate import generate
from specdec.propose.ngram import ngram
from specdec.schedule import Request


def talker(**options):
    """Says "word " over and over, with a logit of 1.5 where others have 0.5."""
    target = scripted_target(list(b"word "), len(PROMPT))
    close = target._replace(logits=lambda hidden: target.logits(hidden) / 60 + 1)
    return tiny_engine(close, max_model_len=600, eos=(END,), **options)


def test_a_server_honours_penalties():
    asks = {"presence_penalty": 1.5, "frequency_penalty": 0.25}
    ids = tuple(PROMPT.encode())
    with serving(talker(penalties=True, propose=ngram, min_ngram=1)) as server:
        given = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        create = server.client.completions.create
        plain = create(**given).choices[0].text
        text = create(**given, **asks).choices[0].text
        repeated = create(**given, extra_body={"repetition_penalty": 4.0}).choices[0].text
        messages = [{"role": "user", "content": "Tell"}]
        chat = server.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=3, **asks
        )
        for name, value in (("presence_penalty", 3), ("repetition_penalty", 0)):
            assert error_of(post(server, **{name: value}), 400)["param"] == name
    assert plain == "word word wo"
    wants = []
    for penalties in (asks, {"repetition_penalty": 4.0}):
        request = Request(ids, max_tokens=12, **penalties)
        (result,) = generate(talker(penalties=True), [request])
        wants.append(bytes(result.token_ids).decode(errors="replace"))
    assert [text, repeated] == wants
    assert len({plain, text, repeated}) == 3
    assert chat.usage.completion_tokens == 3


def test_a_server_without_counts_says_what_to_set():
    with serving(talker()) as server:
        error = error_of(post(server, frequency_penalty=0.5), 400)
        assert error["param"] == "frequency_penalty"
        assert "penalties=true" in error["message"]
        assert post(server, frequency_penalty=0, repetition_penalty=1).status_code == 200
