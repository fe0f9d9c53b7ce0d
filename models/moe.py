"""Mixture of experts: two routers, and the experts in four exact forms in plain torch.

On Triton kernels, few rows go through `kernels/moe` instead. The forms give the same numbers up to
rounding; which one runs is decided by shapes, dtype, device and whether the experts are
trained, never by a value on the device (measured on an H200, torch 2.11):

* gather: the chosen experts' weights are copied next to each other, one batched product. Nothing
  waits for the host in any dtype. On CUDA for few rows of small experts, where launches decide, and
  inside CUDA graphs wherever the grouped product cannot be captured.
* grouped: rows sorted by expert, one product with offsets that stay on the device. In bf16 on CUDA
  it can be captured; for large experts it is the fastest for few rows too (DeepSeek-V3 shape, one
  row: 346 us against 550 us gathered). On a CPU it is the usual form.
* dense: few experts that are trained. Every expert sees every row, in two products, and those not
  chosen have weight 0: no sorting, and no gradient of a grouped product.
* loop: rows sorted by expert, a loop over the experts that have any; the counts go to the host.
  For sizes that the grouped product does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.moe.plan import takes
from specdec.kernels.moe.reference import add_shared, grouped_sigmoid_topk, softmax_topk
from specdec.kernels.runtime import uses_triton
from specdec.models.layers import Normed, Product, gated_part, linear, made, pack, product, swiglu
from specdec.models.parts import Part, part

DENSE_EXPERTS = 16  # up to which training runs them all
GATHER_BYTES = 32 * 2**20  # of copied weights, up to which launches cost more than the copy


class Mlp(NamedTuple):
    """A dense feed-forward part."""

    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]


class Experts(NamedTuple):
    """The feed-forward parts of E experts."""

    gate_up: Tensor  # [E, 2 I, H]
    down: Tensor  # [E, H, I]


class Routing(NamedTuple):
    """Which experts each of N rows goes to."""

    experts: Tensor  # [N, k] int64
    weights: Tensor  # [N, k] fp32
    scores: Tensor  # [N, E] fp32, before any choice; for balance losses


ObserveFn = Callable[[Routing], None]  # sees where a block's rows go, with their gradients


class SoftmaxMoe(NamedTuple):
    """Experts chosen by softmax (Qwen3-MoE)."""

    gate: Tensor  # [E, H]
    experts: Experts


def mlp(params: Mlp, hidden: Tensor) -> Tensor:
    """[..., H] -> [..., H]."""
    return made(mlp_product(params, hidden))


def mlp_product(params: Mlp, hidden: Tensor | Normed) -> Tensor | Product:
    """`mlp` with its last product left to the reader, see `product`."""
    return product(gated_part(hidden, params.gate_up), params.down)


def softmax_routing(hidden: Tensor, gate: Tensor, *, top_k: int, normalise: bool) -> Routing:
    """The `top_k` most probable experts of rows [N, H].

    Args:
        normalise: weights of the chosen sum to one; False keeps their probabilities.
    """
    choose = softmax_topk
    if uses_triton():
        from specdec.kernels.moe.kernel import softmax_topk as choose
    return Routing(*choose(linear(hidden, gate), top_k, normalise))


def grouped_sigmoid_routing(
    hidden: Tensor,
    gate: Tensor,
    correction: Tensor,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalise: bool,
    scale: float,
) -> Routing:
    """DeepSeek-V3's router of rows [N, H], in fp32; see `reference.grouped_sigmoid_topk`."""
    choose = grouped_sigmoid_topk
    if uses_triton():
        from specdec.kernels.moe.kernel import grouped_sigmoid_topk as choose
    logits = linear(hidden.float(), gate.float())
    return Routing(*choose(logits, correction, top_k, num_groups, top_groups, normalise, scale))


def run_experts(
    experts: Experts,
    hidden: Tensor,
    routing: Routing,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs: rows [N, H] -> [N, H] in the rows' dtype.

    Args:
        shared: [N, H] output of an expert for all rows, to add.
        shared_gate: [N, 1]; its sigmoid multiplies `shared`.
    """
    if experts.down.requires_grad and experts.down.shape[0] <= DENSE_EXPERTS:
        return add_shared(_dense(experts, hidden, routing), shared, shared_gate)
    if uses_triton() and takes(hidden, *experts, routing.experts):
        from specdec.kernels.moe.kernel import moe

        chosen = (routing.experts, routing.weights)
        return moe(hidden, *experts, *chosen, shared, shared_gate)
    form = {"gather": _gather, "grouped": _grouped, "loop": _loop}[_form(experts, routing)]
    out = form(experts, hidden, routing.experts)  # [N, k, H]
    out = (out * routing.weights.unsqueeze(-1)).sum(dim=-2).to(hidden.dtype)
    return add_shared(out, shared, shared_gate)


def softmax_moe(
    params: SoftmaxMoe,
    hidden: Tensor,
    *,
    top_k: int,
    normalise: bool,
    observe: ObserveFn | None = None,
) -> Tensor:
    """[..., H] -> [..., H]."""
    rows = hidden.flatten(0, -2)
    routing = softmax_routing(rows, params.gate, top_k=top_k, normalise=normalise)
    if observe is not None:
        observe(routing)
    return run_experts(params.experts, rows, routing).view(hidden.shape)


def pack_mlp(params: Mlp) -> Mlp:
    """The matrices packed for the CPU."""
    return Mlp(pack(params.gate_up), pack(params.down))


def mlp_layout(prefix: str, hidden: int, inner: int) -> Mlp:
    """Layout of `gate_proj`, `up_proj` and `down_proj` below `prefix`, which ends in a dot."""
    return Mlp(
        gate_up=Part(
            {f"{prefix}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")},
        ),
        down=part(f"{prefix}down_proj.weight", hidden, inner),
    )


def experts_layout(
    prefix: str, num_experts: int, hidden: int, inner: int, *, fused: bool
) -> Experts:
    """Layout of the experts below `prefix` (as in "model.layers.3.mlp.experts.").

    Published checkpoints hold experts one by one; `fused` is transformers' own layout, which
    `save_pretrained(save_original_format=False)` writes.
    """
    if fused:
        return Experts(
            gate_up=part(f"{prefix}gate_up_proj", num_experts, 2 * inner, hidden),
            down=part(f"{prefix}down_proj", num_experts, hidden, inner),
        )
    return Experts(
        gate_up=Part(
            {
                f"{prefix}{expert}.{name}_proj.weight": (inner, hidden)
                for expert in range(num_experts)
                for name in ("gate", "up")
            },
            shape=(num_experts, 2 * inner, hidden),
        ),
        down=Part(
            {f"{prefix}{e}.down_proj.weight": (hidden, inner) for e in range(num_experts)},
            shape=(num_experts, hidden, inner),
        ),
    )


def has_fused_experts(names: Iterable[str]) -> bool:
    """Whether a checkpoint's tensor names are of transformers' own experts layout."""
    return any(name.endswith("mlp.experts.gate_up_proj") for name in names)


def _form(experts: Experts, routing: Routing) -> str:
    weight = experts.down
    _, hidden, inner = weight.shape
    size = weight.element_size()
    fits = hidden * size % 16 == 0 and inner * size % 16 == 0
    if weight.is_cuda:
        captured = fits and weight.dtype == torch.bfloat16
        pairs = routing.experts.numel()
        few = pairs * 3 * hidden * inner * size <= GATHER_BYTES
        # on kernels a step may be captured, and what runs before the capture must be the same
        if few or (not captured and (uses_triton() or torch.cuda.is_current_stream_capturing())):
            return "gather"
    return "grouped" if fits else "loop"


def _dense(experts: Experts, hidden: Tensor, routing: Routing) -> Tensor:
    count, width, inner = experts.down.shape
    weights = hidden.new_zeros(len(hidden), count, dtype=routing.weights.dtype)
    weights = weights.scatter(1, routing.experts, routing.weights)
    gate_up = linear(hidden, experts.gate_up.flatten(0, 1)).unflatten(-1, (count, 2 * inner))
    weighted = (swiglu(gate_up) * weights.unsqueeze(-1)).to(hidden.dtype)  # [N, E, I]
    return linear(weighted.flatten(1), experts.down.transpose(0, 1).reshape(width, count * inner))


def _gather(experts: Experts, hidden: Tensor, chosen: Tensor) -> Tensor:
    flat = chosen.flatten()
    rows = hidden.repeat_interleave(chosen.shape[1], dim=0).unsqueeze(-1)  # [N k, H, 1]
    inner = swiglu(torch.bmm(experts.gate_up.index_select(0, flat), rows).squeeze(-1))
    out = torch.bmm(experts.down.index_select(0, flat), inner.unsqueeze(-1))
    return out.view(*chosen.shape, -1)


def _grouped(experts: Experts, hidden: Tensor, chosen: Tensor) -> Tensor:
    rows, back = _sorted_rows(hidden, chosen)
    ends = _counts(chosen, experts).cumsum(0, dtype=torch.int32)
    inner = swiglu(F.grouped_mm(rows, experts.gate_up.transpose(-1, -2), offs=ends))
    out = F.grouped_mm(inner, experts.down.transpose(-1, -2), offs=ends)
    return out.index_select(0, back).view(*chosen.shape, -1)


def _loop(experts: Experts, hidden: Tensor, chosen: Tensor) -> Tensor:
    rows, back = _sorted_rows(hidden, chosen)
    outputs = []
    for expert, own in enumerate(rows.split(_counts(chosen, experts).tolist())):
        if own.shape[0]:
            outputs.append(mlp(Mlp(experts.gate_up[expert], experts.down[expert]), own))
    return torch.cat(outputs).index_select(0, back).view(*chosen.shape, -1)


def _sorted_rows(hidden: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [N k, H] in the order of their experts, and where each (row, choice) went."""
    order = chosen.flatten().argsort(stable=True)
    place = torch.arange(order.numel(), device=order.device)
    back = torch.empty_like(order).scatter_(0, order, place)
    return hidden.index_select(0, order // chosen.shape[1]), back


def _counts(chosen: Tensor, experts: Experts) -> Tensor:
    flat = chosen.flatten()
    counts = torch.zeros(experts.down.shape[0], dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))
