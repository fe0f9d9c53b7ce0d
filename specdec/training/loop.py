"""The frame of a training run: its limits, and its loop over optimiser steps."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from omegaconf import DictConfig
from torch import Tensor

from specdec.errors import ConfigError
from specdec.training.checkpoint import Progress, Weights
from specdec.training.data import TokenData
from specdec.training.optimizer import clip_, set_lr_, update_average_
from specdec.training.packing import Cursor, Row, epoch_rows
from specdec.training.timing import Phases

FOREVER = 1_000_000  # epochs, where another limit ends the run


class Budget(NamedTuple):
    """Limits of a run; None does not limit."""

    epochs: int
    max_steps: int | None
    max_tokens: int | None
    max_seconds: float | None
    stop_after_steps: int | None

    @classmethod
    def of(
        cls, cfg: DictConfig, data: TokenData, *, row_tokens: int, accumulation: int, seed: int
    ) -> "Budget":
        """Epochs become steps: ceil(rows / accumulation) each.

        Raises:
            ConfigError: nothing ends the run.
        """
        limits = [cfg.epochs, cfg.max_steps, cfg.max_tokens, cfg.max_seconds]
        if all(limit is None for limit in limits):
            raise ConfigError("nothing ends this run; set budget.max_tokens, max_steps or epochs")
        steps = cfg.max_steps
        if cfg.epochs is not None:
            per_epoch = [
                -(-len(epoch_rows(data, row_tokens=row_tokens, seed=seed, epoch=e)) // accumulation)
                for e in range(cfg.epochs)
            ]
            steps = min(sum(per_epoch), steps or sum(per_epoch))
        epochs = FOREVER if cfg.epochs is None else cfg.epochs
        return cls(epochs, steps, cfg.max_tokens, cfg.max_seconds, cfg.stop_after_steps)

    def share(self, done: Progress) -> float:
        """Share of the run that is done: of whichever limit is nearest."""
        pairs = (
            (done.step, self.max_steps),
            (done.tokens, self.max_tokens),
            (done.seconds, self.max_seconds),
        )
        return max(value / limit for value, limit in pairs if limit)

    def leaves(self, step: int) -> bool:
        return self.stop_after_steps is not None and step >= self.stop_after_steps


class Every(NamedTuple):
    """Steps between two reports, evaluations and saved states; None or 0: none inside the loop.

    The first step of a session is reported too.
    """

    report: int
    evaluate: int | None
    save: int | None


def train_(
    done: Progress,
    windows: Iterator[tuple[Cursor, list[Row]]],
    weights: Weights,
    *,
    budget: Budget,
    every: Every,
    lr_factor: Callable[[float], float],
    clip_norm: float,
    average_decay: float,
    gradients: Callable[[list[Row]], None],
    report: Callable[[Progress, Tensor], None],
    evaluate: Callable[[Progress], Progress],
    save: Callable[[Progress], None],
    advance: Callable[[str], None],
    phases: Phases,
) -> Progress:
    """Take optimiser steps until the budget is spent, or its `stop_after_steps` is reached.

    Args:
        done: where the run is; `windows` begins there.
        gradients: leaves the gradients of a step's rows in the parameters.
        report: told the gradients' norm before clipping too; also called after the last step.
        evaluate: gives the progress back, with the checkpoint that it chose.
        advance: called for each hundredth of the run, with words for a progress bar.

    Returns:
        How far the run is now.
    """
    trained = {name: p for name, p in weights.params.items() if p.requires_grad}
    began, earlier = time.perf_counter(), done.seconds
    first = done.step + 1  # reported, so that a loss and a rate are seen early
    reported, shown = done.step, 0
    while (share := budget.share(done)) < 1 and not budget.leaves(done.step):
        cursor, rows = next(windows)
        set_lr_(weights.optimizers, lr_factor(share))
        gradients(rows)
        norm = clip_(trained, clip_norm)
        for optimizer in weights.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = done._replace(
            step=done.step + 1,
            cursor=cursor,
            tokens=done.tokens + sum(row.num_tokens for row in rows),
            seconds=earlier + time.perf_counter() - began,
        )
        update_average_(weights.average, weights.params, done.step, average_decay)
        phases.mark_("optimizer")
        if done.step == first or done.step % every.report == 0:
            report(done, norm)
            reported = done.step
        if every.evaluate and done.step % every.evaluate == 0:
            done = evaluate(done)
        if every.save and done.step % every.save == 0:
            save(done)
        phases.mark_(None)
        while shown < int(100 * budget.share(done)) and shown < 100:
            shown += 1
            advance(f"step {done.step}")
    if done.step > reported:
        report(done, norm)
    return done
