"""What ops run on: plain torch, which defines them, or the Triton kernels of this project."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

BACKENDS = ("torch", "triton")
_selected: ContextVar[str] = ContextVar("kernels", default="torch")


def interpreting() -> bool:
    """Triton's interpreter stands in for a GPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def has_triton(device: torch.device | str) -> bool:
    """Whether kernels can run on tensors of this device."""
    return torch.device(device).type == "cuda" or interpreting()


def uses_triton() -> bool:
    """Whether an op that has a kernel should run it here and now (`using`)."""
    return _selected.get() == "triton"


@contextmanager
def using(kernels: str) -> Generator[None]:
    """Ops inside run on "torch" or "triton". Training runs on torch: kernels have no gradients."""
    if kernels not in BACKENDS:
        raise ValueError(f"kernels={kernels!r} is not one of {', '.join(BACKENDS)}")
    token = _selected.set(kernels)
    try:
        yield
    finally:
        _selected.reset(token)
