import pytest
import torch
from battery import filtered, mixed
from compiling import Compile, compile_sm90

from specdec.kernels.cutoff import kernel, reference
from specdec.kernels.cutoff.reference import cutoff
from specdec.kernels.cutoff.search import EXCLUDED
from specdec.state import GREEDY_EPSILON, INVALID_TOKEN_ID

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OFF = -torch.inf


def scaled(probs):
    logits = torch.tensor(probs).log()
    return logits - logits.max()


def kept(row, top_k=0, top_p=1.0, min_p=0.0):
    cut = cutoff(row[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    return (row >= cut).nonzero().flatten().tolist()


def test_off_is_minus_infinity():
    row = scaled([0.5, 0.3, 0.2])
    cut = cutoff(row[None], torch.tensor([0]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert cut.tolist() == [OFF]


@pytest.mark.parametrize(
    ("parameters", "ids"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 0.5}, [0]),  # met exactly
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.8}, [0, 1]),  # met exactly
        ({"top_p": 0.93}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 0.6}, [0, 1]),  # .3 / .5, met exactly
        ({"min_p": 0.61}, [0]),
        ({"min_p": 1.0}, [0]),
        # top-p sees what top-k left: .5, .3 of .8, so .6 is within .5 + .3
        ({"top_k": 2, "top_p": 0.6}, [0]),
        ({"top_k": 2, "top_p": 0.63}, [0, 1]),
        ({"top_p": 0.85, "min_p": 0.3}, [0, 1]),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.2}, [0, 1, 2]),
    ],
)
def test_order_and_boundaries(parameters, ids):
    assert kept(scaled([0.50, 0.30, 0.12, 0.08]), **parameters) == ids


@pytest.mark.parametrize(
    ("parameters", "ids"),
    [
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_k": 4}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.5}, [0, 1, 2]),
    ],
)
def test_ties_at_the_cutoff_are_all_kept(parameters, ids):
    assert kept(torch.tensor([0.0, -0.5, -0.5, -2.0, -2.0]), **parameters) == ids


def test_excluded_ids_neither_count_nor_come_back():
    row = torch.tensor([-torch.inf, 0.0, -1.0, -torch.inf, -2.0])
    assert kept(row, top_k=3) == [1, 2, 4]
    assert kept(row, top_p=0.9) == [1, 2]
    cut = cutoff(row[None], torch.tensor([4]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert cut.tolist() == [OFF]  # fewer real ids than k


@pytest.mark.parametrize("vocab_size", [3, 1000, 1023, 1025])
def test_random_rows_against_a_loop(vocab_size):
    """Every row has its own parameters; kept sets equal those of a restatement with loops."""
    rng = torch.Generator().manual_seed(vocab_size)
    num_rows = 24
    logits = torch.randn(num_rows, vocab_size, generator=rng) * 2
    logits[::3] = logits[::3].bfloat16().float()  # plenty of ties
    rows = logits - logits.amax(-1, keepdim=True)
    top_k = torch.randint(0, vocab_size + 2, (num_rows,), generator=rng)
    top_k[::4] = 0
    top_p = torch.rand(num_rows, generator=rng)
    top_p[1::4] = 1.0
    min_p = torch.rand(num_rows, generator=rng) * 0.2
    min_p[2::4] = 0.0
    cut = cutoff(rows, top_k, top_p, min_p)
    probs = logits.double().softmax(-1)
    for r in range(num_rows):
        wanted = filtered(
            probs[r : r + 1],
            top_k=int(top_k[r]),
            top_p=float(top_p[r]),
            min_p=float(min_p[r]),
        )
        assert torch.equal(rows[r] >= cut[r], wanted[0] > 0), r
        alone = cutoff(rows[r : r + 1], top_k[r : r + 1], top_p[r : r + 1], min_p[r : r + 1])
        assert torch.equal(alone[0], cut[r])


def filtered_both_ways(logits, sampling, vocab_size):
    """Statistics from the kernels and from the reference, which also gives the scaled logits."""
    logits = logits.to(DEVICE)
    sampling = {name: value.to(DEVICE) for name, value in sampling.items()}
    known = {"vocab_size": vocab_size, "epsilon": GREEDY_EPSILON, "invalid": INVALID_TOKEN_ID}
    wanted = reference.filtered_rows(logits, **sampling, **known)
    found = kernel.filtered_rows(logits, **sampling, **known)
    scaled = logits[:, :vocab_size].float() - wanted.max[:, None]
    return found, wanted, scaled * wanted.inv_temperature[:, None]


def check_filtered(logits, sampling, vocab_size):
    found, wanted, x = filtered_both_ways(logits, sampling, vocab_size)
    for name in ("max", "inv_temperature", "greedy", "argmax"):
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)), name
    assert torch.equal(x >= found.cutoff[:, None], x >= wanted.cutoff[:, None])
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-5, atol=1e-5)
    drawn = (wanted.argmax >= 0) & ~wanted.greedy
    torch.testing.assert_close(
        found.block_mass[drawn], wanted.block_mass[drawn], rtol=1e-5, atol=1e-6
    )
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab_size", "width"), [(33, 40), (2100, 2101)])
def test_kernel_keeps_what_the_reference_keeps(dtype, vocab_size, width):
    logits, sampling = mixed(16, width, seed=vocab_size, dtype=dtype)
    logits[3] = torch.nan
    logits[4, 2] = torch.inf
    logits[5] = -torch.inf
    logits[6, ::2] = -torch.inf
    logits[7, vocab_size - 1] = torch.nan
    logits[8] = 1.0
    sampling["top_k"][10] = vocab_size + 1
    check_filtered(logits, sampling, vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.5), (5, 0.3)])
def test_zeros_of_either_sign_are_ties(dtype, top_k, top_p):
    logits = torch.tensor([[0.0, -0.0] * 20, [-0.0, 0.0] * 20, [0.0, -1.0] * 20, [-0.0] * 40])
    sampling = {
        "temperature": torch.ones(4),
        "top_k": torch.full((4,), top_k),
        "top_p": torch.full((4,), top_p),
        "min_p": torch.zeros(4),
    }
    found = check_filtered(logits.to(dtype), sampling, 40)
    torch.testing.assert_close(found.lse.cpu().exp(), torch.tensor([40.0, 40.0, 20.0, 40.0]))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 0.98, 0.0),  # more mass than the candidates of a flat row hold
        (1500, 1.0, 0.0),  # more than the chunk maxima can bound
        (1500, 0.97, 0.0),
        (0, 1.0, 0.01),  # keeps more than the candidates
        (40, 0.9, 0.02),
    ],
)
def test_kernel_on_rows_that_candidates_do_not_answer(top_k, top_p, min_p):
    rng = torch.Generator().manual_seed(top_k)
    logits = torch.randn(4, 4500, generator=rng)
    logits[1] = (logits[1] * 8).round() / 8  # ties by the hundred
    logits[2] = 0.25
    logits[3, 100:] = -torch.inf
    logits[0] += 300  # bf16 has steps of 2 there
    sampling = {
        "temperature": torch.full((4,), 1.3),
        "top_k": torch.full((4,), top_k),
        "top_p": torch.full((4,), top_p),
        "min_p": torch.full((4,), min_p),
    }
    check_filtered(logits.bfloat16(), sampling, 4500)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32000, 128256, 151936])
@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0])
def test_kernel_on_long_rows(vocab_size, scale):
    rng = torch.Generator().manual_seed(vocab_size)
    num_rows = 48
    logits = (torch.randn(num_rows, vocab_size, generator=rng) * scale).bfloat16()
    index = torch.arange(num_rows)
    sampling = {
        "temperature": torch.tensor([1.0, 0.7, 1.5, 0.0])[index % 4],
        "top_k": torch.tensor([50, 0, 1, 1000, 20000])[index % 5],
        "top_p": torch.tensor([0.9, 1.0, 0.5])[index % 3],
        "min_p": torch.tensor([0.0, 0.0, 0.05, 0.001])[index % 7 % 4],
    }
    found, wanted, x = filtered_both_ways(logits, sampling, vocab_size)
    ours, theirs = (x >= cut[:, None] for cut in (found.cutoff, wanted.cutoff))
    other = (ours != theirs).any(-1)  # a sum in another order may move top-p to the next value
    weights = torch.where(ours ^ theirs, x.exp(), 0.0).sum(-1) / wanted.lse.exp()
    assert bool((weights[other] < 1e-3).all())
    assert int(other.sum()) <= num_rows // 10
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.argmax, wanted.argmax)
    again, _, _ = filtered_both_ways(logits, sampling, vocab_size)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_compiles_for_sm90():
    scan = {
        "temperature_ptr": "*fp32", "block_max_ptr": "*fp32", "block_sum_ptr": "*fp32",
        "slots_ptr": "*i64", "row_stride": "i32", "copy_stride": "i32", "vocab_size": "i32",
        "width": "i32", "num_blocks": "i32", "num_chunks": "i32", "epsilon": "fp32",
    }  # fmt: skip
    select = {
        "row_stride": "i32", "temperature_ptr": "*fp32", "top_k_ptr": "*i64",
        "top_p_ptr": "*fp32", "min_p_ptr": "*fp32", "block_max_ptr": "*fp32",
        "block_sum_ptr": "*fp32", "max_ptr": "*fp32", "inv_temperature_ptr": "*fp32",
        "cutoff_ptr": "*fp32", "lse_ptr": "*fp32", "greedy_ptr": "*i1", "argmax_ptr": "*i64",
        "mass_ptr": "*fp32", "ids_ptr": "*i32", "keys_ptr": "*i32", "chunks_ptr": "*i32",
        "vocab_size": "i32", "num_blocks": "i32", "num_chunks": "i32", "num_masses": "i32",
        "epsilon": "fp32", "invalid": "i32",
    }  # fmt: skip
    overlap = {"OVERLAP": True}
    compiles = []
    for dtype, kind in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        compiles += [
            Compile(
                "specdec.kernels.cutoff.scan",
                "_scan",
                scan | {"logits_ptr": kind, "chunk_max_ptr": kind, "copy_ptr": kind},
                {"BLOCK": 1024, "BLOCKS": 4, "CHUNK": 32, "CHUNKS": True, "COPY": True} | overlap,
                num_warps=8,
            ),
            Compile(
                "specdec.kernels.cutoff.kernel",
                "_select",
                select | {"logits_ptr": kind, "chunk_max_ptr": kind},
                {
                    "EXCLUDED": EXCLUDED[dtype], "SLACK": 1e-6, "BLOCK": 1024, "BLOCKS": 128,
                    "CHUNK": 32, "CHUNKS": 4096, "CANDIDATES": 2048, "MAX_J": 1024, "TILE": 2048,
                    "MASS_BLOCK": 4096, "MASSES": 32, "STEPS": 12, "OVERLAP": True,
                },
                num_warps=8,
            ),
        ]  # fmt: skip
    for compiled in compile_sm90(compiles):
        assert compiled.spilled <= 64
