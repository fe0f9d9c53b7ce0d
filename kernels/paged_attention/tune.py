"""Searches cuts of an 8B model's attention on the GPU at hand.

    python -m specdec.kernels.paged_attention.tune [--batch N ...]

From the plan in use each figure is varied in turn and the best value kept. Prints every time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from specdec.kernels.bench import has_gpu, seconds_of
from specdec.kernels.paged_attention.bench import LLAMA, TABLE_KEYS, case, decoding
from specdec.kernels.paged_attention.plan import Plan, plan_for

MOST_SPLIT_TILES = 1024  # there are no more counters
CHOICES = {
    "splits": (1, 2, 4, 8, 16, 32),
    "keys": (16, 32, 64),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (2, 3, 5, 7),
}


def search(plan: Plan, time: Callable[[Plan], float]) -> Plan:
    """The best plan found; `time` raises where one does not fit the chip."""
    times = {plan: time(plan)}
    for name, values in CHOICES.items():
        best = min(times, key=times.__getitem__)
        for value in values:
            candidate = best._replace(**{name: value})
            if candidate in times or (
                candidate.splits > 1 and plan.tiles * LLAMA.key > MOST_SPLIT_TILES
            ):
                continue
            try:
                times[candidate] = time(candidate)
            except Exception as error:
                print(f"  {candidate}: {' '.join(str(error).split())[:100]}", flush=True)
    return min(times, key=times.__getitem__)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    args = parser.parse_args(argv)
    if not has_gpu("specdec.kernels.paged_attention.tune times calls"):
        return 1
    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    mixed = [(f"{batch} x 4 rows", decoding(batch)) for batch in args.batch]
    mixed.append(("31 x 4 rows and a prefill of 128", [*decoding(31), (128, 0)]))
    for name, rows in mixed:
        counts = [count for count, _ in rows]
        start = plan_for(
            sum(counts),
            len(rows),
            max(counts),
            LLAMA.query,
            LLAMA.key,
            LLAMA.dim,
            TABLE_KEYS,
            2,
            processors,
        )

        def time(plan: Plan, name: str = name, rows=rows) -> float:
            seconds = seconds_of(case(name, LLAMA, rows, device, plan)._replace(baseline=None))[0]
            print(f"  {plan}: {seconds * 1e6:.2f} µs", flush=True)
            return seconds

        print(name)
        print(f"best for {name}: {search(start, time)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
