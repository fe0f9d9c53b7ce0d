"""A draft head's rows, K = 3: each function, beside the torch ops it was."""

from __future__ import annotations

from typing import Any

import torch

from specdec.kernels.bench import Case
from specdec.kernels.draft_rows import kernel, reference
from specdec.kernels.step.bench import BLOCK_SIZE, K, bound, example


def cases(device: torch.device) -> list[Case]:
    """1 and 64 requests in a verify round. The floor of these is a launch, not their bytes."""
    made = []
    for num_requests in (1, 64):
        given = example(device, num_requests)
        step = given.made
        inputs: dict[str, Any] = {"positions": step.positions, "query_start": step.query_start}
        inputs |= {"request_slots": given.rows[0], "max_query_len": K + 1}
        inputs |= given.given("token_ids num_tokens")
        last = step.positions[:: K + 1].contiguous()
        chain = {"num_draft_tokens": K, "num_depths": 1, "block_size": BLOCK_SIZE}
        calls: dict[str, tuple[tuple, dict[str, Any]]] = {
            "prepare_eagle_inputs": ((given.committed,), inputs),
            "prepare_eagle_decode": ((last, step.block_tables), chain),
        }
        made += [
            Case(
                f"{name}, {num_requests} requests",
                bound(getattr(kernel, name), *call),
                len(step.positions) * 8 * 4,  # about four integers a row
                bound(getattr(reference, name), *call),
            )
            for name, call in calls.items()
        ]
    return made
