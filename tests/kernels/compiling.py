"""Compiles kernels for sm_90 without a GPU, away from the interpreter of the test process.

    from compiling import Compile, compile_sm90
    [result] = compile_sm90([Compile("specdec.kernels.x.kernel", "_x", {"x": "*bf16"}, {"N": 8})])

All kernels of a file go into one call: it starts one subprocess, which imports triton once.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAX_SHARED = 227 * 1024  # bytes that one program may have on sm_90


class Compile(NamedTuple):
    """One kernel at one set of types and constants."""

    module: str  # as "specdec.kernels.paged_attention.kernel"
    kernel: str  # name of the jitted function there
    signature: dict[str, str]  # run-time argument -> "*bf16", "*i64", "i32", "fp32"..
    constants: dict[str, Any]  # the constexpr arguments
    num_warps: int = 4
    num_stages: int = 3


class Compiled(NamedTuple):
    """What one program takes of the chip."""

    shared: int  # bytes
    registers: int  # a thread
    spilled: int  # bytes a thread on the stack; 0 when nothing is spilled
    ptx: str


def compile_sm90(compiles: Sequence[Compile]) -> list[Compiled]:
    """Compiles to machine code, in one subprocess; raises AssertionError with the first error.

    Pointers are taken as 16-byte aligned, as torch allocates them.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__],
        input=pickle.dumps([tuple(item) for item in compiles]),
        capture_output=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    results = [Compiled(*item) for item in pickle.loads(done.stdout)]
    for item, result in zip(compiles, results, strict=True):
        assert result.shared <= MAX_SHARED, (item.kernel, item.constants, result.shared)
    return results


def _compile(item: Compile) -> Compiled:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(item.module), item.kernel)
    known = {**item.signature, **dict.fromkeys(item.constants, "constexpr")}
    assert set(known) == set(function.arg_names), (
        f"{item.kernel}: arguments differ: {set(known) ^ set(function.arg_names)}"
    )
    signature = {name: known[name] for name in function.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(function, signature, item.constants, aligned)
    options = {"num_warps": item.num_warps, "num_stages": item.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return Compiled(kernel.metadata.shared, *_resources(kernel.asm["cubin"]), kernel.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, read from the machine code."""
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return -1, -1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


if __name__ == "__main__":
    items = [Compile(*item) for item in pickle.load(sys.stdin.buffer)]
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints is not part of the answer
    answer.write(pickle.dumps([tuple(_compile(item)) for item in items]))
    answer.flush()
