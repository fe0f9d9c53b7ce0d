"""The battery over the rules on kernels: few draws in the interpreter, all of them on a GPU."""

from dataclasses import replace
from functools import partial

import battery
import pytest
import tiny
import torch
from battery import Chain, decode, joint_fits, random_chain, verify_many

from specdec.kernels.runtime import using
from specdec.sampling import process_logits, target_probs
from specdec.state import new_state
from specdec.verify.delta import delta
from specdec.verify.greedy import greedy
from specdec.verify.gumbel import gumbel
from specdec.verify.rejection import rejection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = [
    pytest.param(delta, "greedy", id="delta-greedy"),
    pytest.param(delta, "sample", id="delta-sample"),
    pytest.param(rejection, "greedy", id="rejection-greedy"),
    pytest.param(rejection, "sample", id="rejection-sample"),
    pytest.param(gumbel, "sample", id="gumbel-sample"),
    pytest.param(partial(gumbel, noise="shared"), "shared", id="gumbel-shared"),
]


def on_device(chain):
    return Chain(chain.target.to(DEVICE), chain.draft.to(DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize(("verify", "mode"), [RULES[1], RULES[3], RULES[4]])
def test_first_token_is_the_targets(verify, mode):
    target = torch.tensor([0.15, 0.3, 0.1, 0.2, 0.25], device=DEVICE)
    draft = torch.tensor([0.4, 0.1, 0.3, 0.1, 0.1], device=DEVICE)
    num_draws = 200_000 if DEVICE == "cuda" else 250
    with using("triton"), torch.device(DEVICE):
        out, proposed = verify_many(
            verify,
            target.log().expand(2, -1).contiguous(),
            draft.log()[None],
            num_draws=num_draws,
            mode=mode,
        )
    battery.assert_fits(out.token_ids[:, 0], target)
    stood = out.num_accepted == 1
    assert torch.equal(out.token_ids[stood, 0], proposed[stood, 0])
    battery.assert_fits(out.token_ids[stood, 1], target)
    assert 0 < int(stood.sum()) < num_draws


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [False, True], ids=["", "filters"])
@pytest.mark.parametrize(("verify", "mode"), RULES)
def test_joint_over_rounds_is_the_targets(verify, mode, filters):
    chain = random_chain(4, 3, seed=1)
    sampling = {"temperature": torch.tensor([0.8], device=DEVICE)}
    if filters:
        sampling["top_p"] = torch.tensor([0.9], device=DEVICE)
    with using("triton"), torch.device(DEVICE):
        out = decode(
            verify,
            on_device(chain),
            num_requests=200_000,
            length=4,
            mode=mode,
            placeholders=True,
            sampling=sampling,
            seed=11,
        )
    kept = battery.filtered(chain.target, 0.8, top_p=0.9 if filters else 1.0)
    assert all(fit.good for fit in joint_fits(out.tokens.cpu(), kept))
    assert out.accepted > 0


@pytest.mark.parametrize(("verify", "mode"), [RULES[3], RULES[5], (greedy, "greedy")])
def test_greedy_limit(verify, mode):
    chain = random_chain(40, 2, seed=9)
    with using("triton"), torch.device(DEVICE):
        out = decode(
            verify,
            on_device(chain),
            num_requests=2,
            length=4,
            mode=mode,
            sampling={"temperature": torch.tensor([0.0])},
        )
    path, last = [], 0
    for _ in range(4):
        last = int(chain.target[last].argmax())
        path.append(last)
    assert out.tokens.tolist() == [path] * 2


@pytest.mark.parametrize("all_greedy", [False, True])
@pytest.mark.parametrize("filters", [False, True])
def test_process_logits_equals_torch(filters, all_greedy):
    """Each row under its request's parameters; the probabilities that users' rules read agree."""
    state = new_state(5, 20, 3, 4, (), 0, torch.float32, torch.device(DEVICE))
    state.temperature[:] = torch.tensor([0.0, 1.0, 0.5, 1.5, 0.7])
    state.top_k[:] = torch.tensor([0, 5, 0, 9, 3]) * filters
    state.top_p[:] = torch.tensor([1.0, 1.0, 0.7, 0.9, 1.0]) if filters else 1.0
    state.min_p[:] = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0]) * filters
    logits = torch.randn(6, 1030, generator=torch.Generator().manual_seed(2)).to(DEVICE) * 2
    logits[3] = torch.nan
    steps = [tiny.Step([0] * n, 0, [1 + i], n) for i, n in enumerate((3, 1, 2))]
    batch = replace(
        tiny.make_batch(steps, 4, device=DEVICE),
        request_slots=torch.tensor([3, 0, 1], device=DEVICE),
        all_greedy=all_greedy,
        filters=filters,
    )
    dists = []
    for kernels in ("torch", "triton"):
        with using(kernels):
            dists.append(process_logits(logits, state, batch, vocab_size=1027))
    theirs, ours = dists
    assert torch.equal(ours.argmax, theirs.argmax)
    assert torch.equal(ours.greedy, theirs.greedy)
    assert torch.equal(ours.batch_rows, theirs.batch_rows)
    torch.testing.assert_close(target_probs(ours), target_probs(theirs), rtol=1e-5, atol=1e-8)
    assert torch.equal(target_probs(ours) > 0, target_probs(theirs) > 0)
