"""CUDA graphs: the one place that knows that a captured step has fixed storage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def graphed(
    fn: Callable[..., Tensor], example_args: tuple[Tensor, ...], pool: Any = None
) -> Callable[..., Tensor]:
    """`fn` captured once in a CUDA graph: same arguments, same result, one launch.

    What `fn` closes over (State, caches, parameters) is taken by identity: the graph reads and
    writes these tensors themselves. `fn` runs here on the example's values, so they must be ones
    whose effects are harmless.

    Args:
        fn: shapes and launches depend on nothing but the arguments' shapes; nothing waits.
        example_args: device tensors.
        pool: of `torch.cuda.graph_pool_handle`, shared by graphs that never run at once.

    Returns:
        A function of tensors of the same shapes on any device (pinned ones are not waited for). Its
        result is overwritten by the next call of any graph of the pool.
    """
    inputs = tuple(arg.clone() for arg in example_args)
    stream = _warm_up_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries load and kernels compile before the capture
        for _ in range(2):
            fn(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads of the process may use the device meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = fn(*inputs)

    def replay(*args: Tensor) -> Tensor:
        for given, fixed in zip(args, inputs, strict=True):
            fixed.copy_(given, non_blocking=True)
        graph.replay()
        return output

    return replay


@cache
def _warm_up_stream(device: int) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)
