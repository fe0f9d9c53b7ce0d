"""What the Triton kernels of this project run on."""

import os

import torch


def interpreting() -> bool:
    """Triton's interpreter stands in for a GPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def has_triton(device: torch.device | str) -> bool:
    """Whether kernels can run on tensors of this device."""
    return torch.device(device).type == "cuda" or interpreting()
