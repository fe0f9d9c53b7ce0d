"""What the machine offers: device, dtype, threads, memory."""

import os
import platform
import statistics
import time
from functools import lru_cache
from pathlib import Path

import torch

from specdec.errors import ConfigError
from specdec.kernels.runtime import has_triton
from specdec.models.batch import CacheShape, Draft, Target
from specdec.models.layers import tree_leaves

CACHE_SHARE = 0.5  # of the memory that is free when the cache is made
FAST_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def pick_device(name: str) -> torch.device:
    """auto is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name} is unknown; use auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} is not there; use device=cpu or auto")
    return _without_cudnn_attention(device)


def _without_cudnn_attention(device: torch.device) -> torch.device:
    """cuDNN plans its attention anew for every shape, and a ragged batch has a new one each step
    (measured: 100 ms a step)."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto is bfloat16 where it is fast: on CUDA and on CPUs with avx512_bf16 or amx."""
    if name != "auto":
        return getattr(torch, name)
    fast = device.type == "cuda" or cpu_has_fast_bf16()
    return torch.bfloat16 if fast else torch.float32


def pick_kernels(name: str, device: torch.device) -> str:
    """auto is Triton on a GPU and torch elsewhere."""
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name == "triton" and not has_triton(device):
        raise ConfigError(f"kernels=triton needs a GPU, not device={device}; use kernels=torch")
    return name


@lru_cache(maxsize=1)
def cpu_has_fast_bf16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    lines = cpuinfo.read_text(errors="replace").splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not FAST_BF16_FLAGS.isdisjoint(flags.split())


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    name = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    return f"cpu ({name.strip() or platform.machine()})"


def use_threads(num_threads: int | None, target: Target) -> int:
    """Set torch's threads on the CPU: as asked, as OMP_NUM_THREADS says, or by a quick trial."""
    if target.embed.device.type == "cpu":
        told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if num_threads is None and told.isdigit():
            num_threads = int(told)
        # Set in any case: an earlier job of this process may have asked for another number.
        torch.set_num_threads(
            num_threads or _faster_threads(target.lm_head.dtype, target.lm_head.shape[1])
        )
    return torch.get_num_threads()


@lru_cache(maxsize=4)
def _faster_threads(dtype: torch.dtype, width: int) -> int:
    """One or all, whichever runs a decoder-like chain of small products faster just now.

    On a busy machine several threads can be many times slower than one, since each product waits
    for the last of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not cores or cores == 1:
        return 1
    seconds: dict[int, list[float]] = {1: [], cores: []}
    rows = torch.full((4, width), 0.01, dtype=dtype)
    up = torch.full((4 * width, width), 0.01, dtype=dtype)
    down = torch.full((width, 4 * width), 0.01, dtype=dtype)
    for _ in range(4):
        for threads, taken in seconds.items():
            torch.set_num_threads(threads)
            began = time.perf_counter()
            for _ in range(30):
                torch.nn.functional.linear(torch.nn.functional.linear(rows, up), down)
            taken.append(time.perf_counter() - began)
    return min(seconds, key=lambda threads: statistics.median(seconds[threads][1:]))


def blocks_that_fit(
    target: Target, draft: Draft | None, shape: CacheShape, device: torch.device
) -> int:
    """Cache blocks that half of the free memory holds, beside what the caches keep a slot.

    The shape's own number of blocks is not looked at.
    """
    models = [m for m in (target, draft) if m is not None]

    def size(num_blocks: int, num_slots: int) -> int:
        asked = shape._replace(num_blocks=num_blocks, num_slots=num_slots)
        tensors = tree_leaves(tuple(model.new_cache(asked) for model in models))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    one = size(1, 1)
    a_block, a_slot = size(2, 1) - one, size(1, 2) - one
    room = CACHE_SHARE * free_memory(device) - a_slot * shape.num_slots
    return max(0, int(room / a_block))


def free_memory(device: torch.device) -> int:
    """Free bytes on the device, with those that torch holds and does not use."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * 2**30
