"""A step on the device never waits for the host, nor the host for it: no value is read, no constant
copied over, no shape depends on a value, and every new tensor says on which device it is."""

from functools import partial

import head_runs
import pytest
import torch
from head_runs import HEADS
from running import requests, tiny_engine
from tiny import tiny_draft, tiny_target
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec import runner as runner_module
from specdec.generate import generate
from specdec.propose.autoregressive import autoregressive
from specdec.propose.ngram import ngram
from specdec.verify.delta import delta
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
READS |= {"__contains__", "equal", "allclose", "nonzero", "argwhere", "masked_select", "unique"}
MAKES = {"tensor", "as_tensor", "from_numpy"}  # copies of host values, to wherever they are wanted
FACTORIES = {"arange", "zeros", "ones", "full", "empty", "eye", "linspace", "rand", "randn"}


class Waits(TorchFunctionMode):
    """Lists the calls by which host and device would wait for each other."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in READS | MAKES or _has_mask(name, args) or _counts(name, args, kwargs):
            self.calls.append(name)
        if name in FACTORIES and kwargs.get("device") is None:
            self.calls.append(f"{name} on the host")
        return func(*args, **kwargs)


def _has_mask(name, args):
    """Indexing by booleans asks the device how many there are."""
    if name not in ("__getitem__", "__setitem__", "index_put_"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in index)


def _counts(name, args, kwargs):
    """So do repetitions by a tensor, unless their sum is given."""
    by = args[1] if len(args) > 1 else kwargs.get("repeats")
    return name == "repeat_interleave" and isinstance(by, Tensor) and "output_size" not in kwargs


def test_waits_are_seen():
    x = torch.arange(6)
    index = torch.tensor([1, 2])
    with Waits() as waits:
        x[x > 3], x.sum().item(), x.tolist(), torch.tensor([1]), bool(x[0] == 0)
        x.repeat_interleave(x)
        x[x > 3] = 0
    assert waits.calls == [
        *("__getitem__", "item", "tolist", "tensor", "__bool__", "repeat_interleave", "__setitem__")
    ]
    with Waits() as waits:
        torch.repeat_interleave(x, x, output_size=6), x.repeat_interleave(2)
        x[index], x[1:], torch.where(x > 3, x, 0), torch.arange(3, device=x.device), x.new_zeros(2)
    assert waits.calls == []
    with Waits() as waits:
        torch.arange(3), torch.zeros(2)
    assert waits.calls == ["arange on the host", "zeros on the host"]


def waits_of(engine, monkeypatch, more=()):
    """Calls in each of the engine's steps, over requests of every kind side by side."""
    step, calls = runner_module.decode_step, []

    def watched(*args):
        with Waits() as waits:
            out = step(*args)
        calls.append(waits.calls)
        return out

    monkeypatch.setattr(runner_module, "decode_step", watched)
    asked = [
        *requests([[7, 3, 60, 2, 9, 9, 41], [11]], max_tokens=9),
        *requests([list(range(3, 24))], max_tokens=9, temperature=1.0, top_p=0.9, min_p=0.1),
        *requests([[5, 5, 5, 5, 5, 5]], max_tokens=9, temperature=0.7, top_k=5),
        *more,
    ]
    results = generate(engine, asked)
    assert any(r.drafted for result in results for r in result.rounds)
    return calls


@pytest.mark.parametrize("name", HEADS)
def test_a_step_of_any_head(name, monkeypatch):
    pair = head_runs.load(HEADS[name])
    engine = tiny_engine(
        pair.target,
        pair.draft,
        autoregressive,
        draft_sampling="sample",
        max_num_batched_tokens=16,
        eos=(),
    )
    assert {tuple(step) for step in waits_of(engine, monkeypatch)} == {()}


@pytest.mark.parametrize(
    ("rule", "propose", "mode"),
    [
        (rejection, partial(ngram, min_ngram=1), "greedy"),
        (delta, autoregressive, "greedy"),
        (partial(gumbel, noise="shared"), autoregressive, "shared"),
    ],
)
def test_a_step_of_any_rule(rule, propose, mode, monkeypatch):
    target = tiny_target()
    engine = tiny_engine(
        target,
        tiny_draft(target),
        propose,
        rule,
        draft_sampling=mode,
        max_num_batched_tokens=16,
        penalties=True,
    )
    penalised = requests([[7, 3, 60, 7, 3]], max_tokens=9, repetition_penalty=1.2)
    assert {tuple(step) for step in waits_of(engine, monkeypatch, penalised)} == {()}


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_step_on_a_gpu(kernels, monkeypatch):
    """The driver itself says so."""
    target = tiny_target(device="cuda", dtype=torch.bfloat16)
    engine = tiny_engine(
        target, tiny_draft(target), autoregressive, draft_sampling="sample", eos=()
    )
    engine.runner.kernels = kernels
    generate(engine, requests([[7, 3, 60]], max_tokens=9))  # libraries load, kernels compile
    step = runner_module.decode_step

    def watched(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(runner_module, "decode_step", watched)
    generate(engine, requests([[7, 3, 60, 2], [11]], max_tokens=9, temperature=1.0, top_p=0.9))
