"""DeltaNet at the shape of Qwen3-Next-80B-A3B: K = 3 windows, prefill chunks, the gated norm."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.bench import Case
from specdec.kernels.gated_delta import kernel, reference

KEY_HEADS, HEADS, DIM, WIDTH, WINDOW = 16, 32, 128, 4, 4
CHANNELS = 2 * KEY_HEADS * DIM + HEADS * DIM
INPUTS = CHANNELS + 2 * HEADS
ROTATION = 200_000_000  # bytes of states that a case goes through before it meets one again
LAYERS = 36  # of the model; no more copies than a step has


class Layer(NamedTuple):
    """One layer's weights and slots."""

    conv: Tensor
    decay_log: Tensor
    step_bias: Tensor
    states: Tensor
    stored: Tensor


def cases(device: torch.device) -> list[Case]:
    """Windows whose drafts were all accepted (three rows to fold) or all refused, and chunks."""
    windows = [window(device, r, count) for r in (1, 8, 64) for count in (0, WINDOW - 1)]
    chunks = [prefill(device, *sizes) for sizes in ((1, 512), (1, 4096), (8, 512))]
    return [*windows, *chunks, *(norm(device, rows) for rows in (4, 256))]


def layers(device: torch.device, num_slots: int) -> list[Layer]:
    size = num_slots * HEADS * DIM * DIM * 4
    copies = max(1, min(LAYERS, -(-ROTATION // size)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    return [
        Layer(
            conv=normal(CHANNELS, WIDTH).bfloat16(),
            decay_log=normal(HEADS) - 2,
            step_bias=normal(HEADS).bfloat16(),
            states=normal(num_slots, HEADS, DIM, DIM),
            stored=normal(num_slots, WIDTH - 1 + WINDOW - 1, INPUTS).bfloat16(),
        )
        for _ in range(copies)
    ]


def step(
    device: torch.device, num_requests: int, num_rows: int, count: int
) -> tuple[list[Layer], Tensor, Callable[[Layer], Tensor]]:
    """Layers, inputs, and the kernel over requests of `num_rows` rows with `count` to fold."""
    slots = torch.arange(num_requests, device=device)
    query_start = torch.arange(num_requests + 1, device=device) * num_rows
    plan = kernel.plan_windows_(
        torch.full((num_requests,), 100 - count, device=device),
        positions=(100 + torch.arange(num_rows, device=device)).repeat(num_requests),
        query_start=query_start,
        row_valid=torch.ones(num_requests * num_rows, dtype=torch.bool, device=device),
        request_slots=slots,
        window=WINDOW,
        num_key_heads=KEY_HEADS,
    )
    projected = torch.randn(num_requests * num_rows, INPUTS + HEADS * DIM, device=device)
    inputs = projected.bfloat16()[:, :INPUTS]  # as the layer's product leaves them

    def run(layer: Layer) -> Tensor:
        return kernel.delta_step_(
            inputs,
            *layer,
            plan,
            query_start=query_start,
            request_slots=slots,
            num_key_heads=KEY_HEADS,
            key_dim=DIM,
            max_query_len=num_rows,
        )

    return layers(device, num_requests), inputs, run


def window(device: torch.device, num_requests: int, count: int) -> Case:
    slots, inputs, run = step(device, num_requests, WINDOW, count)
    layer = slots[0]
    kept = num_requests * (layer.stored.shape[1] + WIDTH - 1 + count) * INPUTS * 2
    num_bytes = 2 * layer.states.nbytes + kept + len(inputs) * (INPUTS + HEADS * DIM) * 2
    name = f"{num_requests} requests, {WINDOW} rows, {count} folded"
    return Case(name, in_turn(run, slots), num_bytes, in_turn(by_torch(inputs, count), slots))


def prefill(device: torch.device, num_requests: int, num_rows: int) -> Case:
    slots, inputs, run = step(device, num_requests, num_rows, 0)
    num_bytes = 2 * slots[0].states.nbytes + len(inputs) * (INPUTS + HEADS * DIM) * 2
    name = f"{num_requests} requests, {num_rows} rows of prompt"
    return Case(name, in_turn(run, slots), num_bytes, in_turn(by_torch(inputs, 0), slots))


def by_torch(inputs: Tensor, count: int) -> Callable[[Layer], tuple[Tensor, Tensor]]:
    """The same rows through the rule's torch functions, stored rows left as they are."""

    def run(layer: Layer) -> tuple[Tensor, Tensor]:
        rows = inputs.view(len(layer.states), -1, INPUTS)
        text = torch.cat((layer.stored[:, : WIDTH - 1 + count], rows), dim=1)
        mixed = reference.causal_conv(text[..., :CHANNELS], layer.conv)
        sizes = [KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM]
        query, key, value = (part.unflatten(-1, (-1, DIM)) for part in mixed.split(sizes, dim=-1))
        strength, soft = text[:, WIDTH - 1 :, CHANNELS:].split(HEADS, dim=-1)
        decay = -layer.decay_log.exp() * F.softplus(soft.float() + layer.step_bias.float())
        short = rows.shape[1] <= WINDOW
        rule = reference.gated_delta if short else reference.gated_delta_chunked
        return rule(query, key, value, decay, strength.sigmoid(), layer.states)

    return run


def norm(device: torch.device, num_rows: int) -> Case:
    x = torch.randn(num_rows, HEADS, DIM, device=device).bfloat16()
    gate = torch.randn(num_rows, INPUTS + HEADS * DIM, device=device).bfloat16()[:, INPUTS:]
    args = (x, gate.unflatten(-1, (-1, DIM)), torch.ones(DIM, device=device).bfloat16(), 1e-6)
    return Case(
        f"gated norm, {num_rows} rows",
        lambda: kernel.gated_norm(*args),
        3 * x.nbytes,
        lambda: reference.gated_norm(*args),
    )


def in_turn(run: Callable[[Layer], object], slots: list[Layer]) -> Callable[[], object]:
    turns = cycle(slots)
    return lambda: run(next(turns))
