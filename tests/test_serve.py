"""The server's answers: the real client against a real socket, over tiny engines."""

import asyncio
import time

import openai
import pytest
from drafters import adversary, mixed, oracle, scripted
from running import tiny_engine
from serving import END, HTTP, MODEL, PROMPT, VOCAB_SIZE, post, scripted_target, serving, until
from tiny import tiny_draft, tiny_target

from specdec.generate import generate
from specdec.propose.autoregressive import autoregressive
from specdec.schedule import Request
from specdec.verify.greedy import greedy

K = 4
NUM_TOKENS = 16
CHAT = [{"role": "user", "content": "hi"}]
TEXT = "삼겹살 🙂🙂 é, one two three. "


def tiny_llama_engine(**options):
    target = tiny_target(vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    options = {"k": K, "eos": (END,), "max_num_batched_tokens": 128, "num_blocks": 1300} | options
    return tiny_engine(target, tiny_draft(target), autoregressive, **options)


def scripted_engine(script, prompt=PROMPT, pattern=oracle, k=K, **options):
    """An engine that says `script` (text or ids) after `prompt`, drafted by a known outcome."""
    ids = list(script.encode()) if isinstance(script, str) else list(script)
    start = list(prompt.encode())
    text = start + ids * (1 + 600 // len(ids))
    propose = scripted({tuple(start): text}, VOCAB_SIZE, pattern)
    target = scripted_target(ids, len(start))
    return tiny_engine(target, propose=propose, k=k, eos=(END,), max_model_len=600, **options)


@pytest.fixture(scope="module")
def llama():
    """A tiny random Llama with an Eagle head, K = 4, rejection."""
    with serving(tiny_llama_engine(draft_sampling="sample", max_model_len=600)) as server:
        yield server


@pytest.fixture(scope="module")
def speaker():
    """Says TEXT after PROMPT, over and over; every draft is right."""
    with serving(scripted_engine(TEXT)) as server:
        yield server


def complete(server, prompt=PROMPT, **options):
    extra = {k: options.pop(k) for k in ("top_k", "min_p", "ignore_eos") if k in options}
    return server.client.completions.create(
        model=MODEL, prompt=prompt, extra_body=extra, **({"max_tokens": NUM_TOKENS} | options)
    )


def stream(server, **options):
    """(chunks, texts by choice, finish reasons by choice)"""
    chunks = list(complete(server, stream=True, **options))
    texts, reasons = {}, {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            assert choice.index not in reasons, "a chunk after the last"
            if choice.finish_reason:
                assert choice.text == "", "text in the last chunk"
                reasons[choice.index] = choice.finish_reason
    return chunks, texts, reasons


def test_models_and_health(llama):
    (model,) = llama.client.models.list().data
    assert (model.id, model.root) == (MODEL, "folder/tiny")
    assert HTTP.get(llama.url + "/health").status_code == 200


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_k": 20}])
def test_streamed_equals_whole_and_repeats(llama, options):
    whole = complete(llama, **options)
    chunks, texts, reasons = stream(llama, **options)
    assert texts == {0: whole.choices[0].text}
    assert reasons == {0: whole.choices[0].finish_reason}
    assert complete(llama, **options).choices[0].text == texts[0]
    assert whole.usage.completion_tokens == NUM_TOKENS
    assert len({chunk.id for chunk in chunks}) == 1


def test_text_is_what_the_engine_says(llama):
    """Also at a temperature: what the client sets reaches the engine."""
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": -3}
    prompt_ids = tuple(PROMPT.encode())
    request = Request(prompt_ids, max_tokens=NUM_TOKENS, **settings)
    (result,) = generate(tiny_llama_engine(draft_sampling="sample"), [request])
    assert complete(llama, **settings).choices[0].text == llama.codec.decode(result.token_ids)


def test_seeds_differ_and_none_is_random(llama):
    texts = {complete(llama, seed=seed).choices[0].text for seed in (1, 2, None, None)}
    assert len(texts) == 4


def test_several_choices(llama):
    whole = complete(llama, n=3, seed=7)
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert complete(llama, seed=7).choices[0].text == texts[0]
    assert stream(llama, n=3, seed=7)[1] == dict(enumerate(texts))
    assert whole.usage.completion_tokens == 3 * NUM_TOKENS
    assert whole.usage.prompt_tokens == len(PROMPT)


def test_forms_of_a_prompt(llama):
    def ask(prompt):
        answer = complete(llama, prompt, temperature=0)
        return [choice.text for choice in answer.choices], answer.usage.prompt_tokens

    ids = list(PROMPT.encode())
    (text,), length = ask(PROMPT)
    assert length == len(ids)
    assert ask([PROMPT]) == ask(ids) == ask([ids]) == ([text], length)
    assert ask([PROMPT, "other"]) == ([text, *ask("other")[0]], length + 5)


def test_chat(llama):
    def ask(**options):
        return llama.client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=20, **options
        )

    whole = ask(max_tokens=3)
    message = whole.choices[0].message
    prompt = "<user>hi<end><assistant>"
    assert whole.usage.prompt_tokens == len(llama.codec.encode(prompt)) == 5
    assert whole.usage.completion_tokens == 20
    assert message.role == "assistant"
    assert message.content == complete(llama, prompt, temperature=0, max_tokens=20).choices[0].text
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    ]
    answer = llama.client.chat.completions.create(
        model=MODEL, messages=parts, temperature=0, max_tokens=20
    )
    assert answer.choices[0].message.content == message.content


def test_a_chat_may_fill_the_context():
    engine = tiny_engine(scripted_target(TEXT.encode(), 3), max_model_len=100)
    with serving(engine) as server:
        answer = server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": ""}]
        )
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 97
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_usage_is_exact(speaker, max_tokens):
    """Case S3, with bursts of K + 1 that cross the limit."""
    whole = complete(speaker, max_tokens=max_tokens)
    chunks, texts, reasons = stream(
        speaker, max_tokens=max_tokens, stream_options={"include_usage": True}
    )
    expected = TEXT.encode()[:max_tokens].decode(errors="replace")
    assert whole.choices[0].text == texts[0] == expected
    assert whole.choices[0].finish_reason == reasons[0] == "length"
    assert whole.usage == chunks[-1].usage
    assert whole.usage.completion_tokens == max_tokens
    assert whole.usage.total_tokens == max_tokens + len(PROMPT)


def test_usage_comes_once_and_only_if_asked_for(speaker):
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        chunks, _, _ = stream(speaker, **options)
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    chunks, _, _ = stream(speaker, stream_options={"include_usage": True})
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert post(speaker, stream=True).text.endswith("\n\ndata: [DONE]\n\n")


def test_a_burst_is_one_chunk_and_characters_are_whole(speaker):
    length = len(TEXT.encode())
    chunks, texts, _ = stream(speaker, max_tokens=length)
    assert texts[0] == TEXT
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks)
    assert len(chunks) <= 1 + -(-(length - 1) // (K + 1)) + 1  # and one that has the reason
    chunks, texts, _ = stream(speaker, max_tokens=12)  # ends in two of four bytes
    assert texts[0] == "삼겹살 \ufffd"
    assert [("\ufffd" in chunk.choices[0].text) for chunk in chunks][-3:] == [False, True, False]


@pytest.mark.parametrize("stop", ["🙂 é", [" 🙂🙂", "é"], "two", ["e t"], "살 🙂🙂 é, one"])
def test_stop_strings(speaker, stop):
    """They span tokens and chunks; nothing of them is shown, or counted past the last byte."""
    stops = [stop] if isinstance(stop, str) else stop
    end, begin = min((TEXT.index(s) + len(s), TEXT.index(s)) for s in stops)
    whole = complete(speaker, stop=stop, max_tokens=100)
    _, texts, reasons = stream(speaker, stop=stop, max_tokens=100)
    assert whole.choices[0].text == texts[0] == TEXT[:begin]
    assert whole.choices[0].finish_reason == reasons[0] == "stop"
    assert whole.usage.completion_tokens == len(TEXT[:end].encode())
    figures = whole.model_extra["metrics"]["speculative_decoding"]
    committed = whole.usage.completion_tokens - 1  # the first came from the prefill
    assert figures["num_spec_steps"] == -(-committed // (K + 1))
    assert figures["num_accepted_draft_tokens"] <= committed
    until(lambda: not speaker.engine.has_unfinished)


@pytest.mark.parametrize("pattern", [oracle, adversary], ids=["accepted", "rejected"])
def test_the_first_committed_end_token_ends(pattern):
    """Case S1: nothing after it is shown, though it was committed in the middle of a burst."""
    script = [*b"abcdef", END, *b"xyz"]
    with serving(scripted_engine(script, pattern=pattern)) as server:
        whole = complete(server)
        assert whole.choices[0].text == stream(server)[1][0] == "abcdef"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens == 7
        going_on = complete(server, ignore_eos=True, max_tokens=13)
        assert going_on.choices[0].text == "abcdefxyzabc"
        assert going_on.choices[0].finish_reason == "length"
        assert going_on.usage.completion_tokens == 13


def test_a_drafted_and_rejected_end_token_has_no_effect():
    """Case S1: the drafter says END next, each time; the target never does."""
    start, script = list(PROMPT.encode()), b"abcdefgh"
    wrong = {tuple(start): start + [END - 1] * 100}  # the adversary drafts the id after it
    propose = scripted(wrong, VOCAB_SIZE, adversary)
    engine = tiny_engine(scripted_target(script, len(start)), propose=propose, k=2, eos=(END,))
    with serving(engine) as server:
        whole = complete(server, max_tokens=8)
    assert whole.choices[0].text == "abcdefgh"
    assert whole.choices[0].finish_reason == "length"
    figures = whole.model_extra["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == 7
    assert figures["num_draft_tokens"] == 5 * 2 + 1  # none past the limit
    assert figures["num_accepted_draft_tokens"] == 0


def test_acceptance_of_a_request(speaker):
    """21 tokens: one from the prefill, then four rounds of five, all drafts kept."""
    expected = {
        "mean_acceptance_length": 5.0,
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, 0, 0, 0, 4],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 16,
        "num_draft_tokens": 16,
    }
    whole = complete(speaker, max_tokens=21)
    assert whole.model_extra["metrics"] == {"speculative_decoding": expected}
    chunks, _, _ = stream(speaker, max_tokens=21, stream_options={"include_usage": True})
    assert chunks[-1].model_extra["metrics"] == {"speculative_decoding": expected}
    first = complete(speaker, max_tokens=1).model_extra["metrics"]["speculative_decoding"]
    assert first["mean_acceptance_length"] is None
    assert first["acceptance_histogram"] == [0]


def test_prometheus_metrics_agree_with_the_answers():
    with serving(scripted_engine(TEXT, pattern=mixed)) as server:
        answers = [complete(server, n=2, max_tokens=40) for _ in range(3)]
        each = [answer.model_extra["metrics"]["speculative_decoding"] for answer in answers]

        def total(name):
            return sum(figures[name] for figures in each)

        accepted = total("num_accepted_draft_tokens")
        assert 0 < accepted < total("num_draft_tokens")
        assert server.value("spec_decode_num_drafts_total") == total("num_spec_steps")
        assert server.value("spec_decode_num_draft_tokens_total") == total("num_draft_tokens")
        assert server.value("spec_decode_num_accepted_tokens_total") == accepted
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        at = [server.value(name, position=str(j)) for j in range(K)]
        histograms = [figures["acceptance_histogram"] for figures in each]
        assert at == [sum(sum(h[j + 1 :]) for h in histograms) for j in range(K)]
        tokens = sum(answer.usage.completion_tokens for answer in answers)
        assert server.value("generation_tokens_total") == tokens
        assert server.value("prompt_tokens_total") == 6 * len(PROMPT)
        ended = [
            server.value("request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        ]
        assert sum(ended) == 6
        assert ended[2:] == [0, 0]
        assert server.value("time_to_first_token_seconds_count") == 6
        assert server.value("e2e_request_latency_seconds_count") == 6
        assert server.value("inter_token_latency_seconds_count") == tokens - 6
        assert server.value("num_requests_running") == 0
        assert server.value("num_requests_waiting") == 0
        assert server.value("kv_cache_usage_perc") == 0
        page = HTTP.get(server.url + "/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        assert f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="{MODEL}"}}' in page.text


def test_a_greedy_rule_serves_temperature_0_only():
    with serving(tiny_llama_engine(verify=greedy)) as server:
        assert complete(server).choices[0].text == complete(server, temperature=0).choices[0].text
        with pytest.raises(openai.BadRequestError, match=r"temperature=0\.5") as caught:
            complete(server, temperature=0.5)
        assert caught.value.param == "temperature"


async def streams_for(server, seconds, num_streams=16):
    """Run streams side by side, each client starting the next when one ends; returns the texts
    by seed and the number of streams."""
    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
    deadline = time.monotonic() + seconds
    texts, count = {}, 0

    async def one(number):
        nonlocal count
        while True:
            events = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=4 + 2 * number, seed=number, stream=True
            )
            pieces = [chunk.choices[0] async for chunk in events]
            assert pieces[-1].finish_reason in ("length", "stop")
            texts.setdefault(number, set()).add("".join(piece.text for piece in pieces))
            count += 1
            if time.monotonic() > deadline:
                return

    async with client:
        await asyncio.gather(*(one(number) for number in range(num_streams)))
    return texts, count


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.slow)])
def test_sixteen_streams(llama, seconds):
    """No error, no neighbour's influence, and every block free at the end."""
    before = llama.num_free, llama.value("request_success_total", finished_reason="abort")
    texts, count = asyncio.run(streams_for(llama, seconds))
    assert count > 16
    assert all(len(each) == 1 for each in texts.values())
    alone = complete(llama, seed=15, max_tokens=4 + 2 * 15).choices[0].text
    assert texts[15] == {alone}
    until(lambda: not llama.engine.has_unfinished)
    assert (
        llama.num_free,
        llama.value("request_success_total", finished_reason="abort"),
    ) == before
