"""Time stamps: their order, the ring, and the GPU's clock."""

import time

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.stamps import new_stamps, read, reset_, stamp_


def test_on_the_host():
    stamps = new_stamps("cpu")
    stamp_(stamps, 3)
    time.sleep(0.01)
    stamp_(stamps, 5)
    (first, began), (second, ended) = read(stamps)
    assert (first, second) == (3, 5)
    assert 10e6 <= ended - began < 1e9
    reset_(stamps)
    assert read(stamps) == []


def test_the_ring_keeps_the_newest():
    stamps = new_stamps("cpu", capacity=4)
    for mark in range(6):
        stamp_(stamps, mark)
    assert [mark for mark, _ in read(stamps)] == [2, 3, 4, 5]


def test_the_kernel_compiles_and_reads_the_clock():
    signature = {"marks_ptr": "*i64", "count_ptr": "*i64", "mark": "i32", "capacity": "i32"}
    (built,) = compile_sm90(
        [Compile("specdec.kernels.stamp_kernel", "stamp", signature, {}, num_warps=1)]
    )
    assert "%globaltimer" in built.ptx


@pytest.mark.gpu
def test_in_a_graph():
    stamps = new_stamps("cuda")
    x = torch.randn(2**28, device="cuda")

    def run():
        stamp_(stamps, 1)
        x.mul_(1.0)
        stamp_(stamps, 2)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    reset_(stamps)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
    found = read(stamps)
    assert [mark for mark, _ in found] == [1, 2] * 3
    took = (found[-1][1] - found[-2][1]) / 1e6
    assert took == pytest.approx(began.elapsed_time(ended), rel=0.2)
