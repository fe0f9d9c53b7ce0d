"""Draft heads written out straight, from the seed text's sections 4 and 5 and its walk-throughs.

Whole sequences at positions 0..S-1, float64, no cache, the checkpoint's own tensors by their own
names. Nothing here is shared with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

State = dict[str, Tensor]
Config = dict[str, Any]


def norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def rope(x: Tensor, theta: float, interleaved: bool = False) -> Tensor:
    """[S, heads, D] rotated at positions 0..S-1: halves, or neighbouring pairs."""
    length, _, size = x.shape
    freq = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), freq)[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[S, Hq, D], [S, Hkv, D], [S, Hkv, Dv] -> [S, Hq * Dv], one head after the other."""
    length, heads, _ = query.shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    group, outputs = heads // key.shape[1], []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // group].T * scale
        outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value[:, head // group])
    return torch.cat(outputs, dim=-1)


def theta(config: Config) -> float:
    return config.get("rope_theta", 10000.0)


def plain_attention(w: State, config: Config, x: Tensor, interleaved: bool = False) -> Tensor:
    """Llama's; Qwen3's where there are q_norm and k_norm."""
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    query, key, value = (
        (x @ w[f"self_attn.{p}_proj.weight"].T).view(len(x), n, size)
        for p, n in (("q", heads), ("k", kv), ("v", kv))
    )
    if "self_attn.q_norm.weight" in w:
        query = norm(query, w["self_attn.q_norm.weight"], config["rms_norm_eps"])
        key = norm(key, w["self_attn.k_norm.weight"], config["rms_norm_eps"])
    query, key = (rope(t, theta(config), interleaved) for t in (query, key))
    return attend(query, key, value, size**-0.5) @ w["self_attn.o_proj.weight"].T


def gated_attention(w: State, config: Config, x: Tensor) -> Tensor:
    """Qwen3-Next's: each head's query comes with a gate; part of a head is rotated."""
    heads, kv, size = (
        config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    eps, part = config["rms_norm_eps"], int(size * config["partial_rotary_factor"])
    query, gate = (x @ w["self_attn.q_proj.weight"].T).view(len(x), heads, 2 * size).chunk(2, -1)
    key = (x @ w["self_attn.k_proj.weight"].T).view(len(x), kv, size)
    value = (x @ w["self_attn.v_proj.weight"].T).view(len(x), kv, size)
    query = norm(query, w["self_attn.q_norm.weight"], eps, 1.0)
    key = norm(key, w["self_attn.k_norm.weight"], eps, 1.0)
    query, key = (
        torch.cat((rope(t[..., :part], theta(config)), t[..., part:]), dim=-1) for t in (query, key)
    )
    out = attend(query, key, value, size**-0.5) * gate.flatten(-2).sigmoid()
    return out @ w["self_attn.o_proj.weight"].T


def latent_attention(w: State, config: Config, x: Tensor) -> Tensor:
    """DeepSeek's, with the keys and values of every head written out."""
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, rotary, value_size = (
        config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    low = norm(x @ w["self_attn.q_a_proj.weight"].T, w["self_attn.q_a_layernorm.weight"], 1e-6)
    query = (low @ w["self_attn.q_b_proj.weight"].T).view(len(x), heads, plain + rotary)
    latent, shared = (x @ w["self_attn.kv_a_proj_with_mqa.weight"].T).split((rank, rotary), dim=-1)
    latent = norm(latent, w["self_attn.kv_a_layernorm.weight"], 1e-6)
    both = (latent @ w["self_attn.kv_b_proj.weight"].T).view(len(x), heads, plain + value_size)
    shared = rope(shared[:, None], theta(config), interleaved=True).expand(-1, heads, -1)
    turned = rope(query[..., plain:], theta(config), interleaved=True)
    query = torch.cat((query[..., :plain], turned), dim=-1)
    key = torch.cat((both[..., :plain], shared), dim=-1)
    out = attend(query, key, both[..., plain:], (plain + rotary) ** -0.5)
    return out @ w["self_attn.o_proj.weight"].T


def feed_forward(w: State, prefix: str, x: Tensor) -> Tensor:
    gate, up = x @ w[f"{prefix}gate_proj.weight"].T, x @ w[f"{prefix}up_proj.weight"].T
    return (silu(gate) * up) @ w[f"{prefix}down_proj.weight"].T


def experts_by_softmax(w: State, config: Config, x: Tensor) -> Tensor:
    """Qwen's: the most probable experts of each token, beside a gated shared one if there is."""
    rows = []
    for row in x:
        probs = (w["mlp.gate.weight"] @ row).softmax(-1)
        chosen = probs.topk(config["num_experts_per_tok"]).indices.tolist()
        total = sum(probs[e] for e in chosen) if config["norm_topk_prob"] else 1.0
        out = sum(
            probs[e] / total * feed_forward(w, f"mlp.experts.{e}.", row[None])[0] for e in chosen
        )
        if "mlp.shared_expert_gate.weight" in w:
            open_ = (w["mlp.shared_expert_gate.weight"] @ row).sigmoid()
            out = out + open_ * feed_forward(w, "mlp.shared_expert.", row[None])[0]
        rows.append(out)
    return torch.stack(rows)


def experts_by_group(w: State, config: Config, x: Tensor) -> Tensor:
    """DeepSeek-V3's: sigmoid scores; a bias and the best groups decide the choice only."""
    groups, count = config["n_group"], config["n_routed_experts"]
    size, rows = count // groups, []
    for row in x:
        scores = (w["mlp.gate.weight"] @ row).sigmoid()
        biased = (scores + w["mlp.gate.e_score_correction_bias"]).tolist()
        rank = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -rank[g])[: config["topk_group"]]
        allowed = [e for e in range(count) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -biased[e])[: config["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen) if config["norm_topk_prob"] else 1.0
        out = sum(
            scores[e] / total * feed_forward(w, f"mlp.experts.{e}.", row[None])[0] for e in chosen
        )
        out = out * config["routed_scaling_factor"]
        rows.append(out + feed_forward(w, "mlp.shared_experts.", row[None])[0])
    return torch.stack(rows)


def block(
    w: State,
    config: Config,
    hidden: Tensor,
    residual: Tensor | None,
    *,
    attention: Callable[[State, Config, Tensor], Tensor] = plain_attention,
    experts: Callable[[State, Config, Tensor], Tensor] | None = None,
    offset: float = 0.0,
    attention_input: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(hidden, residual) -> (hidden, residual), pre-norm, the input norm where there is one."""
    eps = config["rms_norm_eps"]
    residual = hidden if residual is None else hidden + residual
    x = residual
    if attention_input is not None:
        x = attention_input
    elif "input_layernorm.weight" in w:
        x = norm(residual, w["input_layernorm.weight"], eps, offset)
    residual = residual + attention(w, config, x)
    x = norm(residual, w["post_attention_layernorm.weight"], eps, offset)
    if experts is not None:
        return experts(w, config, x), residual
    return feed_forward(w, "mlp.", x), residual


def below(state: State, prefix: str) -> State:
    """The tensors under a prefix, by the rest of their names, in float64."""
    return {
        name.removeprefix(prefix): tensor.double()
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


class Pass(NamedTuple):
    for_logits: Tensor  # [S, H]
    recycle: Tensor  # [S, H]


class Reference(NamedTuple):
    """A head as a function of whole sequences."""

    run: Callable[[int, Tensor, Tensor], Pass]  # (depth, embeds [S, H], hidden [S, H])
    num_depths: int
    embed: Tensor
    lm_head: Tensor
    features: Callable[[Tensor, list[Tensor]], Tensor] = lambda hidden, aux: hidden


def eagle(state: State, config: Config, embed: Tensor, lm_head: Tensor) -> Reference:
    """Section 4.1: fc(cat(embed, hidden)), all layers, hidden + residual for both uses."""
    w = below(state, "")

    def run(depth: int, embeds: Tensor, hidden: Tensor) -> Pass:
        x, residual = torch.cat((embeds, hidden), dim=-1) @ w["fc.weight"].T, None
        for i in range(config["num_hidden_layers"]):
            x, residual = block(below(state, f"layers.{i}."), config, x, residual)
        return Pass(x + residual, x + residual)

    return Reference(run, 1, embed, lm_head)


def eagle_qwen3(state: State, config: Config, embed: Tensor, lm_head: Tensor) -> Reference:
    """Section 4.2: e_norm, h_norm, eh_proj, one layer, norm for both uses."""
    w, eps = below(state, ""), config["rms_norm_eps"]
    sparse = any(".experts." in name for name in state)

    def run(depth: int, embeds: Tensor, hidden: Tensor) -> Pass:
        e, h = norm(embeds, w["e_norm.weight"], eps), norm(hidden, w["h_norm.weight"], eps)
        x = torch.cat((e, h), dim=-1) @ w["eh_proj.weight"].T
        x, residual = block(
            below(state, "layers.0."),
            config,
            x,
            torch.zeros_like(x),
            experts=experts_by_softmax if sparse else None,
        )
        out = norm(x + residual, w["norm.weight"], eps)
        return Pass(out, out)

    return Reference(run, 1, embed, lm_head)


def eagle3(state: State, config: Config, embed: Tensor, lm_head: Tensor) -> Reference:
    """Aux streams through fc once; the first layer reads both norms' outputs side by side."""
    w, eps = below(state, ""), config["rms_norm_eps"]
    switches = {**config.get("eagle_config", {}), **config}

    def features(hidden: Tensor, aux: list[Tensor]) -> Tensor:
        if switches.get("fc_norm"):
            aux = [norm(a, w[f"fc_norm.{j}.weight"], eps) for j, a in enumerate(aux)]
        x = torch.cat(aux, dim=-1)
        if switches.get("norm_before_fc"):
            x = norm(x, w["input_norm.weight"], eps)
        return x @ w["fc.weight"].T

    def run(depth: int, embeds: Tensor, hidden: Tensor) -> Pass:
        first = below(state, "midlayer.")
        h = norm(hidden, first["hidden_norm.weight"], eps)
        e = norm(embeds, first["input_layernorm.weight"], eps)
        x, residual = block(
            first,
            config,
            h if switches.get("norm_before_residual") else hidden,
            None,
            attention_input=torch.cat((e, h), dim=-1),
        )
        for i in range(1, config["num_hidden_layers"]):
            x, residual = block(below(state, f"layers.{i}."), config, x, residual)
        out = norm(x + residual, w["norm.weight"], eps)
        return Pass(out, out if switches.get("norm_output") else x + residual)

    return Reference(run, 1, embed, lm_head, features)


def qwen_mtp(state: State, config: Config, embed: Tensor, lm_head: Tensor) -> Reference:
    """Section 5.1; every norm is zero-centred."""
    w, eps = below(state, "mtp."), config["rms_norm_eps"]
    sparse = any(".experts." in name for name in state)

    def run(depth: int, embeds: Tensor, hidden: Tensor) -> Pass:
        e = norm(embeds, w["pre_fc_norm_embedding.weight"], eps, 1.0)
        h = norm(hidden, w["pre_fc_norm_hidden.weight"], eps, 1.0)
        x, residual = block(
            below(state, f"mtp.layers.{depth}."),
            config,
            torch.cat((e, h), dim=-1) @ w["fc.weight"].T,
            None,
            attention=gated_attention,
            experts=experts_by_softmax if sparse else None,
            offset=1.0,
        )
        out = norm(x + residual, w["norm.weight"], eps, 1.0)
        return Pass(out, out)

    depths = config.get("num_nextn_predict_layers", config.get("mtp_num_hidden_layers", 1))
    return Reference(run, depths, embed, lm_head)


def deepseek_mtp(
    state: State,
    config: Config,
    embed: Tensor,
    lm_head: Tensor,
    *,
    recycle: str = "post_norm",
    zeroed: bool = True,
) -> Reference:
    """Section 5.2 and the walk-through's steps 1 to 8: position 0 masked before enorm."""
    eps, first = config["rms_norm_eps"], config["num_hidden_layers"]

    def run(depth: int, embeds: Tensor, hidden: Tensor) -> Pass:
        w = below(state, f"model.layers.{first + depth}.")
        if zeroed:
            embeds = embeds.clone()
            embeds[0] = 0
        e, h = norm(embeds, w["enorm.weight"], eps), norm(hidden, w["hnorm.weight"], eps)
        x = torch.cat((e, h), dim=-1) @ w["eh_proj.weight"].T
        sparse = first + depth >= config["first_k_dense_replace"]
        x, residual = block(
            w,
            config,
            x,
            None,
            attention=latent_attention,
            experts=experts_by_group if sparse else None,
        )
        out = norm(x + residual, w["shared_head.norm.weight"], eps)
        given = {"post_norm": out, "pre_norm": x + residual, "pinned": hidden}
        return Pass(out, given[recycle])

    return Reference(run, config["num_nextn_predict_layers"], embed, lm_head)


def ernie_mtp(state: State, config: Config, embed: Tensor, lm_head: Tensor) -> Reference:
    """As DeepSeek's with a Llama block of interleaved rotary pairs, and no norm at its end."""
    eps = config["rms_norm_eps"]

    def run(depth: int, embeds: Tensor, hidden: Tensor) -> Pass:
        w = below(state, "model.")
        embeds = embeds.clone()
        embeds[0] = 0
        e = norm(embeds, w[f"mtp_emb_norm.{depth}.weight"], eps)
        h = norm(hidden, w[f"mtp_hidden_norm.{depth}.weight"], eps)
        x, residual = block(
            below(state, f"model.mtp_block.{depth}."),
            config,
            torch.cat((e, h), dim=-1) @ w[f"mtp_linear_proj.{depth}.weight"].T,
            None,
            attention=lambda w, config, x: plain_attention(w, config, x, interleaved=True),
        )
        return Pass(x + residual, x + residual)

    return Reference(run, config["num_nextn_predict_layers"], embed, lm_head)


def draft_logits(
    head: Reference, text: list[int], hidden: Tensor, aux: list[Tensor], drafts: list[int]
) -> list[Tensor]:
    """Logits of each draft step after a text of N ids, when the steps' choices were `drafts`.

    `hidden` and `aux` are the target's for positions 0..N-2. Layer i of n runs at draft step i mod
    n over the whole text so far: row p is (what the layer before gave at p, id p + 1 + i). When all
    layers had their turn, the drafts count as text and what each step gave as the target's hidden.
    """
    ids, rows = list(text), head.features(hidden.double(), [a.double() for a in aux])
    embed, lm_head, given, logits = head.embed.double(), head.lm_head.double(), [], []
    for step, drafted in enumerate(drafts):
        depth = step % head.num_depths
        if depth == 0:
            rows = torch.cat((rows, *given))
            turn, base = rows, len(ids)
            given = []
        out = head.run(depth, embed[ids[1 + depth : base + depth]], turn)
        turn = out.recycle
        given.append(turn[-1:])
        logits.append(lm_head @ out.for_logits[-1])
        ids.append(drafted)
    return logits
