"""Routers and the forms of running experts, against one row and one expert at a time."""

import math

import pytest
import torch
from families import relative_error

from specdec.models import moe
from specdec.models.moe import Experts, Routing, grouped_sigmoid_routing, softmax_routing

SIZES = {
    "one_row": (1, 32, 24, 8, 2),
    "few": (5, 32, 24, 8, 2),
    "many": (300, 16, 8, 4, 3),
    "all_experts": (7, 16, 8, 4, 4),
    "odd": (11, 13, 7, 5, 3),
}  # rows, hidden, inner, experts, top_k


def make(rows, hidden, inner, num_experts, top_k, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    experts = Experts(
        random(num_experts, 2 * inner, hidden) * hidden**-0.5,
        random(num_experts, hidden, inner) * inner**-0.5,
    )
    experts = Experts(*(t.to(device, dtype) for t in experts))
    scores = random(rows, num_experts).softmax(-1)
    weights, chosen = scores.topk(top_k, dim=-1)
    routing = Routing(*(t.to(device) for t in (chosen, weights, scores)))
    return experts, random(rows, hidden).to(device, dtype), routing


def one_at_a_time(experts, hidden, routing):
    """In float64, without a batched product anywhere."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for row in range(hidden.shape[0]):
        x = hidden[row].cpu().double()
        for expert, weight in zip(routing.experts[row], routing.weights[row], strict=True):
            gate, up = (experts.gate_up[expert].cpu().double() @ x).chunk(2)
            inner = gate / (1 + torch.exp(-gate)) * up
            out[row] += weight.item() * (experts.down[expert].cpu().double() @ inner)
    return out


@pytest.mark.parametrize("form", [moe._gather, moe._grouped, moe._loop])
@pytest.mark.parametrize("size", SIZES)
def test_forms_equal_one_at_a_time(form, size, monkeypatch):
    if form is moe._grouped and size == "odd":
        pytest.skip("the grouped product wants rows of whole 16 bytes")
    experts, hidden, routing = make(*SIZES[size])
    monkeypatch.setattr(moe, "_form", lambda *_: form.__name__.removeprefix("_"))
    out = moe.run_experts(experts, hidden, routing)
    assert relative_error(out.double(), one_at_a_time(experts, hidden, routing)) <= 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_chosen_form_equals_one_at_a_time(size):
    experts, hidden, routing = make(*SIZES[size])
    out = moe.run_experts(experts, hidden, routing)
    assert relative_error(out.double(), one_at_a_time(experts, hidden, routing)) <= 1e-6
    assert moe._form(experts, routing) == ("loop" if size == "odd" else "grouped")


@pytest.mark.parametrize("size", ["few", "many"])
def test_bfloat16_experts(size):
    experts, hidden, routing = make(*SIZES[size], dtype=torch.bfloat16)
    out = moe.run_experts(experts, hidden, routing)
    assert out.dtype == torch.bfloat16
    assert relative_error(out.double(), one_at_a_time(experts, hidden, routing)) <= 0.01


@pytest.mark.parametrize("form", [moe._gather, moe._grouped, moe._loop])
def test_gradients_agree(form):
    experts, hidden, routing = make(9, 16, 8, 4, 2)
    leaves = [*experts, hidden, routing.weights]
    for leaf in leaves:
        leaf.requires_grad_()
    x = hidden
    out = torch.zeros(hidden.shape)
    for expert in range(4):
        gate, up = (x @ experts.gate_up[expert].T).chunk(2, -1)
        share = (routing.weights * (routing.experts == expert)).sum(-1, keepdim=True)
        out = out + share * ((torch.nn.functional.silu(gate) * up) @ experts.down[expert].T)
    expected = torch.autograd.grad(out.pow(2).sum(), leaves)
    ours = (form(experts, hidden, routing.experts) * routing.weights[..., None]).sum(-2)
    for a, b in zip(torch.autograd.grad(ours.pow(2).sum(), leaves), expected, strict=True):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_trained_experts_all_run(size, monkeypatch):
    """The dense form: the same output and gradients, of the routing's weights too."""
    experts, hidden, routing = make(*SIZES[size])
    leaves = [*experts, hidden, routing.weights]
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    outputs = []
    for dense in (0, 16):
        monkeypatch.setattr(moe, "DENSE_EXPERTS", dense)
        for leaf in leaves:
            leaf.requires_grad_()
            leaf.grad = None
        out = moe.run_experts(experts, hidden, routing)
        outputs.append([out, *torch.autograd.grad((out * direction).sum(), leaves)])
    for a, b in zip(*outputs, strict=True):
        assert relative_error(a, b) <= 1e-5


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_routing(normalise):
    hidden, gate = torch.randn(6, 8), torch.randn(5, 8)
    routing = softmax_routing(hidden, gate, top_k=3, normalise=normalise)
    for row in range(6):
        logits = [float(hidden[row] @ gate[e]) for e in range(5)]
        total = sum(math.exp(z) for z in logits)
        best = sorted(range(5), key=lambda e: -logits[e])[:3]
        probs = [math.exp(logits[e]) / total for e in best]
        scale = sum(probs) if normalise else 1.0
        assert routing.experts[row].tolist() == best
        assert routing.weights[row].tolist() == pytest.approx([p / scale for p in probs], rel=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(4, 2), (3, 1), (1, 1), (2, 2)])
def test_grouped_sigmoid_routing(groups, top_groups, normalise):
    num_experts, top_k, scale = 12, 3, 2.5
    torch.manual_seed(groups)
    hidden, gate, bias = torch.randn(20, 8), torch.randn(num_experts, 8), torch.randn(num_experts)
    routing = grouped_sigmoid_routing(
        hidden,
        gate,
        bias,
        top_k=top_k,
        num_groups=groups,
        top_groups=top_groups,
        normalise=normalise,
        scale=scale,
    )
    size = num_experts // groups
    for row in range(20):
        scores = [1 / (1 + math.exp(-float(hidden[row] @ gate[e]))) for e in range(num_experts)]
        choice = [s + float(bias[e]) for e, s in enumerate(scores)]
        ranked = sorted(
            range(groups), key=lambda g: -sum(sorted(choice[g * size : g * size + size])[-2:])
        )
        allowed = [e for e in range(num_experts) if e // size in ranked[:top_groups]]
        best = sorted(allowed, key=lambda e: -choice[e])[:top_k]
        weights = [scores[e] for e in best]
        total = sum(weights) if normalise else 1.0
        assert routing.experts[row].tolist() == best
        expected = [scale * w / total for w in weights]
        assert routing.weights[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_the_correction_chooses_but_does_not_weigh():
    hidden, gate = torch.randn(4, 8), torch.zeros(6, 8)
    correction = torch.tensor([0.0, 9.0, 0.0, 0.0, 8.0, 0.0])
    keywords = {"num_groups": 1, "top_groups": 1, "normalise": False, "scale": 1.0}
    routing = grouped_sigmoid_routing(hidden, gate, correction, top_k=2, **keywords)
    assert routing.experts.tolist() == [[1, 4]] * 4
    assert torch.equal(routing.weights, torch.full((4, 2), 0.5))


def test_a_masked_expert_is_never_chosen_even_below_zero():
    """Negative corrected scores in the chosen group win against the others' masked ones."""
    hidden, gate = torch.zeros(1, 8), torch.zeros(4, 8)
    routing = grouped_sigmoid_routing(
        hidden,
        gate,
        torch.tensor([-1.0, -2.0, -3.0, -4.0]),
        top_k=2,
        num_groups=2,
        top_groups=1,
        normalise=True,
        scale=1.0,
    )
    assert sorted(routing.experts[0].tolist()) == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [*SIZES, "large"])
def test_experts_run_in_a_cuda_graph(size, dtype):
    """No form that a capture meets waits for the host; replays follow new rows and routes."""
    shape = SIZES.get(size, (64, 1024, 512, 64, 8))
    experts, hidden, routing = make(*shape, device="cuda", dtype=dtype)
    moe.run_experts(experts, hidden, routing)  # libraries start outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe.run_experts(experts, hidden, routing)
    for seed in (1, 2):
        torch.manual_seed(seed)
        hidden.copy_(torch.randn(hidden.shape))
        scores = torch.rand(routing.scores.shape, device="cuda")
        weights, chosen = scores.topk(shape[4], dim=-1)
        routing.weights.copy_(weights)
        routing.experts.copy_(chosen)
        graph.replay()
        error = relative_error(out.cpu().double(), one_at_a_time(experts, hidden, routing))
        assert error <= (0.01 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
def test_form_on_cuda_follows_sizes():
    def form(*shape, dtype=torch.bfloat16):
        rows, hidden, inner, num_experts, top_k = shape
        weights = torch.empty(num_experts, hidden, inner, device="cuda", dtype=dtype)
        routing = Routing(torch.zeros(rows, top_k, dtype=torch.int64), *[torch.empty(0)] * 2)
        return moe._form(Experts(weights, weights), routing)

    assert form(4, 192, 128, 8, 2) == "gather"
    assert form(1, 2048, 768, 128, 8) == "grouped"
    assert form(4096, 192, 128, 8, 2) == "grouped"
    assert form(4096, 191, 127, 8, 2) == "loop"
    assert form(4096, 191, 127, 8, 2, dtype=torch.float32) == "loop"
