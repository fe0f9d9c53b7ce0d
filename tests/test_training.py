"""The mask, the unrolled attention and the chunked loss, against their definitions."""

import weakref
from functools import partial

import numpy as np
import pytest
import torch
from token_data import VOCAB, dataset, make_row_of, random_problem
from torch import Tensor

from specdec.training.attention import (
    FLASH,
    FlashOps,
    flash_unrolled,
    padded_unrolled,
    unrolled_attention,
)
from specdec.training.data import Sample, load_dataset, write_dataset
from specdec.training.objective import compiled, divergence, step_weights, unrolled_loss
from specdec.training.packing import count_labels, make_row, to_device


def test_the_mask_follows_the_label(tmp_path):
    """CASES T1. Column 1 predicts id 3, the first supervised one: supervised here, although
    decoding never drafts it. Column 5 predicts id 7, which is not supervised."""
    supervised = [3 <= i <= 6 for i in range(10)]
    sample = Sample(list(range(1, 11)), supervised, 0.0)
    write_dataset(tmp_path / "d", [sample], vocab_size=VOCAB, meta={})
    row = make_row(load_dataset(tmp_path / "d"), np.array([0]), 12)
    for step, columns in enumerate([[1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2], [0, 1]]):
        hidden, target, head = random_problem(row, num_steps=4)
        weights = [0.0] * 4
        weights[step] = 1.0
        loss, _ = unrolled_loss(hidden, target, head, row, divergence, weights)
        loss.backward()
        touched = hidden.grad.abs().sum(-1) > 0  # [K, T]
        assert touched[step].nonzero().flatten().tolist() == columns
        assert not touched[[k for k in range(4) if k != step]].any()
        assert count_labels([row], 4)[step] == len(columns)


def attention_problem(steps: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 9, 3]
    row = make_row_of(lengths)

    def heads() -> Tensor:
        return torch.randn(sum(lengths), 4, 8, generator=generator).requires_grad_()

    return row, heads(), [heads() for _ in range(steps)], [heads() for _ in range(steps)]


def plain_attention(row, q, keys, values, scale):
    """One query at a time, by the words of the definition."""
    document = torch.repeat_interleave(torch.arange(len(row.cu_seqlens) - 1), row.cu_seqlens.diff())
    out = []
    for p in range(len(q)):
        first = [c for c in range(p + 1) if document[c] == document[p]]
        k = torch.cat([keys[0][first], *[x[p : p + 1] for x in keys[1:]]])
        v = torch.cat([values[0][first], *[x[p : p + 1] for x in values[1:]]])
        probs = (torch.einsum("hd,nhd->hn", q[p], k) * scale).softmax(-1)
        out.append(torch.einsum("hn,nhd->hd", probs, v))
    return torch.stack(out)


def plain_flash_ops() -> FlashOps:
    """What the flash kernels compute, in plain torch: the backward pass trusts the output and the
    log-sum-exp that it is given."""

    def scores(q, k, cu_seqlens, scale):
        document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
        column = torch.arange(len(q))
        hidden = (document[:, None] != document) | (column > column[:, None])
        return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, float("-inf"))

    def forward(q, k, v, cu_seqlens, max_len, scale):
        s = scores(q, k, cu_seqlens, scale)
        return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)

    def backward(grad, q, k, v, out, lse, cu_seqlens, max_len, scale):
        probs = (scores(q, k, cu_seqlens, scale) - lse[..., None]).exp()
        centre = (grad * out).sum(-1).T[..., None]
        ds = probs * (torch.einsum("qhd,khd->hqk", grad, v) - centre) * scale
        return (
            torch.einsum("hqk,khd->qhd", ds, k),
            torch.einsum("hqk,qhd->khd", ds, q),
            torch.einsum("hqk,qhd->khd", probs, grad),
        )

    return FlashOps(forward, backward)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("form", ["padded", "flash"])
def test_unrolled_attention_equals_its_definition(steps, form):
    row, q, keys, values = attention_problem(steps)
    run = padded_unrolled if form == "padded" else partial(flash_unrolled, ops=plain_flash_ops())
    leaves = [q, *keys, *values]
    direction = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    expected = plain_attention(row, q, keys, values, 0.3)
    wanted = torch.autograd.grad((expected * direction).sum(), leaves)
    actual = run(q, keys, values, row, 0.3)
    got = torch.autograd.grad((actual * direction).sum(), leaves)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 5])
def test_flash_kernels_equal_the_padded_form(steps):
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    lengths = [200, 1, 77, 300]
    row = to_device(make_row_of(lengths), device)

    def heads() -> Tensor:
        x = torch.randn(sum(lengths), 9, 64, generator=generator, device=device)
        return x.bfloat16().requires_grad_()

    q, keys, values = heads(), [heads() for _ in range(steps)], [heads() for _ in range(steps)]
    leaves = [q, *keys, *values]
    expected = padded_unrolled(q, keys, values, row, 0.125)
    actual = flash_unrolled(q, keys, values, row, 0.125, FLASH)
    direction = torch.randn(q.shape, generator=generator, device=device).bfloat16()
    wanted = torch.autograd.grad(expected, leaves, direction)
    got = torch.autograd.grad(actual, leaves, direction)
    for a, b in zip([actual, *got], [expected, *wanted], strict=True):
        assert (a - b).float().norm() / b.float().norm() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 3])
def test_values_narrower_than_keys_on_a_gpu(steps):
    """Latent attention: one key head of 64, values of 48."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    lengths = [200, 1, 77, 300]
    row = to_device(make_row_of(lengths), device)

    def heads(num_heads: int, width: int) -> Tensor:
        shape = (sum(lengths), num_heads, width)
        x = torch.randn(shape, generator=generator, device=device)
        return x.bfloat16().requires_grad_()

    q = heads(6, 64)
    keys, values = [heads(1, 64) for _ in range(steps)], [heads(1, 48) for _ in range(steps)]
    leaves = [q, *keys, *values]
    wide = [[x.repeat_interleave(6, dim=1) for x in side] for side in (keys, values)]
    expected = padded_unrolled(q, *wide, row, 0.125)
    actual = unrolled_attention(q, keys, values, row, 0.125)
    direction = torch.randn(expected.shape, generator=generator, device=device).bfloat16()
    wanted = torch.autograd.grad(expected, leaves, direction)
    got = torch.autograd.grad(actual, leaves, direction)
    for a, b in zip([actual, *got], [expected, *wanted], strict=True):
        assert a.shape == b.shape
        assert (a - b).float().norm() / b.float().norm() < 0.02


def full_loss(hidden, target, head, row, weights, coefficients, t2d=None):
    """The loss with every logit in memory and autograd's gradient."""
    total = 0.0
    for k, weight in enumerate(weights):
        columns = [j for j in row.labels.tolist() if row.positions[j] >= k + 2]
        if t2d is not None:
            columns = [j for j in columns if t2d[row.input_ids[j]] >= 0]
        j = torch.tensor(columns)
        log_q = (hidden[k][j - 2 - k] @ head.T).log_softmax(-1)
        log_p = (target[j - 1] @ head.T).log_softmax(-1)
        labels = row.input_ids[j] if t2d is None else t2d[row.input_ids[j]]
        overlap = torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
        terms = {
            "kl": (log_p.exp() * (log_p - log_q)).sum(-1),
            "cross_entropy": -log_q[torch.arange(len(j)), labels],
            "total_variation": 1 - overlap,
            "log_acceptance": -overlap.log(),
        }
        total = total + weight * sum(c * terms[name].sum() for name, c in coefficients.items())
    return total


OBJECTIVES = [
    {"kl": 1.0},
    {"kl": 0.0, "cross_entropy": 1.0},
    {"kl": 0.0, "total_variation": 1.0},
    {"kl": 0.0, "log_acceptance": 1.0},
    {"kl": 0.5, "cross_entropy": 0.3, "total_variation": 0.2, "log_acceptance": 0.1},
]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("coefficients", OBJECTIVES, ids=lambda c: "+".join(c))
def test_chunked_loss_equals_full(tmp_path, coefficients, reduced):
    """CASES T5, the numbers: loss and gradient within 1e-5."""
    data = dataset(tmp_path, [11, 6, 4, 13])
    row = make_row(data, np.arange(4), 40)
    hidden, target, head = random_problem(row, num_steps=3)
    t2d = None
    if reduced:
        kept = torch.arange(0, VOCAB, 2)
        t2d = torch.full((VOCAB,), -1)
        t2d[kept] = torch.arange(len(kept))
        head = head[kept]
    weights = [0.5, 0.3, 0.2]
    expected = full_loss(hidden, target, head, row, weights, coefficients, t2d)
    (wanted,) = torch.autograd.grad(expected, hidden)
    for num_chunks in (1, 5, 40):
        actual, sums = unrolled_loss(
            hidden, target, head, row, partial(divergence, **coefficients), weights,
            t2d=t2d, num_chunks=num_chunks,
        )  # fmt: skip
        (got,) = torch.autograd.grad(actual, hidden)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        weighted = (sums.loss * torch.tensor(weights)).sum()
        torch.testing.assert_close(weighted, expected, rtol=1e-5, atol=1e-5)


def test_agreement_and_overlap_count_labels(tmp_path):
    row = make_row(dataset(tmp_path, [9]), np.array([0]), 9)
    target = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    head = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(2))
    hidden = torch.stack([target.roll(-1, 0), torch.zeros_like(target)])
    _, sums = unrolled_loss(hidden, target, head, row, divergence, [1.0, 1.0])
    labels = count_labels([row], 2)
    assert labels == [6, 6]
    assert sums.agrees[0] == 6
    torch.testing.assert_close(sums.overlap[0], torch.tensor(6.0))
    probs = (target[row.labels - 1] @ head.T).softmax(-1)
    expected = torch.minimum(probs, torch.full_like(probs, 1 / VOCAB)).sum()
    torch.testing.assert_close(sums.overlap[1], expected)


class LiveBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes that tensors made inside the context held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def measure_peak(columns: int, vocab_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Peak bytes of loss and gradient, and the size of one fp32 [T, V] tensor."""
    row = make_row_of([columns])
    row = row._replace(input_ids=row.input_ids % vocab_size, labels=row.labels[2:])
    hidden = torch.randn(2, columns, 32).to(dtype).requires_grad_()
    target, head = torch.randn(columns, 32).to(dtype), torch.randn(vocab_size, 32).to(dtype)
    with LiveBytes() as bytes_:
        loss, _ = unrolled_loss(hidden, target, head, row, divergence, step_weights(2, 0.8))
        loss.backward()
    return bytes_.peak, columns * vocab_size * 4


def test_peak_memory_is_below_one_full_tensor():
    """CASES T5, the memory, at a sixteenth of the columns and vocabulary."""
    peak, full = measure_peak(256, 16_000, torch.float32)
    assert peak > full / 16  # the meter sees the logits
    assert peak < full


@pytest.mark.slow
def test_peak_memory_at_the_published_size():
    peak, full = measure_peak(2048, 128_000, torch.float32)
    assert peak < full


@pytest.mark.gpu
def test_compiled_divergence_equals_plain():
    generator = torch.Generator("cuda").manual_seed(0)
    student = torch.randn(5, 64, 49152, generator=generator, device="cuda").bfloat16()
    teacher = torch.randn(64, 49152, generator=generator, device="cuda").bfloat16()
    labels = torch.randint(0, 49152, (64,), generator=generator, device="cuda")
    weights = torch.rand(5, 64, generator=generator, device="cuda")
    for coefficients in OBJECTIVES:
        function = partial(divergence, **coefficients)
        expected, actual = (
            f(student, teacher, labels, weights) for f in (function, compiled(function))
        )
        assert torch.equal(actual.agrees, expected.agrees)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(actual.overlap, expected.overlap, rtol=1e-3, atol=1e-4)
        error = (actual.grad.float() - expected.grad.float()).norm() / expected.grad.float().norm()
        assert error < 0.01
