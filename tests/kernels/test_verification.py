"""The rules on kernels against the rules in torch: equal integers, away from rounding's edges."""

import importlib
import inspect
from dataclasses import replace
from typing import NamedTuple

import battery
import compiling
import pytest
import torch

from specdec.draft_sampling import draft_probs, sample_draft
from specdec.kernels.runtime import using
from specdec.keys import Keys, Purpose, uniform
from specdec.models.batch import VocabMap
from specdec.sampling import make_dist
from specdec.state import DraftDist, Drafts
from specdec.verify import complete
from specdec.verify.delta import delta
from specdec.verify.greedy import greedy
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGE = 1e-5  # of a probability; closer than this the order of a sum may decide


class Case(NamedTuple):
    logits: torch.Tensor  # [N, width]
    sampling: dict
    drafts: Drafts
    keys: Keys
    dist: dict  # arguments of `make_dist` beside the logits and the sampling parameters


def make(num_requests, num_drafts, vocab_size, kind, dtype=torch.float32, filters=False, seed=0):
    """Requests of every kind in one batch: ragged, without rows, invalid, greedy, placeholders."""
    rng = torch.Generator().manual_seed(seed + vocab_size + num_drafts)
    requests = torch.arange(num_requests)
    num_logits = torch.where(requests % 7 == 5, 0, requests % (num_drafts + 1) + 1)
    num_logits[requests % 3 == 0] = num_drafts + 1
    num_rows = int(num_logits.sum())
    padding = (0, 5, 32)[seed % 3]
    logits = torch.randn(num_rows, vocab_size + padding, generator=rng) * 3
    logits[:, vocab_size:] = torch.nan
    logits[0, vocab_size // 2] = torch.nan
    logits = logits.to(dtype)
    first = (num_logits.cumsum(0) - num_logits).clamp(max=num_rows - 1)
    owner = torch.repeat_interleave(requests, num_logits)
    sampling = {
        "temperature": torch.tensor([1.0, 0.0, 0.6, 1.7])[requests % 4],
        "top_k": torch.tensor([0, 3, 20])[requests % 3] * filters,
        "top_p": torch.tensor([1.0, 0.9])[requests % 2] if filters else torch.ones(num_requests),
        "min_p": torch.zeros(num_requests),
    }
    keys = Keys(torch.randint(-(2**62), 2**62, (num_requests,), generator=rng), requests + 3)
    mapped, width = None, vocab_size
    if kind == "reduced":
        d2t = torch.randperm(vocab_size, generator=rng)[: max(2, vocab_size // 4)].sort().values
        t2d = torch.full((vocab_size,), -1).scatter(0, d2t, torch.arange(d2t.numel()))
        mapped, width = VocabMap(d2t, t2d), d2t.numel()
    samples = []
    for index in range(num_drafts):
        near = logits[(first + index).clamp(max=num_rows - 1), :vocab_size].float().nan_to_num()
        noise = torch.randn(near.shape, generator=rng)
        own = near + noise if mapped is None else (near + noise)[:, mapped.d2t]
        samples.append(
            sample_draft(
                own.to(dtype), **sampling, vocab_size=width, keys=keys, offset=index,
                mode="sample", vocab_map=mapped,
            )
        )  # fmt: skip
    ids = torch.stack([s.token_ids for s in samples], 1)
    hidden = torch.rand(ids.shape, generator=rng) < 0.1
    is_delta = torch.stack([s.is_delta for s in samples], 1)
    given = torch.rand(ids.shape, generator=rng) < 0.2
    drafts = Drafts(
        token_ids=torch.where(hidden, -1, ids),
        is_delta=is_delta | given,
        num_drafts=(num_logits - 1).clamp(min=0).minimum(torch.tensor(num_drafts)),
        q=None if kind == "none" else battery.keep_q(samples, mapped),
    )
    cu_num_logits = torch.nn.functional.pad(num_logits.cumsum(0), (1, 0))
    dist = {
        "cu_num_logits": cu_num_logits,
        "batch_rows": torch.arange(num_rows) * 2 + 1,
        "vocab_size": vocab_size,
        "filters": filters,
    }
    return moved(Case(logits, {k: v[owner] for k, v in sampling.items()}, drafts, keys, dist))


def moved(value, device=DEVICE):
    """The same records with their tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, tuple):
        return type(value)(*(moved(v, device) for v in value))
    if isinstance(value, Drafts | DraftDist):
        return type(value)(**{k: moved(v, device) for k, v in vars(value).items()})
    return value


def run(case, verify, kernels, all_greedy=False):
    with using(kernels):
        dist = make_dist(case.logits, **case.sampling, **case.dist, all_greedy=all_greedy)
        assert (dist.block_mass is not None) == (not all_greedy)
        return verify(dist, case.drafts, case.keys), dist


def at_an_edge(case, dist, out):
    """[R] bool: an acceptance test or a quantile lies within `EDGE` of where it would flip."""
    probs, drafts, keys = dist.probs().double(), case.drafts, case.keys
    cu_num_logits = case.dist["cu_num_logits"].tolist()
    num_drafts = drafts.token_ids.shape[1]
    index = torch.arange(num_drafts, device=probs.device)[None]
    accept = uniform(keys, Purpose.ACCEPT, index).double()
    recover = uniform(keys, Purpose.RECOVER, out.num_accepted)
    bonus = uniform(keys, Purpose.BONUS, out.num_accepted)
    edges, q_at = [], []
    if drafts.q is not None:
        for j in range(num_drafts):
            where = torch.full_like(out.num_accepted, j)
            q_at.append(draft_probs(drafts.q, where, probs.shape[1]).double())
    for r, accepted in enumerate(out.num_accepted.tolist()):
        first, end = cu_num_logits[r : r + 2]
        limit = max(min(int(drafts.num_drafts[r]), end - first - 1), 0)
        margin = 1.0
        residual = probs[min(first + accepted, len(probs) - 1)]
        for j in range(min(accepted + 1, limit)):
            token = int(drafts.token_ids[r, j])
            if token < 0:
                continue
            q = torch.zeros_like(residual)
            q[token] = 1.0
            if drafts.q is not None and not drafts.is_delta[r, j]:
                q = q_at[j][r]
            margin = min(margin, abs(float(accept[r, j] * q[token] - probs[first + j, token])))
            if j == accepted:
                rest = (residual - q).clamp(min=0)
                residual = rest if float(rest.sum()) > 0 else residual
        below = residual.cumsum(0)
        draw = bonus[r] if accepted == limit else recover[r]
        crowd = (below[residual > 0] - float(draw) * below[-1]).abs()
        greedy_row = float(residual.max()) == float(residual.sum())
        if end > first and crowd.numel() and not greedy_row:
            margin = min(margin, float(crowd.min()))
        edges.append(margin < EDGE)
    return torch.tensor(edges, device=probs.device)


def same(got, expected, keep):
    for name in ("num_sampled", "num_accepted", "num_rejected", "token_ids", "rows"):
        theirs, ours = getattr(expected, name), getattr(got, name)
        assert theirs.shape == ours.shape
        assert torch.equal(ours[keep], theirs[keep]), name


KINDS = ["none", "full", "reduced"]
SHAPES = [(1, 1000), (2, 1023), (3, 1025), (4, 3), (5, 1024), (6, 4099), (7, 2049)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_drafts", "vocab_size"), [(3, 1025), (7, 3)])
def test_rejection(num_drafts, vocab_size, kind):
    check_rejection(12, num_drafts, vocab_size, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_drafts", "vocab_size"), SHAPES)
def test_rejection_at_more_sizes(num_drafts, vocab_size, kind):
    check_rejection(48, num_drafts, vocab_size, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_drafts", "vocab_size"), [(3, 128256), (7, 151936)])
def test_rejection_at_full_size(num_drafts, vocab_size, kind):
    """Ids crowd a row of probabilities: those within `EDGE` of a quantile are many here."""
    check_rejection(32, num_drafts, vocab_size, kind, least=0.1)


def check_rejection(num_requests, num_drafts, vocab_size, kind, least=0.75):
    dtype = torch.bfloat16 if num_drafts % 2 else torch.float32
    case = make(num_requests, num_drafts, vocab_size, kind, dtype, seed=num_drafts)
    expected, dist = run(case, rejection, "torch")
    got, _ = run(case, rejection, "triton")
    keep = ~at_an_edge(case, dist, expected)
    assert keep.float().mean() > least
    same(got, expected, keep)
    assert set(expected.num_accepted.tolist()) != {0}
    assert int(got.token_ids.max()) < vocab_size


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:2]] + KINDS[2:]
)
def test_rejection_with_filters(kind):
    case = make(8, 2, 1025, kind, filters=True)
    expected, dist = run(case, rejection, "torch")
    got, _ = run(case, rejection, "triton")
    keep = ~at_an_edge(case, dist, expected)
    assert keep.float().mean() > 0.75
    same(got, expected, keep)


@pytest.mark.parametrize("verify", [greedy, delta, gumbel])
@pytest.mark.parametrize(("num_drafts", "vocab_size"), [(3, 1025), (7, 3)])
def test_other_rules(verify, num_drafts, vocab_size):
    case = make(12, num_drafts, vocab_size, "full", torch.bfloat16, seed=1)
    expected, dist = run(case, verify, "torch")
    got, _ = run(case, verify, "triton")
    keep = torch.ones_like(expected.num_accepted, dtype=torch.bool)
    if verify is delta:
        keep = ~at_an_edge(case._replace(drafts=replace(case.drafts, q=None)), dist, expected)
        assert keep.float().mean() > 0.75
    same(got, expected, keep)


@pytest.mark.parametrize("verify", [greedy, rejection, gumbel])
def test_all_greedy(verify):
    case = make(12, 4, 1025, "full", torch.bfloat16)
    expected, _ = run(case, verify, "torch", all_greedy=True)
    got, _ = run(case, verify, "triton", all_greedy=True)
    same(got, expected, torch.ones_like(expected.num_accepted, dtype=torch.bool))
    assert int(expected.token_ids.min()) == -2


def test_complete():
    """What users' own rules end with."""
    case = make(12, 3, 1000, "none")
    accepted = torch.minimum(case.drafts.num_drafts, torch.arange(12, device=DEVICE) % 4)

    def verify(dist, drafts, keys):
        return complete(dist, drafts, accepted, torch.arange(12, device=DEVICE) + 100)

    expected, _ = run(case, verify, "torch")
    got, _ = run(case, verify, "triton")
    same(got, expected, torch.ones_like(accepted, dtype=torch.bool))


def test_placeholders_are_refused_unread():
    """Drafts [5, -1, 7]: at most id 5 stands, and what follows comes from row 0 or 1."""
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[0, 5] = 30.0
    logits[2:] = torch.nan
    ids = torch.tensor([[5, -1, 7]], device=DEVICE)
    drafts = Drafts(ids, torch.ones_like(ids, dtype=torch.bool), one * 3)
    dist = {
        "cu_num_logits": torch.tensor([0, 4], device=DEVICE),
        "batch_rows": torch.arange(4, device=DEVICE),
        "vocab_size": 1000,
    }
    sampling = moved(battery.neutral(4))
    for verify in (delta, rejection, gumbel, greedy):
        case = Case(logits, sampling, drafts, Keys(one * 3, one * 9), dist | {"filters": False})
        got, _ = run(case, verify, "triton")
        assert got.num_accepted.tolist() == [1]
        assert got.rows.tolist() == [[0, 1, 1, 1]]
        assert got.token_ids[0, 0] == 5
        assert 0 <= int(got.token_ids[0, 1]) < 1000


@pytest.mark.gpu
def test_offsets_past_32_bits():
    """16,000 rows of 151,936 ids: the last row's offset is past 2 ** 31."""
    num_rows, vocab_size = 16_000, 151_936
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    logits[-1, 123] = 9.0
    logits[:-1, 77] = 9.0
    one = torch.ones(num_rows, dtype=torch.int64, device="cuda")
    grid = torch.zeros(num_rows, 0, dtype=torch.int64, device="cuda")
    dist = {
        "cu_num_logits": torch.arange(num_rows + 1, device="cuda"),
        "batch_rows": torch.arange(num_rows, device="cuda"),
        "vocab_size": vocab_size,
        "filters": False,
    }
    sampling = moved(battery.neutral(num_rows, 0.01))
    case = Case(logits, sampling, Drafts(grid, grid.bool(), one * 0), Keys(one, one), dist)
    for verify in (greedy, rejection, gumbel):
        got, _ = run(case, verify, "triton", all_greedy=verify is greedy)
        assert int(got.token_ids[-1, 0]) == 123
        assert bool((got.token_ids[:-1] == 77).all())


def types(*names):
    """Types of kernel arguments by their names."""
    longs = ("argmax", "cu_num_logits", "batch_rows", "draft_ids", "num_drafts", "q_slots", "t2d")
    longs += ("seeds", "round_start", "token_ids", "rows", "counts", "tokens", "accepted")
    longs += ("stop_token",)
    out = {}
    for name in names:
        stem = name.removesuffix("_ptr")
        if stem == name:
            out[name] = "i64" if name.endswith("stride") else "i32"
        elif stem in longs:
            out[name] = "*i64"
        elif stem in ("logits", "q_logits"):
            out[name] = "*bf16"
        else:
            out[name] = {"greedy": "*i1", "is_delta": "*i1", "pending": "*i32"}.get(stem, "*fp32")
    return out


def test_compiles_for_sm_90():
    compiles = []
    purposes = {"ACCEPT": 1, "RECOVER": 2, "BONUS": 3}
    for size, blocks, has_q, mapped in (
        (4096, 32, False, False),
        (4096, 32, True, False),
        (1024, 8, True, True),
    ):
        some = {"BLOCK": size, "MAPPED": mapped, "OVERLAP": True}
        sizes = some | {"BLOCKS": blocks}
        decide = purposes | sizes | {"COLUMNS": 4, "HAS_Q": has_q}
        compiles.append(("kernel", "_decide", decide))
        if has_q:
            compiles.append(("kernel", "_residual_mass", some))
            compiles.append(("kernel", "_draw_residual", sizes | {"RECOVER": 2}))
    compiles += [
        ("record", "_match", {"COLUMNS": 8, "OVERLAP": True}),
        ("record", "_complete", {"COLUMNS": 8, "OVERLAP": True}),
    ]
    jobs = []
    for file, kernel, constants in compiles:
        module = importlib.import_module(f"specdec.kernels.verification.{file}")
        arguments = list(inspect.signature(getattr(module, kernel).fn).parameters)
        signature = types(*(a for a in arguments if a not in constants))
        warps = constants["BLOCK"] // 512 if "BLOCK" in constants else 1
        jobs.append(compiling.Compile(module.__name__, kernel, signature, constants, warps))
    for built in compiling.compile_sm90(jobs):
        assert built.spilled == 0
