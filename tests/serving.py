"""A real server on the loopback around a tiny engine, for tests."""

import contextlib
import json
import socket
import threading
import time
from typing import NamedTuple

import httpx
import openai
import torch
import uvicorn
from running import tiny_engine
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.models.batch import Cache, Target, TargetOutput
from specdec.serving.app import Served, create_app
from specdec.serving.metrics import ServerMetrics
from specdec.serving.protocol import Defaults
from specdec.serving.text import TextCodec, text_codec
from specdec.serving.worker import EngineThread
from specdec.verify import traits_of

END, USER, ASSISTANT = 256, 257, 258
VOCAB_SIZE = 259
MODEL = "tiny"
PROMPT = "Tell me"
HTTP = httpx.Client(verify=False, timeout=60)  # loading certificates takes longer than a request
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
)


def byte_tokenizer():
    """One token a byte, id = byte; then `<end>`, `<user>`, `<assistant>`."""
    letters = {ord(c): c for c in pre_tokenizers.ByteLevel.alphabet()}
    # ByteLevel writes printable bytes as themselves and the others as U+0100 and on, in order.
    names = [letters.pop(byte, None) for byte in range(256)]
    rest = iter(sorted(letters.values()))
    vocab = {name or next(rest): byte for byte, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<end>", "<user>", "<assistant>")
    tokenizer.add_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template=CHAT_TEMPLATE
    )


def scripted_target(script, prompt_len, vocab_size=VOCAB_SIZE):
    """A target that says `script` (ids) after a prompt of `prompt_len` tokens, then repeats it.

    An id of -1 stands for a row that is not finite.
    """
    table = torch.full((len(script), vocab_size), -30.0)
    for row, token in zip(table, script, strict=True):
        if token < 0:
            row.fill_(torch.nan)
        else:
            row[token] = 30.0

    def forward(batch, cache):
        place = (batch.positions - (prompt_len - 1)) % len(script)
        return TargetOutput(place[:, None].float())

    return Target(
        config=None,
        params=None,
        forward=forward,
        logits=lambda hidden: table[hidden[:, 0].long()],
        new_cache=lambda shape: Cache((), ()),
        vocab_size=vocab_size,
        max_position=10**6,
        embed=table,
        lm_head=table,
    )


class Server(NamedTuple):
    """A running server and what is behind it."""

    url: str
    client: openai.OpenAI
    worker: EngineThread
    codec: TextCodec
    metrics: ServerMetrics

    @property
    def engine(self):
        return self.worker.engine

    @property
    def num_free(self):
        return len(self.engine.pool.free)

    def value(self, name, **labels):
        """A sample of /metrics, by name without the prefix."""
        labels |= {"model_name": MODEL, "engine": "0"}
        return self.metrics.registry.get_sample_value(f"vllm:{name}", labels)


@contextlib.contextmanager
def serving(engine, *, tokenizer=None, api_key=None):
    """Serve an engine on a free port of 127.0.0.1, in threads of this process."""
    codec = text_codec(tokenizer or byte_tokenizer())
    limits = engine.limits
    metrics = ServerMetrics(MODEL, limits.max_draft_tokens)
    worker = EngineThread(engine, lambda outputs: metrics.record_step_(engine, outputs))
    greedy_only = traits_of(engine.stages.verify).greedy_only
    counted = engine.state.token_counts.shape[1] > 0
    defaults = Defaults(limits, engine.target.model.vocab_size, greedy_only, counted)
    served = Served(MODEL, "folder/tiny", int(time.time()), defaults)
    app = create_app(served, worker, codec, metrics, api_key=api_key)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    client = openai.OpenAI(
        base_url=url + "/v1", api_key=api_key or "any", max_retries=0, timeout=60
    )
    try:
        yield Server(url, client, worker, codec, metrics)
    finally:
        client.close()
        server.should_exit = True
        thread.join(timeout=30)
        sock.close()
    assert not thread.is_alive()
    assert not worker.is_alive


def until(condition, seconds=20.0):
    """Wait for a condition, and fail if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.005)


def speaker(script=b"word ", **options):
    """An engine that repeats `script` after PROMPT, one token a step."""
    target = scripted_target(list(script), len(PROMPT))
    return tiny_engine(target, **({"max_model_len": 600, "eos": (END,)} | options))


def post(server, path="/v1/completions", headers=None, content=None, **fields):
    body = {"model": MODEL, "prompt": PROMPT} if path == "/v1/completions" else {"model": MODEL}
    content = json.dumps(body | fields) if content is None else content
    headers = {"content-type": "application/json"} | (headers or {})
    return HTTP.post(server.url + path, content=content, headers=headers)


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
