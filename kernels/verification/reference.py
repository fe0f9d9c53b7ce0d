"""What the kernels of the verification rules return. Their definitions are the rules of
`specdec.verify`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Verification(NamedTuple):
    """What a rule decided; all int64. Counts are 0 for a request without logits rows (a prefill
    chunk)."""

    token_ids: Tensor  # [R, K + 1] accepted drafts, then the recovered or bonus token, then -1
    rows: Tensor  # [R, K + 1] batch row behind each committed token (the one that predicted it)
    num_accepted: Tensor  # [R] drafts only, in [0, K]
    num_sampled: Tensor  # [R] num_accepted + 1, or 0
    num_rejected: Tensor  # [R] num_drafts - num_accepted, or 0
