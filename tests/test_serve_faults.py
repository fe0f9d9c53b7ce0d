"""The server under vanished clients, failing steps, wrong keys and SIGTERM."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from serving import HTTP, MODEL, PROMPT, error_of, post, serving, speaker, until
from tiny_chat import write_chat_model

from specdec.serving import app as app_module
from specdec.serving.responses import EventStream

ROOT = Path(__file__).resolve().parent.parent
KEY = "a-key-of-one's-own"


def slowly(engine, seconds=0.01):
    """Give each step a length that a test can act in."""
    step = engine.step

    def slow_step():
        time.sleep(seconds)
        return step()

    engine.step = slow_step
    return engine


@pytest.fixture(scope="module")
def server():
    with serving(speaker()) as running:
        yield running


@pytest.fixture(scope="module")
def slow_server():
    with serving(slowly(speaker())) as running:
        yield running


def test_an_abandoned_stream_frees_its_blocks(slow_server):
    """Case S5: close a 500-token stream after its first event."""
    free = slow_server.num_free
    events = slow_server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=500, stream=True
    )
    next(iter(events))
    assert slow_server.num_free < free
    events.close()
    until(lambda: slow_server.num_free == free, seconds=2)
    assert not slow_server.engine.has_unfinished
    assert not slow_server.worker._open
    until(lambda: slow_server.value("num_requests_running") == 0)
    assert slow_server.value("kv_cache_usage_perc") == 0


def test_an_abandoned_answer_frees_its_blocks(slow_server):
    aborted = slow_server.value("request_success_total", finished_reason="abort")
    with pytest.raises(openai.APITimeoutError):
        slow_server.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=500, n=3, timeout=0.5
        )
    until(lambda: not slow_server.engine.has_unfinished, seconds=2)
    assert slow_server.num_free == slow_server.engine.limits.num_blocks - 1
    until(
        lambda: slow_server.value("request_success_total", finished_reason="abort") == aborted + 3
    )


def test_a_client_that_does_not_read_is_let_go(slow_server):
    """Its stream waits for the reader, not for the engine, when the connection goes."""
    host, port = slow_server.url.removeprefix("http://").split(":")
    free = slow_server.num_free
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.connect((host, int(port)))
        body = json.dumps({"prompt": PROMPT, "max_tokens": 500, "n": 4, "stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: slow_server.num_free < free)
    until(lambda: slow_server.num_free == free, seconds=2)


def test_a_stream_that_waits_for_its_reader_is_closed():
    """What it awaits when the client leaves is the socket, so nothing is raised inside it."""
    closed = []

    async def events():
        try:
            while True:
                yield "data: {}"
        finally:
            closed.append(True)

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def run():
        stream = events()
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await EventStream(stream)(scope, receive, send)
        return list(closed)  # before the loop's own clean-up

    assert asyncio.run(run()) == [True]


def test_a_normal_end_aborts_nothing(server):
    calls = []
    abort = server.worker.abort
    server.worker.abort = lambda ticket: (calls.append(ticket), abort(ticket))
    try:
        for stream in (False, True):
            answer = server.client.completions.create(
                model=MODEL, prompt=PROMPT, n=2, stream=stream, stream_options=None
            )
            list(answer) if stream else answer
    finally:
        del server.worker.abort
    assert calls == []


def test_a_failed_step_ends_its_requests_only():
    """Case X1: the body says nothing of the inside. The server goes on."""
    engine = speaker(max_num_seqs=1)
    step, faults = engine.step, []

    def failing_step():
        outputs = step()
        if faults and faults[0] <= 0:
            faults.clear()
            raise RuntimeError("no such file: /etc/specdec/secret")
        faults[:] = [n - 1 for n in faults]
        return outputs

    engine.step = failing_step
    with serving(engine) as server:
        good = post(server).json()["choices"]
        for streamed in (False, True):
            faults.append(3)
            response = post(server, stream=streamed)
            assert response.status_code == (200 if streamed else 500)
            if streamed:
                *events, last, done, _ = response.text.split("\n\n")
                assert done == "data: [DONE]"
                assert len(events) == 3
                body = last.removeprefix("data: ")
            else:
                body = response.text
            error = json.loads(body)["error"]
            assert (error["type"], error["param"], error["code"]) == ("server_error", None, None)
            assert "/" not in body
            assert "Error" not in body
            assert "secret" not in body
            assert server.num_free == engine.limits.num_blocks - 1
            assert post(server).json()["choices"] == good
        faults.append(3)
        with pytest.raises(openai.APIError):
            list(server.client.completions.create(model=MODEL, prompt=PROMPT, stream=True))
        assert HTTP.get(server.url + "/health").status_code == 200
        assert server.value("request_success_total", finished_reason="error") == 3


def test_a_fault_before_anything_runs_does_not_repeat_for_ever():
    engine = speaker()
    step = engine.step
    engine.step = lambda: 1 / 0
    with serving(engine) as server:
        error_of(post(server), 500)
        engine.step = step
        assert post(server).status_code == 200


def test_a_fault_in_a_route_says_nothing(server, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such file: /etc/specdec/secret")

    monkeypatch.setattr(app_module, "make_job", broken)
    body = post(server)
    error_of(body, 500)
    assert "/" not in body.text
    assert "Error" not in body.text


def test_a_row_that_is_not_finite_fails_its_request_only():
    """Case N1: the row comes after five tokens; a neighbour that ends before it is served."""
    script = [*b"abcde", -1, *b"fgh"]
    with serving(speaker(script)) as server:
        assert post(server, max_tokens=5).json()["choices"][0]["text"] == "abcde"
        assert "not finite" in error_of(post(server, max_tokens=9), 500)["message"]
        stream = post(server, max_tokens=9, stream=True).text
        assert stream.count('"text"') == 5
        assert "not finite" in stream
        assert server.num_free == server.engine.limits.num_blocks - 1
        assert post(server, max_tokens=5).status_code == 200


def test_an_engine_that_refuses_is_a_bad_request():
    """The server checks first; what only the engine knows of still comes back as its own line."""
    engine = speaker()
    with serving(engine) as server:
        engine.limits = engine.limits._replace(max_model_len=5)
        error = error_of(post(server), 400)
        assert "context holds 5" in error["message"]


def test_every_path_but_health_asks_for_the_key():
    with serving(speaker(), api_key=KEY) as server:
        routes = [("GET", p) for p in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/x")]
        routes += [("POST", p) for p in ("/v1/completions", "/v1/chat/completions", "/health/")]
        wrong = [{}, *({"authorization": v} for v in (KEY, "Bearer", "Bearer a", f"Basic {KEY}"))]
        wrong += [{"authorization": f"Bearer {KEY}x"}, {"authorization": b"Bearer \xff"}]
        for method, path in routes:
            for headers in wrong:
                response = HTTP.request(method, server.url + path, headers=headers)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert KEY not in response.text
        assert HTTP.get(server.url + "/health").status_code == 200
        assert server.client.models.list().data[0].id == MODEL
        assert post(server, headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="other").models.list()


def test_keys_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(given, expected):
        compared.append((given, expected))
        return given == expected

    monkeypatch.setattr(app_module.hmac, "compare_digest", compare)
    with serving(speaker(), api_key="k") as server:
        HTTP.get(server.url + "/v1/models", headers={"authorization": "Bearer j"})
    assert compared == [(b"Bearer j", b"Bearer k")]


def test_without_a_configured_key_any_is_accepted(server):
    for headers in ({}, {"authorization": "Bearer anything"}):
        assert post(server, headers=headers).status_code == 200


def serve(*overrides, **options):
    command = [sys.executable, ROOT / "serve.py", "device=cpu", "port=0", *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def test_serve_drains_on_sigterm(tmp_path):
    """The script itself: the running stream is finished, then it exits with 0."""
    model = write_chat_model(tmp_path / "small-chat", max_position_embeddings=4096)
    process = serve(
        f"target.path={model}",
        "model=llama_ngram",
        "dtype=float32",
        f"api_key={KEY!r}",
        cwd=tmp_path,
    )
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "serving http" in line:
                break
        else:
            pytest.fail("".join(lines))
        url = line.split()[-1]
        client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=4, timeout=60)
        assert client.models.list().data[0].id == "small-chat"
        events = client.chat.completions.create(
            model="small-chat",
            messages=[{"role": "user", "content": "w7 w8"}],
            max_tokens=300,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [next(events)]
        process.send_signal(signal.SIGTERM)
        chunks += list(events)
        assert chunks[-1].usage.completion_tokens == 300
        assert chunks[-2].choices[0].finish_reason == "length"
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 0, rest
        with pytest.raises(httpx.ConnectError):
            HTTP.get(url + "/models")
        said = "".join(lines) + rest
        logs = [
            path.read_text() for path in tmp_path.rglob("*") if path.suffix in (".log", ".yaml")
        ]
        assert logs
        assert not any(KEY in text for text in [said, *logs])
    finally:
        process.kill()
        process.wait()


def test_serve_refuses_what_cannot_run(server, tmp_path):
    """Each in a folder of its own: they start in the same second, after which folders are named."""
    port = server.url.rpartition(":")[2]
    runs = []
    for override, reason in (
        (f"port={port}", f"127.0.0.1:{port}"),
        ("api_key=", "api_key is empty"),
        ("+prot=9", "did you mean 'port'"),
    ):
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append((serve(override, cwd=folder), reason))
    for process, reason in runs:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 1
        assert reason in said
        assert "Traceback" not in said
