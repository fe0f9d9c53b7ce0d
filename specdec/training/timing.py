"""Where a training step's time goes, without waiting for the device inside the step."""

import time
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch


class Phases:
    """Seconds by phase: `mark_(name)` ends a phase that began at the mark before it.

    On a GPU the marks are events on the stream, read when `take_` is called, so that a phase's time
    is the device's own, its idle time included.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str | None, Any]] = []
        self.mark_(None)

    def mark_(self, name: str | None) -> None:
        """End the phase `name`; None ends one that is not counted."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def take_(self) -> dict[str, float]:
        """Seconds of each phase since the last call. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (_, began), (name, ended) in pairwise(self._marks):
            if name is not None:
                seconds[name] += began.elapsed_time(ended) / 1e3 if self._cuda else ended - began
        del self._marks[:-1]
        return dict(seconds)
