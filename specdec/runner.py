"""Plans on the device: a step's functions called one after the other, or replayed as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.graph import graphed
from specdec.kernels.runtime import using
from specdec.models.batch import Draft, Target
from specdec.padding import buckets, pad, plans
from specdec.schedule import Limits
from specdec.state import Plan, State, apply_plan_, upload
from specdec.step import Model, Stages, StepShape, decode_step, plan_rows, step_shape


class Kind(NamedTuple):
    """What the host knows of a step's requests, as a Plan says it; each kind has its own graphs."""

    all_greedy: bool
    filters: bool = False
    penalties: bool = False


class Outcome(NamedTuple):
    """What a launched step gives, as `decode_step` packs it; there once `done` has happened."""

    packed: Tensor  # on the host
    done: torch.cuda.Event | None

    def read(self) -> list[list[int]]:
        if self.done is not None:
            self.done.synchronize()
        return self.packed.tolist()


class Runner:
    """Holds what a step's functions read and write, and launches them.

    Args:
        kernels: "torch" or "triton".
        graphs: run every step as one CUDA graph, padded to a few shapes. A shape's first step
            captures it, unless `warm_up` did.

    Raises:
        ConfigError: graphs cannot be captured.
    """

    def __init__(
        self,
        state: State,
        target: Model[Target],
        draft: Model[Draft] | None,
        stages: Stages,
        limits: Limits,
        *,
        kernels: str = "torch",
        graphs: bool = False,
    ):
        self.device = state.token_ids.device
        if graphs and (kernels != "triton" or self.device.type != "cuda"):
            raise ConfigError(
                f"CUDA graphs need kernels=triton on a GPU, not kernels={kernels} on "
                f"{self.device.type}; set kernels.graphs=false"
            )
        self.state, self.target, self.draft, self.stages = state, target, draft, stages
        self.limits, self.kernels, self.graphs = limits, kernels, graphs
        self.buckets = buckets(limits)
        self.steps: dict[StepShape, Callable[[Tensor], Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def launch_(self, plan: Plan) -> Outcome:
        """Write a plan into State and start its step."""
        with using(self.kernels):
            apply_plan_(self.state, plan)
            padded = pad(plan, self.limits, self.buckets) if self.graphs else plan
            packed = self._run_(step_shape(padded), plan_rows(padded))
        if self.device.type != "cuda":
            return Outcome(packed, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Outcome(host, done)

    @property
    def num_shapes(self) -> int:
        """Padded shapes; 0 when steps are not graphs."""
        return len(list(plans(self.limits, self.buckets))) if self.graphs else 0

    @torch.inference_mode()
    def warm_up(
        self,
        kinds: Sequence[Kind] | None = None,
        on_shape: Callable[[], object] = lambda: None,
    ) -> None:
        """Capture the graphs of every padded shape, the largest first.

        Args:
            kinds: that steps will have; None: greedy, sampled and filtered ones, and all of them
                with penalties in an engine that counts tokens.
            on_shape: called after each shape.
        """
        if kinds is None:
            penalties = (False, True) if self.state.token_counts.shape[1] else (False,)
            draws = ((True, False), (False, False), (False, True))  # all_greedy and filters
            kinds = [Kind(*draw, penalties=p) for p in penalties for draw in draws]
        for plan in plans(self.limits, self.buckets) if self.graphs else ():
            for kind in kinds:
                example = replace(plan, **kind._asdict())
                with using(self.kernels):
                    self._run_(step_shape(example), plan_rows(example))
            on_shape()

    def _run_(self, shape: StepShape, rows: Tensor) -> Tensor:
        def step(rows: Tensor) -> Tensor:
            return decode_step(
                self.state,
                rows,
                shape,
                self.target,
                self.draft,
                self.stages,
                self.limits.block_size,
            )

        if not self.graphs:
            return step(upload(rows, self.device))
        if shape not in self.steps:
            # the example's requests are padding: they write nothing that is ever read
            example = torch.cat((torch.full_like(rows[:1], self.limits.num_slots - 1), rows[1:]))
            self.steps[shape] = graphed(step, (example.to(self.device),), self._pool)
        return self.steps[shape](rows.pin_memory() if self.device.type == "cuda" else rows)
