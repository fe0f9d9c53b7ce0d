"""What a model sees of one step: a ragged, padded batch; and what it gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from specdec.kernels.paged_attention.reference import AttentionGroup as AttentionGroup

NULL_BLOCK = 0  # reserved block: padding rows write here, no request ever owns it


@dataclass(frozen=True)
class Batch:
    """One step, ragged over R requests and T rows (query tokens), N of which want logits.

    A request's rows are consecutive. Rows past a request's real tokens are padding: id 0,
    position 0, slot in `NULL_BLOCK`.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_start: Tensor  # [R + 1] int64
    seq_lens: Tensor  # [R] int64, tokens visible to the request's last real row
    slot_mapping: Tensor  # [T] int64, block * block_size + offset
    block_tables: Tensor  # [R, M] int64
    logits_indices: Tensor  # [N] int64 batch rows
    cu_num_logits: Tensor  # [R + 1] int64
    request_slots: Tensor  # [R] int64 rows of State
    row_valid: Tensor  # [T] bool, False on padding rows
    groups: tuple[AttentionGroup, ...]  # covers every row once, padding repeats aside; the Triton
    # kernels read positions and block tables instead, and for them there are none
    block_size: int
    max_query_len: int  # most rows of a request, an upper bound
    ancestor_mask: Tensor | None = None  # [T] int64 bit masks of tree ancestors
    all_greedy: bool = False  # host facts: no request of the step samples,
    filters: bool = True  # some request uses top-k, top-p or min-p
    penalties: bool = False  # some request has a repetition, presence or frequency penalty


class CacheShape(NamedTuple):
    """What an engine reserves; every family makes its cache from these."""

    num_blocks: int
    block_size: int
    num_slots: int  # rows of State
    window: int  # most rows of a step whose tokens may be rejected: K_max + 1


class Cache(NamedTuple):
    """Paged keys and values, one entry a layer; contents change only in `write_rows_` and
    `cache_write_`.

    A family's own cache is another NamedTuple of tensors that has these two fields; what it keeps
    a slot instead of a block it resets itself when a request starts at position 0.
    """

    keys: tuple[Tensor, ...]  # each [num_blocks, block_size, Hkv, D]
    values: tuple[Tensor, ...]  # each [num_blocks, block_size, Hkv, Dv]


class HeadCache(NamedTuple):
    """A draft head's cache. n: layers that take turns (`Draft.num_depths`)."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    carry: Tensor  # [n - 1, num_slots, H] what layer i recycled at a slot's last committed row


class TargetOutput(NamedTuple):
    hidden: Tensor  # [T, H] after the final norm
    aux: tuple[Tensor, ...] = ()  # residual streams [T, H] in the order `capture` was given


class DraftOutput(NamedTuple):
    for_logits: Tensor  # [T, H] what the head's `logits` takes
    recycle: Tensor  # [T, H] what the next draft step takes as hidden


class VocabMap(NamedTuple):
    """A reduced draft vocabulary. Draft id i stands for target id d2t[i]."""

    d2t: Tensor  # [V_draft] int64 target ids, strictly increasing
    t2d: Tensor  # [V] int64 draft id of each target id, -1 where there is none


class Target(NamedTuple):
    """A target model as pure functions that close over their parameters."""

    config: Any
    params: Any
    forward: Callable[[Batch, Cache], TargetOutput]  # writes its rows' keys and values in the cache
    logits: Callable[[Tensor], Tensor]  # [N, H] -> [N, V] in the model's dtype
    new_cache: Callable[[CacheShape], Cache]
    vocab_size: int  # real ids; logits may be wider (padding columns are never drawn)
    max_position: int
    embed: Tensor  # [V, H], for heads that share it
    lm_head: Tensor  # [V, H]
    capture: Callable[[tuple[int, ...]], Target] | None = None
    # (layer counts, see `capture.check_layer_ids`) -> the target whose outputs hold those streams


class Draft(NamedTuple):
    """A draft head: the same moves in every family (fuse, blocks, logits), chosen by its axes."""

    config: Any
    params: Any
    features: Callable[[TargetOutput], Tensor]  # -> [T, H] hidden for the first draft step
    forward: Callable[[Tensor, Tensor, Batch, HeadCache, int], DraftOutput]
    # (input_ids [T], hidden [T, H], batch, cache, draft step) -> DraftOutput
    logits: Callable[[Tensor, int], Tensor]
    # ([n, H], draft step) -> [n, logits_size] in the dtype of the target's
    new_cache: Callable[[CacheShape], HeadCache]
    logits_size: int  # V_draft, padding columns included
    vocab_size: int  # real ids
    vocab_map: VocabMap | None  # None: draft ids are target ids
    max_position: int
    aux_layers: tuple[int, ...] = ()  # boundaries of the target that `features` reads
    num_depths: int = 1  # layers that take turns: draft step i runs layer i mod num_depths
    embed: Tensor | None = None  # [V, H] that `forward` takes embeddings from; may be the target's
