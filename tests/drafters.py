"""Drafters with a known outcome, for tests: proposers that look the answer up."""

import torch

from specdec.propose import texts_after
from specdec.state import Drafts


def scripted(continuations, vocab_size, pattern):
    """A proposer that knows each request's greedy continuation.

    Args:
        continuations: prompt ids (tuple) -> full greedy text (prompt + output) as a list.
        pattern: `pattern(round_index, K) -> j`, how many drafts are right before a wrong one; j = K
            is an oracle, j = 0 an adversary.
    """
    calls = {"n": 0}

    def propose(
        state,
        batch,
        committed,
        out,
        draft,
        *,
        num_draft_tokens,
        draft_sampling="greedy",
        temperature=None,
    ):
        calls["n"] += 1
        texts, rows = texts_after(state, batch, committed), []
        for r, slot in enumerate(batch.request_slots.tolist()):
            length, prompt = int(committed.num_tokens[r]), int(state.prompt_len[slot])
            text = continuations[tuple(texts[r, :prompt].tolist())]
            right = pattern(calls["n"] + r, num_draft_tokens)
            row = []
            for j in range(num_draft_tokens):
                token = text[length + j] if length + j < len(text) else 0
                row.append(token if j < right else (token + 1) % vocab_size)
            rows.append(row)
        ids = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), num_draft_tokens)
        return Drafts(
            token_ids=ids,
            is_delta=torch.ones_like(ids, dtype=torch.bool),
            num_drafts=torch.full((len(rows),), num_draft_tokens),
        )

    return propose


def oracle(_, k):
    return k


def adversary(_, k):
    return 0


def mixed(index, k):
    return index % (k + 1)
