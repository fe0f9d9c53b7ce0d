"""The products of the Llama-3.1-8B shape with fp8 weights, against bf16 ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
import torch.nn.functional as F

from specdec.kernels.bench import Case
from specdec.kernels.fp8_linear.kernel import fp8_linear

SHAPES = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
ROTATED_BYTES = 256 * 2**20  # of weights, so that none is still in the second-level cache


def cases(device: torch.device) -> list[Case]:
    return [_case(name, *shape, rows, device) for name, shape in SHAPES.items() for rows in (1, 4)]


def _case(name: str, outputs: int, size: int, rows: int, device: torch.device) -> Case:
    copies = max(2, ROTATED_BYTES // (outputs * size))
    x = torch.randn(rows, size, device=device, dtype=torch.bfloat16)
    plain = [torch.randn(outputs, size, device=device, dtype=torch.bfloat16) for _ in range(copies)]
    quantised = [weight.to(torch.float8_e4m3fn) for weight in plain]
    scale = torch.rand(-(-outputs // 128), -(-size // 128), device=device) + 0.5

    def rotating(run: Callable[[int], object]) -> Callable[[], object]:
        turn = count()
        return lambda: run(next(turn) % copies)

    return Case(
        name=f"{name} {outputs}x{size}, {rows} rows",
        run=rotating(lambda i: fp8_linear(x, quantised[i], scale)),
        num_bytes=outputs * size + 2 * rows * (outputs + size),
        baseline=rotating(lambda i: F.linear(x, plain[i])),
    )
