"""The step's bookkeeping around its models, K = 3: each function, beside the torch ops it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.kernels.bench import Case
from specdec.kernels.step import kernel, reference

K, LONGEST, BLOCK_SIZE = 3, 512, 16


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


def step(device: torch.device, num_requests: int) -> list[Case]:
    state = new_state(device, num_requests + 1)
    slots = torch.randperm(num_requests, device=device)
    width = torch.full_like(slots, K + 1)
    rows = torch.stack((slots, width, width))

    def given(names: str) -> dict[str, Tensor]:
        return {name: state[name] for name in names.split()}

    num_rows = num_requests * (K + 1)
    plan: dict[str, Any] = {"num_rows": num_rows, "num_logits": num_rows, "max_query_len": K + 1}
    plan |= {"block_size": BLOCK_SIZE}
    plan |= given(
        "token_ids num_tokens num_computed_tokens finish_reason draft_token_ids draft_is_delta "
        "num_drafts seeds block_tables"
    )
    made = reference.prepare_step(rows, **plan)
    about = {"request_slots": slots, "query_start": made.query_start}
    sampled = torch.randint(1, K + 2, (num_requests,), device=device)
    tokens = torch.randint(0, 30000, (num_requests, K + 1), device=device)
    verified = (tokens, torch.zeros_like(tokens), sampled - 1, sampled)
    trimmed = about | {"seq_lens": made.seq_lens}
    trimmed |= given(
        "eos_token_ids ignore_eos max_len num_tokens num_computed_tokens num_drafts finish_reason"
    )
    committed = reference.trim(*verified, **trimmed)
    inputs = about | {"positions": made.positions, "max_query_len": K + 1}
    inputs |= given("token_ids num_tokens")
    drafts = (made.draft_token_ids, made.draft_is_delta, made.num_drafts)
    update = {"request_slots": slots} | given(
        "token_ids max_len num_tokens num_computed_tokens finish_reason draft_token_ids "
        "draft_is_delta num_drafts"
    )
    chain = {"num_draft_tokens": K, "num_depths": 1, "block_size": BLOCK_SIZE}
    last = made.positions[:: K + 1].contiguous()
    calls: dict[str, tuple[tuple, dict[str, Any]]] = {
        "prepare_step": ((rows,), plan),
        "get_num_sampled_and_rejected": ((sampled - 1, made.num_drafts, made.cu_num_logits), {}),
        "trim": (verified, trimmed),
        "post_update_": ((committed, *drafts), update),
        "prepare_eagle_inputs": ((committed,), inputs),
        "prepare_eagle_decode": ((last, made.block_tables), chain),
    }
    tables = made.block_tables.nbytes
    num_bytes = {"prepare_step": 2 * tables, "prepare_eagle_decode": 0}
    return [
        Case(
            f"{name}, {num_requests} requests",
            bound(getattr(kernel, name), *call),
            num_bytes.get(name, 0) + num_rows * 8 * 4,  # about four integers a row
            bound(getattr(reference, name), *call),
        )
        for name, call in calls.items()
    ]


def bound(function: Any, args: tuple, keywords: dict[str, Any]) -> Any:
    return lambda: function(*args, **keywords)
