"""The step's bookkeeping around its target, K = 3: each function, beside the torch ops it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.bench import Case
from specdec.kernels.step import kernel, reference

K, LONGEST, BLOCK_SIZE = 3, 512, 16
PREPARE = (
    "token_ids num_tokens num_computed_tokens finish_reason draft_token_ids draft_is_delta "
    "num_drafts seeds block_tables"
)
TRIM = "eos_token_ids ignore_eos max_len num_tokens num_computed_tokens num_drafts finish_reason"
UPDATE = (
    "token_ids max_len num_tokens num_computed_tokens finish_reason draft_token_ids draft_is_delta "
    "num_drafts"
)


def cases(device: torch.device) -> list[Case]:
    """1 and 64 requests in a verify round. The floor of these is a launch, not their bytes."""
    return [case for num_requests in (1, 64) for case in step(device, num_requests)]


def new_state(device: torch.device, num_slots: int) -> dict[str, Tensor]:
    """Requests with K drafts pending, somewhere in their output."""

    def ints(*shape: int, low: int = 0, high: int = 30000) -> Tensor:
        return torch.randint(low, high, shape, device=device)

    num_tokens = ints(num_slots, low=100, high=LONGEST - 50)
    columns = -(-(LONGEST + 2 * K + 1) // BLOCK_SIZE)
    return {
        "token_ids": ints(num_slots, LONGEST + K + 1),
        "num_tokens": num_tokens,
        "num_computed_tokens": num_tokens - 1,
        "finish_reason": torch.zeros_like(num_tokens),
        "draft_token_ids": ints(num_slots, K),
        "draft_is_delta": torch.ones(num_slots, K, dtype=torch.bool, device=device),
        "num_drafts": torch.full_like(num_tokens, K),
        "seeds": ints(num_slots),
        "block_tables": ints(num_slots, columns, low=1, high=9999),
        "max_len": torch.full_like(num_tokens, LONGEST),
        "ignore_eos": torch.zeros(num_slots, dtype=torch.bool, device=device),
        "eos_token_ids": torch.tensor([128001, 128009], device=device),
    }


class Example(NamedTuple):
    """A verify round of some requests, as the step's functions find it."""

    state: dict[str, Tensor]
    rows: Tensor  # [3, R]
    plan: dict[str, Any]  # keywords of `prepare_step`
    made: reference.StepRows
    verified: tuple[Tensor, ...]  # arguments of `trim`
    trimmed: dict[str, Any]  # and its keywords
    committed: reference.Committed

    def given(self, names: str) -> dict[str, Tensor]:
        return {name: self.state[name] for name in names.split()}


def example(device: torch.device, num_requests: int) -> Example:
    state = new_state(device, num_requests + 1)
    slots = torch.randperm(num_requests, device=device)
    width = torch.full_like(slots, K + 1)
    rows = torch.stack((slots, width, width))
    num_rows = num_requests * (K + 1)
    plan: dict[str, Any] = {"num_rows": num_rows, "num_logits": num_rows, "max_query_len": K + 1}
    plan |= {"block_size": BLOCK_SIZE} | {name: state[name] for name in PREPARE.split()}
    made = reference.prepare_step(rows, **plan)
    sampled = torch.randint(1, K + 2, (num_requests,), device=device)
    tokens = torch.randint(0, 30000, (num_requests, K + 1), device=device)
    verified = (tokens, torch.zeros_like(tokens), sampled - 1, sampled)
    trimmed = {"request_slots": slots, "query_start": made.query_start, "seq_lens": made.seq_lens}
    trimmed |= {name: state[name] for name in TRIM.split()}
    committed = reference.trim(*verified, **trimmed)
    return Example(state, rows, plan, made, verified, trimmed, committed)


def step(device: torch.device, num_requests: int) -> list[Case]:
    given = example(device, num_requests)
    made, sampled = given.made, given.verified[3]
    drafts = (made.draft_token_ids, made.draft_is_delta, made.num_drafts)
    update = {"request_slots": given.rows[0]} | given.given(UPDATE)
    calls: dict[str, tuple[tuple, dict[str, Any]]] = {
        "prepare_step": ((given.rows,), given.plan),
        "get_num_sampled_and_rejected": ((sampled - 1, made.num_drafts, made.cu_num_logits), {}),
        "trim": (given.verified, given.trimmed),
        "post_update_": ((given.committed, *drafts), update),
    }
    num_bytes = {"prepare_step": 2 * made.block_tables.nbytes}
    return [
        Case(
            f"{name}, {num_requests} requests",
            bound(getattr(kernel, name), *call),
            num_bytes.get(name, 0) + len(made.positions) * 8 * 4,  # about four integers a row
            bound(getattr(reference, name), *call),
        )
        for name, call in calls.items()
    ]


def bound(function: Any, args: tuple, keywords: dict[str, Any]) -> Any:
    return lambda: function(*args, **keywords)
