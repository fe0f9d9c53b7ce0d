"""One step of each rule: any size, ragged and padded batches, placeholders, invalid rows."""

from dataclasses import replace
from functools import partial

import battery
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from specdec.draft_sampling import sample_draft
from specdec.keys import Keys
from specdec.sampling import target_probs
from specdec.state import INVALID_TOKEN_ID, DraftDist, Drafts, Verification
from specdec.verify import RuleTraits, rule, traits_of
from specdec.verify.delta import delta
from specdec.verify.greedy import greedy
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

RULES = [greedy, delta, rejection, gumbel]


def step_case(vocab_size, num_drafts, seed, num_requests=12, width=None, temperature=None):
    """Random requests, each with its own number of drafts; the last owns no logits rows.

    Returns:
        dist, drafts, keys, and probabilities fp64: p [N, V] and q [R, K, V].
    """
    rng = torch.Generator().manual_seed(seed)
    width = vocab_size if width is None else width
    pending = torch.randint(0, num_drafts + 1, (num_requests,), generator=rng)
    pending[0], pending[-1] = num_drafts, 0
    num_logits = pending + 1
    num_logits[-1] = 0
    num_rows = int(num_logits.sum())
    if temperature is None:
        temperature = torch.ones(num_requests)
    logits = torch.randn(num_rows, width, generator=rng) * 2
    draft_logits = torch.randn(num_requests, num_drafts, width, generator=rng) * 2
    shared = torch.randn(width, generator=rng) * 3  # so that p and q agree on something
    logits, draft_logits = logits + shared, draft_logits + shared
    keys = Keys(torch.arange(num_requests) + 1000 * seed, 40 + pending)
    samples = [
        sample_draft(
            draft_logits[:, j],
            **battery.neutral(num_requests),
            vocab_size=vocab_size,
            keys=keys,
            offset=j,
            mode="sample",
        )
        for j in range(num_drafts)
    ]
    is_delta = torch.rand(num_requests, num_drafts, generator=rng) < 0.3
    token_ids = torch.stack([s.token_ids for s in samples], 1)
    token_ids[torch.rand(num_requests, num_drafts, generator=rng) < 0.1] = -1
    one_hot = torch.nn.functional.one_hot(token_ids.clamp(min=0), vocab_size).double()
    q = draft_logits[..., :vocab_size].double().softmax(-1)
    drafts = Drafts(token_ids, is_delta, pending, battery.keep_q(samples))
    owner = torch.repeat_interleave(torch.arange(num_requests), num_logits)
    dist = battery.ragged_dist(logits, num_logits, vocab_size, temperature=temperature[owner])
    p = logits[:, :vocab_size].double().softmax(-1)
    return dist, drafts, keys, p, torch.where(is_delta[..., None], one_hot, q)


def request_alone(dist, drafts, keys, r):
    """The same step with request r only."""
    start, end = dist.cu_num_logits[r : r + 2].tolist()
    rows = {
        name: getattr(dist, name)[start:end]
        for name in ("logits", "max", "inv_temperature", "cutoff", "lse", "greedy", "argmax")
    }
    one = replace(
        dist,
        **rows,
        cu_num_logits=torch.tensor([0, end - start]),
        batch_rows=dist.batch_rows[start:end],
    )
    own = Drafts(
        drafts.token_ids[r : r + 1],
        drafts.is_delta[r : r + 1],
        drafts.num_drafts[r : r + 1],
        drafts.q if drafts.q is None else replace(drafts.q, slots=drafts.q.slots[r : r + 1]),
    )
    return one, own, Keys(keys.seeds[r : r + 1], keys.round_start[r : r + 1])


def equal(a: Verification, b: Verification):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SIZES = [(3, 1), (3, 7), (1000, 2), (1023, 3), (1024, 4), (1025, 5), (2500, 6), (49152, 2)]


@pytest.mark.parametrize("pad", [0, 5], ids=["", "padded"])
@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_rejection_equals_a_scalar_restatement(vocab_size, num_drafts, pad):
    dist, drafts, keys, p, q = step_case(vocab_size, num_drafts, seed=7, width=vocab_size + pad)
    out = rejection(dist, drafts, keys)
    for r, k in enumerate(drafts.num_drafts.tolist()):
        start, end = dist.cu_num_logits[r : r + 2].tolist()
        if start == end:
            assert out.token_ids[r].tolist() == [-1] * (num_drafts + 1)
            continue
        ids = drafts.token_ids[r, :k].tolist()
        wanted = battery.plain_rejection(p[start:end], q[r], ids, keys, r)
        n = len(wanted)
        assert out.token_ids[r].tolist() == wanted + [-1] * (num_drafts + 1 - n)
        assert out.rows[r, :n].tolist() == list(range(start, start + n))
        counts = (out.num_accepted[r], out.num_sampled[r], out.num_rejected[r])
        assert counts == (n - 1, n, k - n + 1)
    assert int(out.token_ids.max()) < vocab_size


@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES[:-1])
def test_any_size_batched_equals_alone(verify, vocab_size, num_drafts):
    """Greedy, sampled and one-hot rows, ragged drafts, a prefill chunk and padding in one batch."""
    temperature = torch.tensor([1.0, 0.0, 0.7] * 4)
    dist, drafts, keys, _, _ = step_case(
        vocab_size, num_drafts, seed=8, width=vocab_size + 3, temperature=temperature
    )
    out = verify(dist, drafts, keys)
    assert int(out.token_ids.max()) < vocab_size
    assert torch.equal(out.token_ids >= 0, torch.arange(num_drafts + 1) < out.num_sampled[:, None])
    assert torch.equal(out.num_sampled[:-1], out.num_accepted[:-1] + 1)
    assert torch.equal(out.num_rejected, drafts.num_drafts - out.num_accepted)
    assert out.num_sampled[-1] == out.num_rejected[-1] == 0
    index = torch.arange(num_drafts)
    kept = index < out.num_accepted[:, None]
    assert torch.equal(out.token_ids[:, :-1][kept], drafts.token_ids[kept])
    for r in range(len(temperature) - 1):
        alone = verify(*request_alone(dist, drafts, keys, r))
        assert all(
            torch.equal(getattr(alone, name)[0], getattr(out, name)[r]) for name in alone._fields
        )
    empty = verify(*request_alone(dist, drafts, keys, len(temperature) - 1))
    assert empty.token_ids.tolist() == [[-1] * (num_drafts + 1)]
    assert empty.num_sampled.tolist() == empty.num_rejected.tolist() == [0]


@pytest.mark.parametrize("verify", RULES)
def test_no_draft_columns(verify):
    """K = 0: the bonus token at offset 0, equal to that of a request whose drafts ran out."""
    dist = battery.ragged_dist(torch.randn(3, 11), torch.ones(3, dtype=torch.int64))
    keys = Keys(torch.arange(3), torch.tensor([4, 5, 6]))
    grid = torch.zeros(3, 0, dtype=torch.int64)
    zeros = torch.zeros(3, dtype=torch.int64)
    out = verify(dist, Drafts(grid, grid.bool(), zeros), keys)
    assert out.token_ids.shape == out.rows.shape == (3, 1)
    assert out.num_sampled.tolist() == [1, 1, 1]
    assert out.rows.tolist() == [[0], [1], [2]]
    padded = Drafts(torch.full((3, 2), -1), torch.ones(3, 2, dtype=torch.bool), zeros)
    assert torch.equal(verify(dist, padded, keys).token_ids[:, :1], out.token_ids)


@pytest.mark.parametrize("verify", RULES)
def test_unscheduled_drafts_are_refused(verify):
    """Two drafts pending, logits rows for one: the second cannot stand."""
    logits = torch.full((2, 4), -1e3)
    logits[0, 2] = logits[1, 3] = 0.0
    dist = battery.ragged_dist(logits, torch.tensor([2]))
    drafts = Drafts(torch.tensor([[2, 3]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([2]))
    out = verify(dist, drafts, Keys(torch.tensor([1]), torch.tensor([9])))
    assert out.token_ids.tolist() == [[2, 3, -1]]
    assert (out.num_accepted, out.num_sampled, out.num_rejected) == (1, 2, 1)


@pytest.mark.parametrize("verify", RULES)
@pytest.mark.parametrize("with_q", [False, True])
def test_placeholder_in_the_middle(verify, with_q):
    """CASES N4: drafts [5, -1, 7] accept at most id 5, and the next token comes from row 1."""
    vocab_size, num_requests = 8, 4000
    logits = torch.full((4, vocab_size), -40.0)
    logits[0, 5], logits[1, 2], logits[1, 3], logits[2, 7], logits[3, 1] = 0.0, 0.0, -1.0, 0.0, 0.0
    ids = torch.tensor([5, -1, 7]).expand(num_requests, -1)
    q = None
    if with_q:
        shape = (num_requests, 3)
        q = DraftDist(
            torch.zeros(*shape, vocab_size),
            torch.zeros(shape),
            torch.full(shape, -torch.inf),
            torch.full(shape, 8.0).log(),
            torch.ones(num_requests),
            torch.arange(num_requests),
            None,
        )
    drafts = Drafts(ids, torch.full(ids.shape, not with_q), torch.full((num_requests,), 3), q)
    dist = battery.ragged_dist(logits.repeat(num_requests, 1), torch.full((num_requests,), 4))
    out = verify(dist, drafts, Keys(torch.arange(num_requests), torch.full((num_requests,), 6)))
    assert out.num_accepted.unique().tolist() == [1]
    assert out.token_ids[:, 0].unique().tolist() == [5]
    assert torch.equal(out.rows[:, 1], torch.arange(num_requests) * 4 + 1)
    assert out.token_ids[:, 2:].unique().tolist() == [-1]
    second = out.token_ids[:, 1]
    assert set(second.tolist()) == ({2} if verify is greedy else {2, 3})
    if verify is not greedy:
        assert abs(float((second == 2).float().mean()) - 1 / (1 + 0.36788)) < 0.03


def test_draft_that_q_cannot_have_made_is_refused():
    """CASES N4: q(x) = 0 divides nothing; x then comes from the residual like any other id."""
    num_requests = 2000
    draft_logits = torch.tensor([0.0, -torch.inf, 0.0]).expand(num_requests, -1)
    keys = Keys(torch.arange(num_requests), torch.full((num_requests,), 3))
    sample = sample_draft(
        draft_logits,
        **battery.neutral(num_requests),
        vocab_size=3,
        keys=keys,
        offset=0,
        mode="sample",
    )
    drafts = Drafts(
        torch.ones(num_requests, 1, dtype=torch.int64),
        torch.zeros(num_requests, 1, dtype=torch.bool),
        torch.ones(num_requests, dtype=torch.int64),
        battery.keep_q([sample]),
    )
    target = torch.tensor([0.2, 0.3, 0.5]).log().expand(2 * num_requests, -1)
    out = rejection(battery.ragged_dist(target, drafts.num_drafts + 1), drafts, keys)
    assert out.num_accepted.unique().tolist() == [0]
    assert out.token_ids[:, 0].unique().tolist() == [1]  # the whole of max(p - q, 0)


BAD_ROWS = {
    "nan": lambda row: row.fill_(torch.nan),
    "one-nan": lambda row: row[2:3].fill_(torch.nan),
    "plus-inf": lambda row: row[1:2].fill_(torch.inf),
    "minus-inf": lambda row: row.fill_(-torch.inf),
}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("verify", RULES)
def test_row_that_is_not_finite(verify, bad, temperature):
    """CASES N1: its request ends in INVALID_TOKEN_ID there; the neighbours are as without it."""
    _, drafts, keys, _, _ = step_case(64, 3, seed=4, num_requests=3)
    ids = drafts.token_ids.clamp(min=0)
    drafts = replace(drafts, token_ids=ids, num_drafts=torch.tensor([3, 3, 0]))
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    counts = torch.tensor([4, 4, 1])
    scale = {"temperature": torch.full((9,), temperature)}
    clean = verify(battery.ragged_dist(logits, counts, **scale), drafts, keys)
    for row in (4, 7):  # request 1's first row and its bonus row
        damaged = logits.clone()
        BAD_ROWS[bad](damaged[row])
        accepted = row - 4
        damaged[4:row] = -1e4
        damaged[torch.arange(4, row), ids[1, :accepted]] = 0.0  # certain to be accepted
        out = verify(battery.ragged_dist(damaged, counts, **scale), drafts, keys)
        assert out.token_ids[1, accepted] == INVALID_TOKEN_ID
        assert out.num_accepted[1] == accepted
        assert out.token_ids[1, accepted + 1 :].unique().tolist() in ([], [-1])
        for r in (0, 2):
            assert torch.equal(out.token_ids[r], clean.token_ids[r])


@pytest.mark.parametrize("verify", RULES)
def test_step_without_logits_rows(verify):
    dist = battery.ragged_dist(torch.zeros(0, 7), torch.zeros(2, dtype=torch.int64))
    zeros = torch.zeros(2, dtype=torch.int64)
    drafts = Drafts(torch.full((2, 3), -1), torch.ones(2, 3, dtype=torch.bool), zeros)
    out = verify(dist, drafts, Keys(zeros, zeros))
    assert out.token_ids.tolist() == [[-1] * 4] * 2
    assert out.num_sampled.tolist() == out.num_rejected.tolist() == [0, 0]


@pytest.mark.parametrize("verify", RULES)
def test_all_greedy_flag_changes_nothing(verify):
    dist, drafts, keys, _, _ = step_case(300, 4, seed=6, temperature=torch.zeros(12))
    drafts.token_ids[0, :4] = dist.argmax[:4]
    counts = dist.cu_num_logits.diff()
    flagged = battery.ragged_dist(dist.logits, counts, all_greedy=True)
    out = verify(dist, drafts, keys)
    assert out.num_accepted[0] == 4
    assert equal(out, verify(flagged, drafts, keys))
    assert torch.equal(target_probs(dist), target_probs(flagged))


@pytest.mark.parametrize("verify", [*RULES, partial(gumbel, noise="shared")])
@pytest.mark.parametrize("mode", ["greedy", "sample", "shared"])
@pytest.mark.parametrize("filters", [False, True])
def test_nothing_is_read_on_the_host(verify, mode, filters):
    """Fake tensors hold no values: reading one, or a shape that depends on one, raises."""
    with FakeTensorMode(), torch.device("cpu"):
        num_requests, num_drafts, vocab_size = 3, 2, 1500
        pending = torch.full((num_requests,), num_drafts)
        keys = Keys(torch.arange(num_requests), pending + 7)
        samples = [
            sample_draft(
                torch.randn(num_requests, vocab_size),
                **battery.neutral(num_requests),
                vocab_size=vocab_size - 1,
                keys=keys,
                offset=j,
                mode=mode,
                filters=filters,
            )
            for j in range(num_drafts)
        ]
        drafts = Drafts(
            torch.stack([s.token_ids for s in samples], 1),
            torch.stack([s.is_delta for s in samples], 1),
            pending,
            battery.keep_q(samples),
        )
        logits = torch.randn(num_requests * (num_drafts + 1), vocab_size)
        dist = battery.ragged_dist(logits, pending + 1, vocab_size - 1, filters=filters)
        out = verify(dist, drafts, keys)
        assert out.token_ids.shape == (num_requests, num_drafts + 1)
        with pytest.raises(DataDependentOutputException):
            out.num_accepted.tolist()


def test_traits_of_the_rules():
    assert traits_of(greedy) == RuleTraits(lossless=True, greedy_only=True)
    assert traits_of(delta) == RuleTraits(lossless=True)
    assert traits_of(rejection) == RuleTraits(lossless=True, wants_draft_probs=True)
    assert traits_of(partial(rejection)) == traits_of(rejection)
    assert traits_of(gumbel).noise == "independent"
    assert traits_of(partial(gumbel, noise="shared")).noise == "shared"
    assert traits_of(partial(partial(gumbel, noise="shared"), noise="independent")).noise == (
        "independent"
    )


def test_traits_of_a_users_function():
    def mine(dist, drafts, keys, *, noise="odd"):
        return dist

    assert traits_of(mine) == RuleTraits()
    assert traits_of(partial(mine, noise="odd")) == RuleTraits()
    declared = rule(lossless=False, wants_draft_probs=True)(mine)
    assert declared is mine
    assert traits_of(partial(mine)) == RuleTraits(lossless=False, wants_draft_probs=True)


def test_gumbel_refuses_an_unknown_noise():
    dist = battery.ragged_dist(torch.zeros(1, 3), torch.ones(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"noise='loud' is not one of independent, shared"):
        gumbel(dist, None, None, noise="loud")
