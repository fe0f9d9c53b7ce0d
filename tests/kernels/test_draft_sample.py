"""Draft sampling in Triton: the drafts and the q of the torch reference."""

import pytest
import torch
from battery import mixed
from compiling import Compile, compile_sm90

from specdec.draft_sampling import draft_probs, sample_draft, sample_draft_
from specdec.kernels.draft_sample import kernel, reference
from specdec.kernels.draft_sample.reference import KeptRows
from specdec.kernels.philox.reference import philox, to_uniform
from specdec.kernels.runtime import using
from specdec.keys import Keys
from specdec.models.batch import VocabMap
from specdec.state import GREEDY_EPSILON, DraftDist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_of(num_rows, vocab_size, width, dtype=torch.bfloat16, seed=0, hard=True):
    """Logits with rows that are not finite, masked or tied, and everything a call needs."""
    logits, sampling = mixed(num_rows, width, seed=seed, dtype=dtype)
    if hard:
        logits[1] = torch.nan
        logits[2, vocab_size // 2] = torch.nan
        logits[3, vocab_size - 1] = torch.inf
        logits[4] = -torch.inf
        logits[5, ::2] = -torch.inf
        logits[6] = 1.5
        logits[7, -1:] = 1e4 if vocab_size < width else 2.0  # past the vocabulary: unread
    generator = torch.Generator().manual_seed(seed + 1)
    d2t = torch.randperm(3 * width, generator=generator)[:vocab_size].sort().values
    call = {
        **sampling,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        "round_start": torch.randint(0, 2**20, (num_rows,), generator=generator),
    }
    call = {name: value.to(DEVICE) for name, value in call.items()}
    call |= {"vocab_size": vocab_size, "epsilon": GREEDY_EPSILON, "offset": 2, "purpose": 0}
    return logits.to(DEVICE), call, d2t.to(DEVICE)


def unfiltered(call):
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {name: torch.full_like(call[name], value) for name, value in neutral.items()}


def poisoned(num_rows, width, dtype, num_drafts=3):
    """q buffers of more slots than rows, full of values that no draft has."""
    slots = torch.randperm(num_rows + 4, generator=torch.Generator().manual_seed(9))[:num_rows]

    def full(*shape, dtype=torch.float32):
        return torch.full((num_rows + 4, *shape), -7.0, dtype=dtype, device=DEVICE)

    return DraftDist(
        logits=full(num_drafts, width, dtype=dtype),
        max=full(num_drafts),
        cutoff=full(num_drafts),
        lse=full(num_drafts),
        inv_temperature=full(),
        slots=slots.to(DEVICE),
        vocab_map=None,
    )


def keep_of(q, offset):
    return KeptRows(
        q.logits[:, offset], q.max[:, offset], q.inv_temperature, q.cutoff[:, offset],
        q.lse[:, offset], q.slots,
    )  # fmt: skip


def near_a_boundary(rows, call, ids, wanted):
    """[n] True where another rounding of the sums may well draw the neighbour."""
    logits, vocab_size = rows, call["vocab_size"]
    top = logits[:, :vocab_size].float().amax(-1)
    x = (logits[:, :vocab_size].double() - top[:, None]) / call["temperature"].double()[:, None]
    below = x.softmax(-1).cumsum(-1)
    return (
        below.gather(1, torch.minimum(ids, wanted)[:, None])[:, 0] - uniforms(call)
    ).abs() < 1e-5


def uniforms(call):
    words = philox(call["seeds"], 0, call["round_start"], call["offset"], call["purpose"])
    return to_uniform(words[0])


@pytest.mark.parametrize(("mode", "filters"), [
    ("greedy", False), ("sample", False), ("sample", True), ("shared", False), ("shared", True),
])  # fmt: skip
@pytest.mark.parametrize(("vocab_size", "width", "mapped"), [(33, 40, True), (2500, 2500, False)])
def test_equals_the_reference(mode, filters, vocab_size, width, mapped):
    dtype = torch.float32 if mapped else torch.bfloat16
    logits, call, d2t = rows_of(12, vocab_size, width, dtype)
    call |= {} if filters else unfiltered(call)
    call |= {"mode": mode, "filters": filters, "d2t": d2t if mapped else None}
    ours, theirs = (poisoned(12, width, dtype) for _ in range(2))
    ids, is_delta = kernel.draft_sample_(logits, **call, keep=keep_of(ours, 2))
    wanted, wanted_delta = reference.draft_sample_(logits, **call, keep=keep_of(theirs, 2))
    assert torch.equal(is_delta, wanted_delta)
    assert torch.equal(ids, wanted)
    assert torch.equal(ours.logits.isnan(), theirs.logits.isnan())
    assert torch.equal(ours.logits.nan_to_num(5), theirs.logits.nan_to_num(5))
    for name in ("max", "inv_temperature"):
        found, expected = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(found.nan_to_num(5), expected.nan_to_num(5)), name
    for name in ("cutoff", "lse"):
        torch.testing.assert_close(
            getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5, msg=name
        )


@pytest.mark.parametrize("vocab_size", [1, 5, 1024, 1025])
@pytest.mark.parametrize("filters", [False, True])
def test_odd_vocabularies(vocab_size, filters):
    logits, call, _ = rows_of(8, vocab_size, vocab_size + 3, hard=False, seed=vocab_size)
    call |= {"mode": "sample", "filters": filters}
    call |= {} if filters else unfiltered(call)
    ids, is_delta = kernel.draft_sample_(logits, **call)
    wanted, wanted_delta = reference.draft_sample_(logits, **call)
    assert torch.equal(is_delta, wanted_delta)
    assert torch.equal(ids, wanted)


def test_every_block_is_drawn_from():
    """Draws of many seeds from one long row follow its distribution, block by block."""
    num_rows, vocab_size = 60 if DEVICE == "cpu" else 20_000, 3000
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 0.5
    logits = row.to(torch.bfloat16).expand(num_rows, -1).contiguous().to(DEVICE)
    _, call, _ = rows_of(num_rows, vocab_size, vocab_size, hard=False)
    call["temperature"] = torch.ones(num_rows, device=DEVICE)
    call |= {"mode": "sample", "filters": False}
    ids, _ = kernel.draft_sample_(logits, **call)
    wanted, _ = reference.draft_sample_(logits, **call)
    other = ids != wanted
    assert int(other.sum()) <= max(2, num_rows // 50)
    assert bool(near_a_boundary(logits, call, ids, wanted)[other].all())
    share = torch.bincount(ids // 1000, minlength=3).double() / num_rows
    mass = row.to(torch.bfloat16).double().softmax(0).view(3, 1000).sum(1).to(DEVICE)
    assert float((share - mass).abs().max()) < 5 * (0.25 / num_rows) ** 0.5


@pytest.mark.parametrize("mode", ["greedy", "sample", "shared"])
def test_the_stage_runs_it(mode):
    """`sample_draft` and `sample_draft_` under triton and torch: same drafts, same q."""
    logits, call, d2t = rows_of(12, 70, 80)
    t2d = torch.full((240,), -1, device=DEVICE).index_put((d2t,), torch.arange(70, device=DEVICE))
    sampling = {name: call[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    keys = Keys(call["seeds"], call["round_start"])
    vocab_map = VocabMap(d2t, t2d)
    shared = {**sampling, "vocab_size": 70, "keys": keys, "offset": 1, "mode": mode}
    found = {}
    for backend in ("torch", "triton"):
        with using(backend):
            sample = sample_draft(logits, **shared, vocab_map=vocab_map)
            q = poisoned(12, 80, torch.bfloat16)
            q = DraftDist(**{**vars(q), "vocab_map": vocab_map})
            ids, is_delta = sample_draft_(q, logits, **shared)
        assert torch.equal(ids, sample.token_ids)
        assert torch.equal(is_delta, sample.is_delta)
        found[backend] = ids, is_delta, q
    assert torch.equal(found["torch"][0], found["triton"][0])
    assert torch.equal(found["torch"][1], found["triton"][1])
    if mode == "sample":
        index = torch.ones(12, dtype=torch.int64, device=DEVICE)
        sampled = ~found["torch"][1]
        q, wanted = (draft_probs(found[b][2], index, 240)[sampled] for b in ("triton", "torch"))
        torch.testing.assert_close(q, wanted, rtol=1e-4, atol=1e-6)
        own = q.gather(1, found["triton"][0][sampled, None])
        assert bool((own > 0).all())
    else:
        assert bool((found["triton"][2].logits == -7).all())  # nothing is left behind


def test_compiles_for_sm90():
    kept = {
        "slots_ptr": "*i64", "max_ptr": "*fp32", "max_stride": "i32",
        "inv_temperature_ptr": "*fp32", "inv_temperature_stride": "i32",
        "cutoff_ptr": "*fp32", "cutoff_stride": "i32", "lse_ptr": "*fp32", "lse_stride": "i32",
    }  # fmt: skip
    out = {"d2t_ptr": "*i64", "token_ptr": "*i64", "delta_ptr": "*i1"}
    seeds = {"seeds_ptr": "*i64", "round_start_ptr": "*i64"}
    module = "specdec.kernels.draft_sample.programs"
    overlap = {"OVERLAP": True}
    compiles = []
    for dtype in ("bf16",):
        row = {"logits_ptr": f"*{dtype}", "row_stride": "i32", "vocab_size": "i32"}
        compiles += [
            Compile(
                module,
                "greedy",
                row | out,
                overlap | {"TILE": 16384, "MAPPED": True},
                num_warps=32,
            ),
            Compile(
                module,
                "draw",
                row | out | seeds | kept | {
                    "temperature_ptr": "*fp32", "block_max_ptr": "*fp32", "block_sum_ptr": "*fp32",
                    "num_blocks": "i32", "offset": "i32", "epsilon": "fp32",
                },
                overlap
                | {"PURPOSE": 0, "BLOCK": 1024, "BLOCKS": 128, "MAPPED": True, "KEEP": True},
            ),
            Compile(
                module,
                "draw_kept",
                row | out | seeds | kept | {
                    "row_max_ptr": "*fp32", "row_inv_temperature_ptr": "*fp32",
                    "row_cutoff_ptr": "*fp32", "row_lse_ptr": "*fp32", "row_greedy_ptr": "*i1",
                    "row_argmax_ptr": "*i64", "mass_ptr": "*fp32", "num_blocks": "i32",
                    "offset": "i32",
                },
                {"PURPOSE": 0, "BLOCK": 4096, "BLOCKS": 32, "MAPPED": True, "KEEP": True} | overlap,
                num_warps=16,
            ),
        ]  # fmt: skip
    for compiled in compile_sm90(compiles):
        assert compiled.spilled == 0
