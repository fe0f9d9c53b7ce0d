"""The engine: distribution of what it emits, seeds, errors, aborts, bookkeeping."""

from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from battery import joint_fits, random_chain
from running import requests, tiny_engine
from tiny import tiny_draft, tiny_params, tiny_target

from specdec.errors import ConfigError, RequestError
from specdec.generate import generate
from specdec.models.batch import Cache, Draft, DraftOutput, Target, TargetOutput, VocabMap
from specdec.models.llama import llama_target
from specdec.propose.autoregressive import autoregressive
from specdec.schedule import Request
from specdec.state import Drafts, Verification
from specdec.verify.delta import delta
from specdec.verify.greedy import greedy
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def markov_target(chain):
    """A target whose next token depends on the last one only."""
    table = chain.target.log()
    return Target(
        config=None,
        params=None,
        forward=lambda batch, cache: TargetOutput(one_hot(batch.input_ids, table)),
        logits=lambda hidden: hidden @ table,
        new_cache=lambda shape: Cache((), ()),
        vocab_size=len(table),
        max_position=10**6,
        embed=table,
        lm_head=table,
    )


def markov_draft(chain):
    """The chain's own draft: another transition table at each draft step."""
    tables = chain.draft.log()

    def forward(input_ids, hidden, batch, cache, step):
        rows = one_hot(input_ids, tables[0])
        return DraftOutput(rows, rows)

    return Draft(
        config=None,
        params=None,
        features=lambda out: out.hidden,
        forward=forward,
        logits=lambda rows, step: rows @ tables[step],
        new_cache=lambda shape: Cache((), ()),
        logits_size=tables.shape[1],
        vocab_size=tables.shape[2],
        vocab_map=None,
        max_position=10**6,
    )


def one_hot(ids, table):
    return torch.nn.functional.one_hot(ids, len(table)).to(table.dtype)


def chain_engine(chain, rule, mode, draft=None, num_blocks=8001):
    return tiny_engine(
        markov_target(chain),
        draft or markov_draft(chain),
        autoregressive,
        rule,
        k=3,
        draft_sampling=mode,
        max_num_seqs=2000,
        max_num_batched_tokens=8000,
        max_model_len=12,
        num_blocks=num_blocks,
        eos=(),
    )


RULES = [
    (rejection, "sample"),
    (rejection, "greedy"),
    (delta, "greedy"),
    (delta, "sample"),
    (gumbel, "sample"),
    (partial(gumbel, noise="shared"), "shared"),
]


@pytest.mark.parametrize(("rule", "mode"), RULES)
@pytest.mark.parametrize("draws", [8_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_engine_emits_the_target_distribution(rule, mode, draws):
    """Joint of three tokens, over several rounds, against exact enumeration."""
    chain = random_chain(vocab_size=4, num_drafts=3, seed=11)
    engine = chain_engine(chain, rule, mode)
    asked = [Request((0,), max_tokens=4, temperature=1.0, seed=s) for s in range(draws)]
    results = generate(engine, asked)
    tokens = torch.tensor([r.token_ids for r in results])
    for result in joint_fits(tokens[:, :3], chain.target):
        assert result.good, result
    assert sum(r.accepted for result in results for r in result.rounds) > 0


@pytest.mark.parametrize("draws", [6_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["sample", "greedy"])
def test_what_disturbs_rounds_leaves_the_distribution(mode, draws):
    """A drafter that lacks an id, another K at every step, and preemption with drafts pending."""
    chain = random_chain(vocab_size=4, num_drafts=3, seed=11)
    d2t, t2d = torch.tensor([0, 2, 3]), torch.tensor([0, -1, 1, 2])
    whole = markov_draft(chain)
    draft = whole._replace(
        logits=lambda rows, step: whole.logits(rows, step)[:, d2t],
        logits_size=3,
        vocab_size=3,
        vocab_map=VocabMap(d2t, t2d),
    )
    engine = chain_engine(chain, rejection, mode, draft=draft, num_blocks=2600)
    plan, ks = engine.stages.schedule, cycle((3, 0, 1, 3, 2))
    engine.stages = engine.stages._replace(
        schedule=lambda *args: plan(*args, num_draft_tokens=next(ks))
    )
    asked = [Request((0,), max_tokens=4, temperature=1.0, seed=s) for s in range(draws)]
    results = generate(engine, asked)
    rounds = [r for result in results for r in result.rounds]
    assert engine.num_preemptions > 100
    assert {r.drafted for r in rounds} == {0, 1, 2}  # three tokens are left after the first
    assert {r.accepted for r in rounds} == {0, 1, 2}
    for result in joint_fits(torch.tensor([r.token_ids for r in results])[:, :3], chain.target):
        assert result.good, result


def test_battery_catches_a_lossy_engine():
    """The same check fails for a rule that accepts every draft."""

    def accept_all(dist, drafts, keys):
        from specdec.verify import complete

        return complete(dist, drafts, drafts.num_drafts, dist.argmax[dist.cu_num_logits[1:] - 1])

    chain = random_chain(vocab_size=4, num_drafts=3, seed=11)
    engine = chain_engine(chain, accept_all, "sample")
    asked = [Request((0,), max_tokens=4, temperature=1.0, seed=s) for s in range(2000)]
    tokens = torch.tensor([r.token_ids for r in generate(engine, asked)])
    assert not all(result.good for result in joint_fits(tokens[:, :3], chain.target))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def eagle_engine(target, **options):
    options = {"draft_sampling": "sample", "eos": ()} | options
    return tiny_engine(target, tiny_draft(target), autoregressive, rejection, **options)


def ids(engine, asked):
    return [r.token_ids for r in generate(engine, asked)]


def test_seeded_requests_repeat(target):
    """Twice, alone, beside unseeded neighbours, and beside neighbours that finish early (R1)."""
    asked = Request(tuple(PROMPT), max_tokens=32, temperature=1.0, seed=42)
    alone = ids(eagle_engine(target), [asked])[0]
    assert ids(eagle_engine(target), [asked])[0] == alone
    others = [Request((9, 8, n), 40, temperature=1.0, seed=n) for n in range(3)]
    assert ids(eagle_engine(target), [*others, asked])[3] == alone
    short = [Request((9, 8, n), 5, temperature=0.7, seed=n) for n in range(3)]
    assert ids(eagle_engine(target), [asked, *short])[0] == alone


def test_different_seeds_differ(target):
    engine = eagle_engine(target)
    asked = [Request(tuple(PROMPT), 32, temperature=1.0, seed=s) for s in range(20)]
    serial = [ids(engine, [r])[0] for r in asked]
    assert len(set(serial)) >= 15
    assert ids(eagle_engine(target), asked) == serial


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_exact(target, max_tokens):
    result = generate(eagle_engine(target, k=4), requests([PROMPT], max_tokens=max_tokens))[0]
    assert len(result.token_ids) == max_tokens
    assert result.finish_reason == "length"
    assert sum(r.committed for r in result.rounds) == max_tokens - 1  # the prefill's is no round


@pytest.mark.parametrize(("prompt", "budget"), [(PROMPT[:1], 64), (PROMPT, 7), (PROMPT, 64)])
def test_the_token_of_a_prefill_is_no_round(target, prompt, budget):
    """Of one whose last chunk is a single row too, as in a prompt of one token."""
    engine = eagle_engine(target, max_num_batched_tokens=budget)
    result = generate(engine, requests([prompt], max_tokens=9))[0]
    assert len(result.token_ids) == 9
    assert sum(r.committed for r in result.rounds) == 8


def test_first_committed_eos_ends(target):
    """The end-of-sequence id is the last one kept, mid-round too; ignore_eos goes on (S1)."""
    whole = ids(eagle_engine(target), requests([PROMPT], max_tokens=30))[0]
    eos = whole[9]
    cut = whole[: whole.index(eos) + 1]
    for k in (1, 3, 5):
        result = generate(eagle_engine(target, k=k, eos=(eos,)), requests([PROMPT], max_tokens=30))[
            0
        ]
        assert result.token_ids == cut
        assert result.finish_reason == "stop"
    engine = eagle_engine(target, eos=(eos,))
    assert ids(engine, requests([PROMPT], max_tokens=30, ignore_eos=True))[0] == whole


def test_a_row_of_nan_fails_its_request_alone(target):
    """Request 2 of 3 ends with an error within two steps; its neighbours do not notice (N1)."""
    prompts = [[5, 9, 11], [77, 3], [7] * 9]
    want = ids(eagle_engine(target), requests(prompts, max_tokens=12, temperature=1.0))
    ill = {"now": True}

    def forward(batch, cache):
        out = target.forward(batch, cache)
        hidden = out.hidden.clone()
        if ill["now"]:
            request = batch.request_slots == 1
            hidden[batch.query_start[1:][request] - 1] = float("nan")
        return TargetOutput(hidden)

    engine = eagle_engine(target._replace(forward=forward))
    for request in requests(prompts, max_tokens=12, temperature=1.0):
        engine.add(request)
    ended = [o for _ in range(2) for o in engine.step() if o.finish_reason]
    assert [(o.request_id, o.finish_reason, o.token_ids) for o in ended] == [(1, "error", ())]
    engine = eagle_engine(target._replace(forward=forward))
    results = generate(engine, requests(prompts, max_tokens=12, temperature=1.0))
    assert [r.token_ids for r in results[::2]] == want[::2]
    assert all(0 <= i < 101 for r in results for i in r.token_ids)
    ill["now"] = False  # whoever gets the failed request's blocks next does not notice either
    assert ids(engine, requests(prompts, max_tokens=12, temperature=1.0)) == want


def test_what_a_slot_held_before_is_not_read():
    """Blocks of a slot's former request may be another's by now, whose NaN must not spread (N1)."""
    params, config = tiny_params(tie_word_embeddings=False)
    params.embed[77] = float("nan")
    engine = tiny_engine(llama_target(params, config), max_num_seqs=2, eos=())
    former, short, ill = [5] * 20, [5, 9, 11], [77] * 16
    want = ids(engine, requests([short], max_tokens=1))
    ids(engine, requests([former], max_tokens=1))
    results = generate(engine, requests([short, ill], max_tokens=1))
    assert [r.finish_reason for r in results] == ["length", "error"]
    assert results[0].token_ids == want[0]


def faulty(engine, **changes):
    """The engine with a schedule whose plans are changed."""
    plan = engine.stages.schedule

    def schedule(requests_, limits):
        made = plan(requests_, limits)
        return replace(made, **{name: change(made) for name, change in changes.items()})

    engine.stages = engine.stages._replace(schedule=schedule)
    return engine


@pytest.mark.parametrize(
    "changes",
    [
        {"new_blocks": lambda plan: plan.new_blocks[::-1]},
        {"new_blocks": lambda plan: tuple((7, c, b) for _, c, b in plan.new_blocks)},
        {"admissions": lambda plan: tuple(replace(a, slot=a.slot + 1) for a in plan.admissions)},
        {"admissions": lambda plan: ()},
        {"slots": lambda plan: (5, *plan.slots[1:])},
        {"preempted": lambda plan: (4,)},
        {"num_draft_tokens": lambda plan: 4},
        {"seq_lens": lambda plan: tuple(n - 1 for n in plan.seq_lens)},
        {"seq_lens": lambda plan: plan.seq_lens[1:]},
    ],
    ids=[
        *("blocks", "stranger's blocks", "slot", "not admitted", "stranger's row", "preempted"),
        *("K", "hidden tokens", "a request without"),
    ],
)
def test_a_faulty_plan_changes_no_books(target, changes):
    engine = eagle_engine(target)
    books = list(engine.pool.free), list(engine.free_slots)
    for request in requests([PROMPT, PROMPT], max_tokens=4):
        engine.add(request)
    with pytest.raises(ConfigError, match="the schedule"):
        faulty(engine, **changes).step()
    assert (engine.pool.free, engine.free_slots) == books
    assert (len(engine.waiting), engine.running) == (2, [])


def test_a_proposer_that_drafts_too_much_is_named(target):
    def propose(*args, num_draft_tokens, **keywords):
        return autoregressive(*args, num_draft_tokens=num_draft_tokens + 1, **keywords)

    engine = tiny_engine(target, tiny_draft(target), propose, delta, k=2)
    engine.add(requests([PROMPT], max_tokens=9)[0])
    with pytest.raises(ConfigError, match="made 3 drafts a request, and K is at most 2"):
        engine.step()


@pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
def test_records_of_other_dtypes_and_strides(target, kernels):
    """What a proposer and a rule of one's own return need not be int64 and contiguous."""

    def odd(tensor):
        tensor = tensor.int()
        return torch.stack((tensor, tensor + 1), -1)[..., 0]

    def propose(*args, **keywords):
        own = autoregressive(*args, **keywords)
        return Drafts(odd(own.token_ids), odd(own.is_delta), odd(own.num_drafts))

    def verify(dist, drafts, keys):
        return Verification(*map(odd, greedy(dist, drafts, keys)))

    asked = requests([PROMPT, [7]], max_tokens=4)
    engine = tiny_engine(target, tiny_draft(target), propose, verify, eos=(), kernels=kernels)
    assert ids(engine, asked) == ids(tiny_engine(target, eos=()), asked)


def test_a_failed_step_leaks_nothing(target):
    """Its requests hold their blocks until they are aborted."""

    def forward(batch, cache):
        raise RuntimeError("out of memory")

    engine = eagle_engine(target._replace(forward=forward))
    free = sorted(engine.pool.free), sorted(engine.free_slots)
    asked = [engine.add(r) for r in requests([PROMPT, PROMPT], max_tokens=4)]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert len(engine.running) == 2
    for request_id in asked:
        engine.abort(request_id)
    assert (sorted(engine.pool.free), sorted(engine.free_slots)) == free


def test_preempted_requests_wait_in_order_of_age(target):
    engine = eagle_engine(target)
    first, second, third = (engine.add(r) for r in requests([PROMPT] * 3, max_tokens=40))
    engine.step()
    last = engine.add(requests([PROMPT])[0])
    slots = [s.slot for s in engine.running if s.request_id != first]
    preempting = faulty(
        engine,
        preempted=lambda plan: tuple(slots),
        slots=lambda plan: plan.slots[:0],
        admissions=lambda plan: (),
        new_blocks=lambda plan: (),
    )
    preempting.step()
    assert [s.request_id for s in engine.waiting] == [second, third, last]


def test_abort_frees_at_once(target):
    engine = eagle_engine(target)
    free = sorted(engine.pool.free)
    first, second = (engine.add(r) for r in requests([PROMPT, PROMPT], max_tokens=40))
    engine.step()
    engine.step()
    engine.abort(first)
    engine.abort(first)
    assert [s.request_id for s in engine.running] == [second]
    engine.abort(second)
    assert not engine.has_unfinished
    assert sorted(engine.pool.free) == free


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(()), "the prompt has no tokens"),
        (Request((1,) * 128), "the prompt has 128 tokens and the context holds 128"),
        (Request((1, 101)), "prompt token id 101 is outside the vocabulary of 101"),
        (Request((1, -4)), "prompt token id -4 is outside"),
        (Request((1,), max_tokens=0), "max_tokens=0 must be at least 1"),
        (Request((1,), temperature=float("nan")), "temperature=nan must be a finite number"),
        (Request((1,), temperature=-1.0), "temperature=-1.0 must be"),
        (Request((1,), top_k=-5), "top_k=-5 must be"),
        (Request((1,), top_p=float("nan")), "top_p=nan must be above 0 and at most 1"),
        (Request((1,), min_p=1.5), "min_p=1.5 must be from 0 to 1"),
        (Request((1,), seed=2**63), "must be a 64-bit integer"),
    ],
)
def test_bad_requests_are_refused(target, request_, message):
    engine = eagle_engine(target)
    with pytest.raises(RequestError, match=message):
        engine.add(request_)
    with pytest.raises(RequestError, match=message):
        generate(engine, [Request((1, 2)), request_])
    assert not engine.has_unfinished


def test_sizes_that_cannot_serve_are_refused(target):
    with pytest.raises(ConfigError, match="do not hold one request"):
        eagle_engine(target, num_blocks=20)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=3 is below the 4 rows"):
        eagle_engine(target, max_num_batched_tokens=3)


def test_a_request_ends_at_the_context(target):
    result = generate(eagle_engine(target, max_model_len=20), requests([PROMPT], max_tokens=99))[0]
    assert len(result.token_ids) == 12
    assert result.finish_reason == "length"


def test_a_rule_that_returns_something_else_is_named(target):
    engine = tiny_engine(target, verify=lambda dist, drafts, keys: None)
    engine.add(Request(tuple(PROMPT), max_tokens=3))
    with pytest.raises(ConfigError, match="returned NoneType, not a specdec"):
        engine.step()
