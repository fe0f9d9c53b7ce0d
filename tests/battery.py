"""Does a rule leave the target's distribution as it is? Checks for every rule, bare or through the
engine: joint distributions over several rounds against exact enumeration, and a scalar restatement
of rejection sampling to compare with token for token.

Draws are seeded: a check either always passes or always fails.
"""

import math
from typing import NamedTuple

import torch
from scipy.stats import chi2

from specdec.draft_sampling import sample_draft
from specdec.keys import Keys, Purpose, uniform
from specdec.sampling import make_dist
from specdec.state import DraftDist, Drafts

PROMPT_LEN = 5  # where the first sampled token sits


class Chain(NamedTuple):
    """Target and draft as Markov chains over V ids: rows are the next token's probabilities."""

    target: torch.Tensor  # [V, V]
    draft: torch.Tensor  # [K, V, V], another chain at each index of a round


class Decoded(NamedTuple):
    tokens: torch.Tensor  # [R, length]
    drafted: int
    accepted: int


def random_chain(vocab_size, num_drafts, seed, sharpness=1.0):
    """A chain whose drafts resemble the target, less so at every further index."""
    rng = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab_size, vocab_size, generator=rng) * sharpness
    noise = torch.randn(num_drafts, vocab_size, vocab_size, generator=rng) * sharpness
    weight = torch.linspace(0.3, 0.9, num_drafts)[:, None, None]
    return Chain(target.softmax(-1), ((1 - weight) * target + weight * noise).softmax(-1))


def neutral(num_rows, temperature=1.0):
    """Sampling parameters that change nothing but the temperature."""
    return {
        "temperature": torch.full((num_rows,), temperature),
        "top_k": torch.zeros(num_rows, dtype=torch.int64),
        "top_p": torch.ones(num_rows),
        "min_p": torch.zeros(num_rows),
    }


def ragged_dist(logits, num_logits, vocab_size=None, **sampling):
    """A TargetDist of logits [N, V] whose requests own `num_logits` [R] rows each."""
    cu_num_logits = torch.nn.functional.pad(num_logits.cumsum(0), (1, 0))
    flags = {key: sampling.pop(key) for key in ("filters", "all_greedy") if key in sampling}
    return make_dist(
        logits,
        **(neutral(logits.shape[0]) | sampling),
        cu_num_logits=cu_num_logits,
        batch_rows=torch.arange(logits.shape[0]),
        vocab_size=logits.shape[1] if vocab_size is None else vocab_size,
        **flags,
    )


def keep_q(samples, vocab_map=None):
    """The DraftDist of a chain of `DraftSample`s, request r in slot r."""
    return DraftDist(
        logits=torch.stack([s.logits for s in samples], 1),
        max=torch.stack([s.max for s in samples], 1),
        cutoff=torch.stack([s.cutoff for s in samples], 1),
        lse=torch.stack([s.lse for s in samples], 1),
        inv_temperature=samples[0].inv_temperature,
        slots=torch.arange(samples[0].token_ids.shape[0]),
        vocab_map=vocab_map,
    )


def propose(chain, last, keys, num_drafts, mode, sampling, filters):
    """Drafts [R, K] of the chain's own draft model, the first `num_drafts` [R] of them pending."""
    previous, samples = last, []
    for index, table in enumerate(chain.draft):
        sample = sample_draft(
            table[previous].log(),
            **sampling,
            vocab_size=table.shape[-1],
            keys=keys,
            offset=index,
            mode=mode,
            filters=filters,
        )
        samples.append(sample)
        previous = sample.token_ids
    return Drafts(
        token_ids=torch.stack([s.token_ids for s in samples], 1),
        is_delta=torch.stack([s.is_delta for s in samples], 1),
        num_drafts=num_drafts,
        q=keep_q(samples),
    )


def decode(
    rule,
    chain,
    *,
    num_requests,
    length,
    mode,
    ragged=True,
    placeholders=False,
    sampling=None,
    proposer=propose,
    seed=0,
):
    """Rounds of propose and verify until every request holds `length` tokens.

    All requests start after id 0 with seeds of their own. `ragged` lets the number of drafts
    cycle over 0 .. K, by request and round; `placeholders` hides some drafts behind -1.
    """
    num_drafts = chain.draft.shape[0]
    requests = torch.arange(num_requests)
    seeds = requests * 7919 + seed
    filters = sampling is not None and set(sampling) != {"temperature"}
    parameters = neutral(1) | (sampling or {})
    per_request = {k: v.expand(num_requests) for k, v in parameters.items()}
    tokens = torch.zeros(num_requests, length + num_drafts + 1, dtype=torch.int64)
    filled = torch.zeros(num_requests, dtype=torch.int64)
    last = torch.zeros(num_requests, dtype=torch.int64)
    columns = torch.arange(num_drafts + 1)
    drafted = accepted = rounds = 0
    while int(filled.min()) < length:
        keys = Keys(seeds, PROMPT_LEN + filled)
        pending = torch.full_like(requests, num_drafts)
        if ragged:
            pending = (requests + rounds) % (num_drafts + 1)
        drafts = proposer(chain, last, keys, pending, mode, per_request, filters)
        inputs = torch.cat([last[:, None], drafts.token_ids], 1)  # [R, K + 1]
        if placeholders:
            hidden = (requests[:, None] + columns[:-1] + rounds) % 4 == 3
            drafts.token_ids.masked_fill_(hidden, -1)
        real = columns <= pending[:, None]
        logits = chain.target[inputs[real]].log()
        owner = requests[:, None].expand_as(real)[real]
        dist = ragged_dist(
            logits, pending + 1, filters=filters, **{k: v[owner] for k, v in per_request.items()}
        )
        out = rule(dist, drafts, keys)
        kept = columns < out.num_sampled[:, None]
        position = (filled[:, None] + columns).clamp(max=tokens.shape[1] - 1)
        old = tokens.gather(1, position)
        tokens.scatter_(1, position, torch.where(kept, out.token_ids, old))
        last = out.token_ids.gather(1, out.num_accepted[:, None])[:, 0]
        drafted += int(pending.sum())
        accepted += int(out.num_accepted.sum())
        filled = (filled + out.num_sampled).clamp(max=length)
        # a request that is done decodes on past `length`, unseen
        rounds += 1
    return Decoded(tokens[:, :length], drafted, accepted)


def mixed(num_rows, vocab_size, seed=0, dtype=torch.float32):
    """Logits [num_rows, V] and parameters that take every branch of sampling in one batch."""
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=rng) * 3).to(dtype)
    index = torch.arange(num_rows)
    sampling = {
        "temperature": torch.tensor([1.0, 0.0, 0.6, 1.7])[index % 4],
        "top_k": torch.tensor([0, 0, 3, 5, 2])[index % 5],
        "top_p": torch.tensor([1.0, 0.8, 0.95])[index % 3],
        "min_p": torch.tensor([0.0, 0.0, 0.1])[index % 3],
    }
    return logits, sampling


def verify_many(
    rule, target, draft=None, *, num_draws=100_000, mode="sample", ids=None, **sampling
):
    """One step under `num_draws` seeds: the same rows, drafts made anew under each.

    Args:
        target: [k + 1, V] logits; draft: [k, V] logits, or `ids`: k one-hot proposals.
        sampling: parameters as scalars, for target and draft alike.

    Returns:
        The Verification of all draws, and the ids [num_draws, k] that were proposed.
    """
    num_drafts = target.shape[0] - 1
    keys = Keys(torch.arange(num_draws), torch.full((num_draws,), PROMPT_LEN))
    pending = torch.full((num_draws,), num_drafts)
    fixed = {name: torch.tensor([value]) for name, value in sampling.items()}

    def parameters(rows):
        return {k: v[:1].expand(rows) for k, v in (neutral(1) | fixed).items()}

    if ids is not None:
        token_ids = torch.tensor(ids).expand(num_draws, -1)
        drafts = Drafts(token_ids, torch.ones_like(token_ids, dtype=torch.bool), pending)
    else:
        samples = [
            sample_draft(
                row.expand(num_draws, -1),
                **parameters(num_draws),
                vocab_size=row.shape[-1],
                keys=keys,
                offset=index,
                mode=mode,
            )
            for index, row in enumerate(draft)
        ]
        drafts = Drafts(
            torch.stack([s.token_ids for s in samples], 1),
            torch.stack([s.is_delta for s in samples], 1),
            pending,
            keep_q(samples),
        )
    logits = target.repeat(num_draws, 1)
    dist = ragged_dist(logits, pending + 1, **parameters(logits.shape[0]))
    return rule(dist, drafts, keys), drafts.token_ids


def frequencies(ids, vocab_size):
    """[V] fp64 shares of drawn ids [n]."""
    return torch.bincount(ids, minlength=vocab_size).double() / ids.shape[0]


def joint_probs(target, length, start=0):
    """Exact probabilities [V ** length] fp64 of the first tokens, in `joint_ids` order."""
    joint = target[start].double()
    for _ in range(length - 1):
        joint = (joint.view(-1, target.shape[0], 1) * target.double()).flatten()
    return joint


def joint_ids(tokens, vocab_size):
    """One id [R] for each row of tokens [R, length]."""
    ids = torch.zeros_like(tokens[:, 0])
    for column in tokens.unbind(1):
        ids = ids * vocab_size + column
    return ids


class Fit(NamedTuple):
    p_value: float
    total_variation: float
    limit: float  # of total variation, thrice its mean under exact sampling

    @property
    def good(self):
        return self.p_value > 1e-4 and self.total_variation < self.limit


def fit(ids, probs):
    """Chi-square and total variation of drawn ids [n] against probabilities [V].

    A drawn id of probability 0 is an infinitely bad fit. Cells that expect fewer than 5 are pooled.
    """
    probs = probs.double() / probs.double().sum()
    n = ids.shape[0]
    counts = torch.bincount(ids, minlength=probs.shape[0]).double()
    assert counts.shape == probs.shape, "an id outside the vocabulary was drawn"
    variation = float((counts / n - probs).abs().sum()) / 2
    limit = 3 * 0.5 * math.sqrt(2 / math.pi / n) * float((probs * (1 - probs)).sqrt().sum())
    if bool((counts[probs == 0] > 0).any()):
        return Fit(0.0, variation, limit)
    expected = probs * n
    large = expected >= 5
    observed = torch.cat([counts[large], counts[~large].sum()[None]])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    used = expected > 0
    statistic = float(((observed - expected).square() / expected)[used].sum())
    p_value = float(chi2.sf(statistic, max(int(used.sum()) - 1, 1)))
    return Fit(p_value, variation, limit)


def assert_fits(ids, probs):
    result = fit(ids, probs)
    assert result.good, result


def joint_fits(tokens, target):
    """Fits of the joint of all columns and of each column's marginal."""
    vocab_size, length = target.shape[0], tokens.shape[1]
    joint = joint_probs(target, length)
    grid = joint.view((vocab_size,) * length)
    fits = [fit(joint_ids(tokens, vocab_size), joint)]
    for column in range(length):
        others = [d for d in range(length) if d != column]
        fits.append(fit(tokens[:, column], grid.sum(others) if others else grid))
    return fits


def filtered(probs, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Each row [V] after temperature and filters, restated with loops in fp64."""
    out = torch.zeros(probs.shape, dtype=torch.float64)
    for row, weights in zip(out, probs.double(), strict=True):
        weights = weights ** (1 / temperature)
        weights = weights / weights.sum()
        order = sorted(range(len(weights)), key=lambda i: -float(weights[i]))
        if top_k:
            floor = weights[order[min(top_k, len(order)) - 1]]
            order = [i for i in order if weights[i] >= floor]
        if top_p < 1:
            mass, total = 0.0, sum(float(weights[i]) for i in order)
            for i in order:
                floor = weights[i]
                mass += float(weights[i])
                if mass >= (top_p - 1e-6) * total:
                    break
            order = [i for i in order if weights[i] >= floor]
        order = [i for i in order if weights[i] >= (min_p - 1e-7) * weights.max()]
        row[order] = weights[order] / weights[order].sum()
    return out


def plain_rejection(target_probs, draft_probs, draft_ids, keys, request):
    """Rejection sampling of one request, restated with loops in fp64 from the paper's text.

    Args:
        target_probs: [k + 1, V]; draft_probs: k rows [V]; draft_ids: k ids, -1 proposes nothing.

    Returns:
        Accepted ids followed by the recovered or bonus one.
    """
    one = Keys(keys.seeds[request : request + 1], keys.round_start[request : request + 1])
    kept = []
    for j, token in enumerate(draft_ids):
        p, q = target_probs[j].double(), draft_probs[j].double()
        if token >= 0 and float(uniform(one, Purpose.ACCEPT, j)) < float(p[token] / q[token]):
            kept.append(token)
            continue
        residual = (p - q).clamp(min=0) if token >= 0 else p
        residual = residual if float(residual.sum()) > 0 else p
        return [*kept, inverse_cdf(residual, float(uniform(one, Purpose.RECOVER, j)))]
    bonus = uniform(one, Purpose.BONUS, len(draft_ids))
    return [*kept, inverse_cdf(target_probs[len(draft_ids)].double(), float(bonus))]


def inverse_cdf(weights, draw):
    below = 0.0
    quantile = draw * float(weights.sum())
    for token, weight in enumerate(weights.tolist()):
        below += weight
        if weight > 0 and below > quantile:
            return token
    return int(weights.nonzero()[-1])
