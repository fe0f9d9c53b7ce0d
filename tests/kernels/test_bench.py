"""The kernels' bench: what it finds, what it computes, what it says without a GPU."""

import importlib
import json
import sys
import types

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels import bench
from specdec.kernels.bench import Case


def test_a_row():
    case = Case("64 rows", lambda: None, num_bytes=8_000_000)
    row = bench.timing("op", case, [4e-6, 9e-6], bandwidth=4e12)
    assert row.microseconds == pytest.approx(4.0)
    assert row.floor_microseconds == pytest.approx(2.0)
    assert row.fraction == pytest.approx(0.5)
    assert row.baseline_microseconds == pytest.approx(9.0)
    assert bench.timing("op", case, [4e-6], bandwidth=4e12).baseline_microseconds is None
    printed = bench.line(row)
    assert printed.split() == ["op", "64", "rows", "4.00", "8.00", "2.00", "0.50", "9.00"]
    assert len(printed) == len(bench.HEADER)


def test_ops_are_folders_with_a_bench(tmp_path, monkeypatch):
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
    for name in ("b", "a"):
        (tmp_path / name / "bench.py").touch()
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.ops() == ["a", "b"]


@pytest.mark.parametrize("op", bench.ops())
def test_every_bench_has_cases(op):
    assert callable(importlib.import_module(f"specdec.kernels.{op}.bench").cases)


def test_every_case_is_timed(monkeypatch):
    cases = [Case("one", lambda: 1, 100), Case("two", lambda: 2, 200, lambda: 3)]
    module = types.ModuleType("bench")
    module.cases = lambda device: cases
    monkeypatch.setitem(sys.modules, "specdec.kernels.fake.bench", module)
    monkeypatch.setitem(sys.modules, "specdec.kernels.fake", types.ModuleType("fake"))
    seen = []
    rows = list(bench.timings("fake", 1e9, lambda case: seen.append(case) or [1e-6]))
    assert seen == cases
    assert [(row.case, row.num_bytes) for row in rows] == [("one", 100), ("two", 200)]


def test_a_case_that_fails_does_not_stop_the_others(monkeypatch):
    def measure(case):
        if case.name == "bad":
            raise RuntimeError("out of\nmemory")
        return [1e-6]

    module = types.ModuleType("bench")
    module.cases = lambda device: [Case(name, lambda: 0, 100) for name in ("bad", "good")]
    monkeypatch.setitem(sys.modules, "specdec.kernels.fake.bench", module)
    monkeypatch.setitem(sys.modules, "specdec.kernels.fake", types.ModuleType("fake"))
    failure, row = bench.timings("fake", 1e9, measure)
    assert failure == "fake, bad: RuntimeError: out of memory"
    assert row.case == "good"


def test_one_line_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 1
    said = capsys.readouterr().err
    assert "GPU" in said
    assert said.count("\n") == 1


def test_an_unknown_op_is_named(capsys):
    assert bench.main(["no_such_op"]) == 2
    said = capsys.readouterr().err
    assert "'no_such_op'" in said
    assert said.count("\n") == 1


@pytest.mark.gpu
def test_times_and_their_file(tmp_path, monkeypatch, capsys):
    """A copy takes at least its floor, and a baseline of twice the work about twice the time."""
    x, y = torch.randn(2, 2**27, device="cuda").unbind()
    calls = iter(range(10**9))

    def both():
        y.copy_(x)
        y.copy_(x)

    module = types.ModuleType("bench")
    module.cases = lambda device: [Case("copy", lambda: (next(calls), y.copy_(x)), 2**30, both)]
    monkeypatch.setitem(sys.modules, "specdec.kernels.fake.bench", module)
    monkeypatch.setitem(sys.modules, "specdec.kernels.fake", types.ModuleType("fake"))
    monkeypatch.setattr(bench, "ops", lambda: ["fake"])
    assert bench.main(["fake", "--json", str(tmp_path / "out.json")]) == 0
    assert "copy" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "out.json").read_text())["timings"]
    assert 0.5 < row["fraction"] < 1.1
    assert row["baseline_microseconds"] / row["microseconds"] == pytest.approx(2, rel=0.1)


def test_the_reading_kernel_reads_every_word():
    from specdec.kernels import bandwidth

    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = torch.randint(-100, 100, (3 * 64,), dtype=torch.int32, device=device)
    out = torch.full((3,), -7, dtype=torch.int32, device=device)
    bandwidth._read[(3,)](words, out, WORDS=32, PASSES=2, STEP=16)
    assert torch.equal(out, words.view(3, 64).sum(1, dtype=torch.int32))


def test_the_reading_kernel_compiles():
    constants = {"WORDS": 16384, "PASSES": 4, "STEP": 8192}
    signature = {"words_ptr": "*i32", "out_ptr": "*i32"}
    module = "specdec.kernels.bandwidth"
    (built,) = compile_sm90([Compile(module, "_read", signature, constants, num_warps=8)])
    assert "ld.global.v4" in built.ptx
    assert built.spilled == 0
