"""Compiles kernels for sm_90 without a GPU, away from the interpreter of the test process.

    from compiling import Compile, compile_sm90
    [result] = compile_sm90([Compile("specdec.kernels.x.kernel", "_x", {"x": "*bf16"}, {"N": 8})])

The first call of a test process starts a compiling process, which imports triton once and serves
every later call. It ends when the test process does.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

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
    """Compiles to machine code, in another process; raises AssertionError with the first error.

    Pointers are taken as 16-byte aligned, as torch allocates them.
    """
    server, errors = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        pickle.dump([tuple(item) for item in compiles], server.stdin)
        server.stdin.flush()
        answer = pickle.load(server.stdout)
    except (EOFError, OSError):  # the compiler took its process down
        _server.cache_clear()
        errors.seek(0)
        answer = f"exit status {server.wait()}: {errors.read().decode()[-4000:]}"
    assert not isinstance(answer, str), answer
    results = [Compiled(*item) for item in answer]
    for item, result in zip(compiles, results, strict=True):
        assert result.shared <= MAX_SHARED, (item.kernel, item.constants, result.shared)
    return results


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """The compiling process and what it writes to stderr."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process runs
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environment)
    atexit.register(server.communicate)  # closes its pipe and waits
    return server, errors


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


def _serve() -> None:
    """Answers each list of kernels with their results, or with the first error's text."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints is not part of the answer
    while True:
        try:
            items = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: object = [tuple(_compile(Compile(*item))) for item in items]
        except Exception:
            answer = traceback.format_exc()[-4000:]
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
