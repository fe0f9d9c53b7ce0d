"""Prometheus metrics under the names that existing dashboards and load tools read, and the
acceptance figures of one request."""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specdec.engine import Engine, Output, Round
from specdec.metrics import count_rounds, ratio

FINISH_REASONS = ("stop", "length", "abort", "error")
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5, 10, 20, 40, 80)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5)
REQUEST_BUCKETS = (0.1, 0.3, 0.6, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class ServerMetrics:
    """One server's metrics in a registry of their own; `record_*` may be called from any thread.

    Args:
        num_draft_tokens: K; the positions 0 to K - 1 are there from the start.
    """

    def __init__(self, model_name: str, num_draft_tokens: int):
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}

        def make(kind: Any, name: str, text: str, extra: Sequence[str] = (), **options: Any) -> Any:
            metric = kind(
                f"vllm:{name}", text, (*labels, *extra), registry=self.registry, **options
            )
            return metric if extra else metric.labels(**labels)

        def make_each(name: str, text: str, label: str, values: Sequence[Any]) -> dict[Any, Any]:
            metric = make(Counter, name, text, (label,))
            return {value: metric.labels(**labels, **{label: str(value)}) for value in values}

        self._rounds = make(Counter, "spec_decode_num_drafts", "Verify rounds.")
        self._drafted = make(Counter, "spec_decode_num_draft_tokens", "Drafts that were verified.")
        self._accepted = make(Counter, "spec_decode_num_accepted_tokens", "Drafts that were kept.")
        self._accepted_at = make_each(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were kept, by position.",
            "position",
            range(num_draft_tokens),
        )
        self._running = make(Gauge, "num_requests_running", "Requests that hold cache blocks.")
        self._waiting = make(Gauge, "num_requests_waiting", "Requests that wait for a slot.")
        self._cache = make(Gauge, "kv_cache_usage_perc", "Share of the cache blocks in use, 0-1.")
        self._prompt = make(Counter, "prompt_tokens", "Prompt tokens of requests that began.")
        self._generated = make(Counter, "generation_tokens", "Tokens that were delivered.")
        self._ended = make_each(
            "request_success", "Requests that ended, by reason.", "finished_reason", FINISH_REASONS
        )
        self._first_token = make(
            Histogram,
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = make(
            Histogram,
            "inter_token_latency_seconds",
            "Time a token after the first; a burst's time is shared by its tokens.",
            buckets=TOKEN_BUCKETS,
        )
        self._request = make(
            Histogram,
            "e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            buckets=REQUEST_BUCKETS,
        )

    def record_step_(self, engine: Engine, outputs: Sequence[Output]) -> None:
        """The state of the queues after a step, and what the step verified."""
        for output in outputs:
            if output.round is not None:
                self._rounds.inc()
                self._drafted.inc(output.round.drafted)
                self._accepted.inc(output.round.accepted)
                for position in range(output.round.accepted):
                    self._accepted_at[position].inc()
        self._running.set(len(engine.running))
        self._waiting.set(len(engine.waiting))
        self._cache.set(1 - len(engine.pool.free) / (engine.pool.num_blocks - 1))

    def record_first_token_(self, num_prompt_tokens: int, seconds: float) -> None:
        self._prompt.inc(num_prompt_tokens)
        self._first_token.observe(seconds)

    def record_tokens_(self, count: int, seconds: float | None) -> None:
        """Tokens delivered to a client.

        Args:
            seconds: since the request's tokens before them; None for its first.
        """
        self._generated.inc(count)
        if seconds is not None:
            for _ in range(count):
                self._inter_token.observe(seconds / count)

    def record_end_(self, finish_reason: str, seconds: float) -> None:
        self._ended[finish_reason].inc()
        self._request.observe(seconds)


def request_acceptance(rounds: Sequence[Round]) -> dict[str, Any]:
    """`metrics.speculative_decoding` of a response: its choices together, trimmed as delivered.

    `acceptance_histogram[a]` is the number of rounds that kept exactly `a` drafts. Quotients
    without a denominator are None.
    """
    counts = count_rounds(rounds)
    kept = ratio(counts.accepted, counts.rounds)
    at_least = [counts.rounds, *map(int, counts.accepted_at), 0]
    return {
        "mean_acceptance_length": None if kept is None else 1 + kept,
        "draft_acceptance_rate": ratio(counts.accepted, counts.drafted),
        "acceptance_histogram": [at_least[a] - at_least[a + 1] for a in range(len(at_least) - 1)],
        "num_spec_steps": counts.rounds,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.drafted,
    }
