"""What DeltaNet layers keep of each request, so that rejections leave no trace.

A slot keeps one committed state and the inputs of the rows after it that a verifier may still
reject. The first row of a step is always a committed token, so the state is
kept after it, and `window - 1` rows of inputs. At the next step the first position says how many of
those rows were committed: they are folded into the state before the new rows run. Only positions
are looked at, on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.gated_delta.reference import (
    WindowPlan,
    advance_state,
    gated_delta,
    gated_delta_chunked,
)
from specdec.kernels.runtime import uses_triton
from specdec.models.batch import Batch
from specdec.models.deltanet import DeltaNet, DeltaNetConfig, delta_operands

LONG_QUERY = 8  # rows from which the chunked form runs; it is the faster one there


def new_inputs(
    config: DeltaNetConfig,
    num_slots: int,
    window: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tensor:
    """Zeroed inputs [S, W - 1 + window - 1, n]: what the convolution sees before the rows that may
    be rejected, and those rows."""
    shape = (num_slots, config.conv_width - 1 + window - 1, config.num_inputs)
    return torch.zeros(shape, device=device, dtype=dtype)


class GroupRows(NamedTuple):
    """One attention group of a step as the recurrence sees it: N requests of at most T rows."""

    query_index: Tensor  # [N, T] batch rows
    valid: Tensor  # [N, T] real rows
    slots: Tensor  # [N]
    active: Tensor  # [N] False: no real row, the slot is left alone
    fresh: Tensor  # [N] the text starts here
    count: Tensor  # [N] stored rows that were committed
    num_final: Tensor  # [N] of this step's rows: after them the state is kept


class StepRows(NamedTuple):
    """A step's groups; shared by all layers of a pass."""

    groups: tuple[GroupRows, ...]
    output_rows: Tensor  # [T] where each batch row stands in the groups' outputs, in order


class KernelRows(NamedTuple):
    """A step as the kernels see it; shared by all layers of a pass."""

    plan: WindowPlan
    query_start: Tensor  # [R + 1]
    request_slots: Tensor  # [R]
    max_query_len: int


def begin_step_(
    config: DeltaNetConfig, batch: Batch, window_start: Tensor, window: int
) -> StepRows | KernelRows:
    """Reads a batch for the layers of a pass, and records where the slots' stored rows now start.

    See `step_rows` for the arguments.
    """
    if not uses_triton():
        rows = step_rows(batch, window_start, window)
        move_windows_(window_start, rows, batch.positions)
        return rows
    from specdec.kernels.gated_delta.kernel import plan_windows_

    plan = plan_windows_(
        window_start,
        positions=batch.positions,
        query_start=batch.query_start,
        row_valid=batch.row_valid,
        request_slots=batch.request_slots,
        window=window,
        num_key_heads=config.num_key_heads,
    )
    return KernelRows(plan, batch.query_start, batch.request_slots, batch.max_query_len)


def step_rows(batch: Batch, window_start: Tensor, window: int) -> StepRows:
    """Reads a batch for the recurrence, without waiting for the device.

    Args:
        window_start: [S] position of the first stored row of each slot.
        window: rows of a step that a verifier may reject, and one; longer queries are prefill
            chunks, all of whose rows are committed.
    """
    lens = batch.query_start.diff()
    num_rows = batch.positions.shape[0]
    numbers = torch.arange(len(lens), device=lens.device)
    request_of = torch.repeat_interleave(numbers, lens, output_size=num_rows)
    groups = []
    for group in batch.groups:
        rows = group.query_index
        request = request_of[rows[:, 0]]
        column = torch.arange(rows.shape[1], device=rows.device)
        valid = (column < lens[request, None]) & batch.row_valid[rows]
        num_valid, active = valid.sum(dim=1), valid.any(dim=1)
        slots, first = batch.request_slots[request], batch.positions[rows[:, 0]]
        fresh = active & (first == 0)
        count = (first - window_start[slots]).clamp(0, window - 1)
        groups.append(
            GroupRows(
                query_index=rows,
                valid=valid,
                slots=slots,
                active=active,
                fresh=fresh,
                count=torch.where(fresh, 0, count),
                num_final=torch.where(num_valid > window, num_valid, 1),
            )
        )
    places = torch.cat([group.query_index.flatten() for group in groups])
    order = torch.arange(places.numel(), device=places.device)
    output_rows = torch.zeros(num_rows, dtype=torch.int64, device=places.device)
    output_rows.scatter_reduce_(0, places, order, "amin", include_self=False)
    return StepRows(tuple(groups), output_rows)


def move_windows_(window_start: Tensor, rows: StepRows, positions: Tensor) -> None:
    """Records where the stored rows of each slot now start; after the last layer of a pass."""
    for group in rows.groups:
        start = positions[group.query_index[:, 0]] + group.num_final
        kept = torch.where(group.active, start, window_start[group.slots])
        window_start.index_copy_(0, group.slots, kept)


def recur_(
    config: DeltaNetConfig,
    rows: StepRows | KernelRows,
    states: Tensor,
    stored: Tensor,
    mixer: DeltaNet,
    inputs: Tensor,
) -> Tensor:
    """Runs a step's rows [T, n] from the slots' `states` and `stored` inputs, and updates both.

    Returns:
        [T, Hv, Dv]; what a padding row gives means nothing.
    """
    if isinstance(rows, KernelRows):
        from specdec.kernels.gated_delta.kernel import delta_step_

        return delta_step_(
            inputs,
            mixer.conv,
            mixer.decay_log,
            mixer.step_bias,
            states,
            stored,
            rows.plan,
            query_start=rows.query_start,
            request_slots=rows.request_slots,
            num_key_heads=config.num_key_heads,
            key_dim=config.key_dim,
            max_query_len=rows.max_query_len,
        )
    outputs = []
    for group in rows.groups:
        old_states, old_stored = states[group.slots], stored[group.slots]
        out, new_state, new_rows = run_group(
            config, mixer, group, inputs[group.query_index], old_states, old_stored
        )
        active = group.active[:, None, None]
        states.index_copy_(0, group.slots, torch.where(active[..., None], new_state, old_states))
        stored.index_copy_(0, group.slots, torch.where(active, new_rows, old_stored))
        outputs.append(out.flatten(0, 1))
    return torch.cat(outputs).index_select(0, rows.output_rows)


def run_group(
    config: DeltaNetConfig,
    mixer: DeltaNet,
    group: GroupRows,
    inputs: Tensor,
    states: Tensor,
    stored: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [N, T, n] of one group: outputs [N, T, Hv, Dv], states and stored inputs."""
    states = states.masked_fill(group.fresh[:, None, None, None], 0)
    stored = stored.masked_fill(group.fresh[:, None, None], 0)
    states, before = fold(mixer, config, states, stored, group.count)
    text = torch.cat((before, inputs), dim=1)
    operands = delta_operands(mixer, config, text, group.valid)
    out, states = gated_delta(*(t[:, :1] for t in operands), states)
    num_rows = inputs.shape[1]
    if num_rows > 1:
        rule = gated_delta_chunked if num_rows >= LONG_QUERY else gated_delta
        rest, last = rule(*(t[:, 1:] for t in operands), states)
        out = torch.cat((out, rest), dim=1)
        states = torch.where((group.num_final > 1)[:, None, None, None], last, states)
    wanted = group.num_final[:, None] + torch.arange(stored.shape[1], device=text.device)
    return out, states, take_rows(text, wanted.clamp(max=text.shape[1] - 1))


def fold(
    mixer: DeltaNet, config: DeltaNetConfig, states: Tensor, stored: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """States [N, Hv, Dk, Dv] after the first `count` [N] of the stored rows, and the inputs
    [N, W - 1, n] that the convolution sees before the next row."""
    before = config.conv_width - 1
    num_stored = stored.shape[1] - before
    column = torch.arange(stored.shape[1], device=stored.device)
    if num_stored:
        valid = column[:num_stored] < count[:, None]
        _, *operands = delta_operands(mixer, config, stored, valid)
        states = advance_state(*operands, states)
    return states, take_rows(stored, count[:, None] + column[:before])


def take_rows(text: Tensor, rows: Tensor) -> Tensor:
    """Rows [N, k] of [N, T, n]: [N, k, n]."""
    return text.gather(1, rows.unsqueeze(-1).expand(-1, -1, text.shape[2]))
