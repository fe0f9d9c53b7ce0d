"""Edits of logits before the temperature: penalties and a grammar's mask."""

import pytest
import torch
from compiling import Compile, compile_sm90

from specdec.kernels.bitmask import kernel as bitmask_kernel
from specdec.kernels.bitmask import reference as bitmask_reference
from specdec.kernels.penalties import kernel, reference
from specdec.kernels.penalties.reference import pack_counts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_penalties_by_hand():
    """Id 0 in the prompt, 1 twice in the output, 2 drafted once, 3 nowhere."""
    counts = pack_counts(torch.tensor([[True, False, False, False]]), torch.tensor([[0, 2, 0, 0]]))
    logits = torch.tensor([[3.0, 3.0, -3.0, 3.0, 9.0]] * 2)
    reference.apply_penalties_(
        logits,
        counts,
        torch.tensor([[2, -1]]),
        torch.tensor([0]),
        torch.tensor([0, 2]),
        *torch.tensor([[1.5], [0.25], [0.5]]),
        vocab_size=4,
    )
    # 3/1.5; 3/1.5 - 2 * 0.5 - 0.25; untouched before the draft, then -3*1.5 - 0.5 - 0.25;
    # untouched; past the vocabulary
    assert logits.tolist() == [[2.0, 0.75, -3.0, 3.0, 9.0], [2.0, 0.75, -5.25, 3.0, 9.0]]


def test_counts_of_a_text_by_hand():
    """A prompt of 2, 2, 0 and an output of 2, 1, 1; another text is a prompt alone."""
    counts = torch.full((4, 5), 7, dtype=torch.int32)
    reference.reset_counts_(
        counts,
        torch.tensor([3, 1]),
        torch.tensor([[2, 2, 0, 2, 1, 1, 4], [4, 0, 0, 0, 0, 0, 0]]),
        torch.tensor([3, 1]),
        torch.tensor([6, 1]),
    )
    assert counts.tolist() == [[7] * 5, [0, 0, 0, 0, 1], [7] * 5, [1, 4, 3, 0, 0]]


def penalised(vocab_size, num_drafts, dtype):
    """Logits and arguments of five requests with ragged rows, among seven slots."""
    rng = torch.Generator().manual_seed(vocab_size)
    num_logits = torch.tensor([1, 0, min(2, num_drafts + 1), num_drafts + 1, 1])
    starts = torch.nn.functional.pad(num_logits.cumsum(0), (1, 0))
    num_rows = int(starts[-1]) + 2  # and two past the last request's
    logits = (torch.randn(num_rows, vocab_size + 5, generator=rng) * 4).to(dtype)
    logits[0, 0] = -torch.inf
    num_output = torch.randint(0, 4, (7, vocab_size), generator=rng)
    num_output *= torch.rand(7, vocab_size, generator=rng) < 0.1
    in_prompt = torch.rand(7, vocab_size, generator=rng) < 0.1
    arguments = (
        pack_counts(in_prompt, num_output),
        torch.randint(-1, vocab_size, (7, num_drafts), generator=rng),
        torch.tensor([6, 2, 0, 3, 5]),
        starts,
        torch.tensor([1.2, 1.0, 0.8, 1.0, 1.0, 1.0, 0.8]),
        torch.tensor([0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.5]),
        torch.tensor([0.3, 0.0, -0.2, 0.0, 0.0, 0.0, -0.2]),
    )
    return logits.to(DEVICE), tuple(a.to(DEVICE) for a in arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "num_drafts"), [(1, 0), (50, 3), (4200, 2)])
def test_penalties_equal_the_reference(vocab_size, num_drafts, dtype):
    logits, arguments = penalised(vocab_size, num_drafts, dtype)
    wanted = logits.clone()
    reference.apply_penalties_(wanted, *arguments, vocab_size=vocab_size)
    found = logits.clone()
    kernel.apply_penalties_(found, *arguments, vocab_size=vocab_size)
    assert torch.equal(found[:, vocab_size:], logits[:, vocab_size:])
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-6)
    assert not torch.equal(wanted, logits) or vocab_size == 1
    assert torch.equal(found[-3:], logits[-3:])  # the last request has no penalty
    drafts, starts = arguments[1], arguments[3]
    assert num_drafts == 0 or not torch.equal(drafts[3], torch.full_like(drafts[3], -1))
    if num_drafts:  # two requests with drafts: the first rows of each come before any of them
        first = starts[2]
        apart = logits.clone()
        reference.apply_penalties_(
            apart, arguments[0], drafts * 0 - 1, *arguments[2:], vocab_size=vocab_size
        )
        assert torch.equal(wanted[first], apart[first])
        assert not torch.equal(wanted, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 5000])
def test_bitmask_equals_the_reference(vocab_size, dtype):
    rng = torch.Generator().manual_seed(vocab_size)
    words = -(-vocab_size // 32)
    bitmask = torch.randint(-(2**31), 2**31, (4, words), generator=rng).int()
    bitmask[0], bitmask[1] = -1, 0
    logits = torch.randn(4, vocab_size + 3, generator=rng).to(dtype).to(DEVICE)
    wanted, found = logits.clone(), logits.clone()
    bitmask_reference.apply_bitmask_(wanted, bitmask.to(DEVICE), vocab_size=vocab_size)
    bitmask_kernel.apply_bitmask_(found, bitmask.to(DEVICE), vocab_size=vocab_size)
    assert torch.equal(found, wanted)
    assert torch.equal(found[0], logits[0])
    assert bool((found[1, :vocab_size] == -torch.inf).all())
    for row in (2, 3):
        for id in (0, vocab_size // 2, vocab_size - 1):
            allowed = int(bitmask[row, id // 32]) >> (id % 32) & 1
            assert bool(found[row, id] == logits[row, id]) == bool(allowed)


def test_compiles_for_sm90():
    penalties = {
        "logits_ptr": "*fp32", "counts_ptr": "*i32", "drafts_ptr": "*i64", "slots_ptr": "*i64",
        "cu_num_logits_ptr": "*i64", "repetition_ptr": "*fp32", "presence_ptr": "*fp32",
        "frequency_ptr": "*fp32", "row_stride": "i32", "counts_stride": "i32",
        "drafts_stride": "i32", "num_requests": "i32", "vocab_size": "i32",
    }  # fmt: skip
    mask = {
        "logits_ptr": "*bf16", "bitmask_ptr": "*i32", "row_stride": "i32", "mask_stride": "i32",
        "vocab_size": "i32", "num_words": "i32",
    }  # fmt: skip
    compiled = compile_sm90([
        Compile(
            "specdec.kernels.penalties.kernel", "_penalties", penalties,
            {"K": 3, "BLOCK": 4096, "REQUESTS": 64, "OVERLAP": True}, num_warps=8,
        ),
        Compile(
            "specdec.kernels.bitmask.kernel", "_bitmask", mask, {"WORDS": 128, "OVERLAP": True}
        ),
    ])  # fmt: skip
    assert all(item.spilled == 0 for item in compiled)
