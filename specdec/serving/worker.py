"""The engine's own thread: requests and aborts come in through an inbox, outputs go to sinks."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from specdec.engine import Engine, Output
from specdec.errors import RequestError
from specdec.schedule import Request

log = logging.getLogger(__name__)


class Failure(NamedTuple):
    """A request that ends without a result. `refused` is the engine's line about a bad request;
    None stands for a fault of the server's own, which is in its log and nobody else's business."""

    refused: str | None = None


Event = Output | Failure
Sink = Callable[[Event], None]  # called on the engine's thread; it must not block


class EngineThread:
    """Runs an engine; `submit`, `abort` and `stop` may be called from any thread.

    A step that raises ends the requests that were running with a `Failure`; the thread goes on.

    Args:
        on_step: called on the engine's thread after each step and each abort.
    """

    def __init__(self, engine: Engine, on_step: Callable[[Sequence[Output]], None] | None = None):
        self.engine = engine
        self._on_step = on_step or (lambda outputs: None)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets = itertools.count()
        self._open: dict[int, tuple[int, Sink]] = {}  # engine's request id -> ticket, sink
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, request: Request, sink: Sink) -> int:
        """Queue a request; its events go to `sink` until one ends it. Returns its ticket."""
        ticket = next(self._tickets)
        self._inbox.put(partial(self._add_, ticket, request, sink))
        return ticket

    def abort(self, ticket: int) -> None:
        """Drop a request before the next step; its sink hears nothing more."""
        self._inbox.put(partial(self._abort_, ticket))

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after its current step; requests still running are dropped."""
        self._inbox.put(self._stop_)
        if self.is_alive:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping:
            self._take_inbox_()
            if self.engine.has_unfinished and not self._stopping:
                self._step_()

    def _take_inbox_(self) -> None:
        """Do what is in the inbox; wait for something where there is nothing to run."""
        while not self._stopping:
            try:
                call = self._inbox.get(block=not self.engine.has_unfinished)
            except queue.Empty:
                return
            call()

    def _add_(self, ticket: int, request: Request, sink: Sink) -> None:
        try:
            request_id = self.engine.add(request)
        except RequestError as error:
            self._send(sink, Failure(str(error)))
        except Exception:
            log.exception("a request could not be queued")
            self._send(sink, Failure())
        else:
            self._open[request_id] = ticket, sink

    def _abort_(self, ticket: int) -> None:
        for request_id in [i for i, (t, _) in self._open.items() if t == ticket]:
            self.engine.abort(request_id)
            del self._open[request_id]
        self._on_step(())

    def _stop_(self) -> None:
        self._stopping = True

    def _step_(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception:
            log.exception("a step failed; its requests end with an error")
            self._fail_step_()
            outputs = []
        for output in outputs:
            _, sink = self._open[output.request_id]
            if output.finish_reason:
                del self._open[output.request_id]
            self._send(sink, output)
        self._on_step(outputs)

    def _fail_step_(self) -> None:
        """End what was running; if nothing was, what waits, or the fault would repeat for ever."""
        sequences = list(self.engine.running) or list(self.engine.waiting)
        for request_id in [s.request_id for s in sequences]:
            self.engine.abort(request_id)
            _, sink = self._open.pop(request_id)
            self._send(sink, Failure())

    def _send(self, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except Exception:
            log.exception("an output could not be handed over")
