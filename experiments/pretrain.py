"""Train a small target of any family from scratch, on a data set of experiments/retokenize.py.

    python experiments/pretrain.py shape=qwen3_next_tiny tokenizer=data/small/tokenizer \
        train_data.paths=[data/small/train] heldout_path=data/small/heldout

The run folder gets `target/` (the averaged weights in bf16 in the family's published layout, with
config.json, tokenizer and chat template: what `target.path` and transformers read), `train.csv`,
`eval.csv`, `summary.json` and `state.pt` (to resume from).
"""

import shutil
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.experiments.jobs import hydra_script, job_info, write_json
from specdec.training.pair_config import register

register()


def pretrain(cfg: DictConfig, folder: Path) -> float | None:
    """One run. Returns the bits a byte of the held-out text, for sweepers that optimise it."""
    from specdec.build import bind

    check_values(cfg)
    logger = bind(cfg.logger, fn_args=("job",), key="logger")
    with logger(job_info(cfg, folder, "train")) as run_log:
        summary = run(cfg, folder, run_log)
    return summary["bits_per_byte"]


def run(cfg: DictConfig, folder: Path, run_log: Any) -> dict[str, Any]:
    """Train until the budget is spent, and write everything to `folder`. Returns the summary."""
    import torch

    from specdec import runtime
    from specdec.build import bind
    from specdec.experiments.tables import progress as progress_bar
    from specdec.experiments.targets import new_target, packed_forward
    from specdec.experiments.training import Budget, CsvLog, heldout_rows
    from specdec.training.checkpoint import Progress, load_state_, save_state
    from specdec.training.data import load_dataset
    from specdec.training.optimizer import clip_, set_lr_, update_average_
    from specdec.training.packing import Cursor, to_device, windows
    from specdec.training.pretraining import (
        balance_loss,
        bits_per_byte,
        expert_loads,
        least_used,
        next_token_loss,
        shift_corrections_,
    )
    from specdec.training.timing import Phases
    from specdec.training.tokenizer import bytes_of_ids, load_saved

    make_optimizers = bind(cfg.optimizer, fn_args=("params",), key="optimizer")
    lr_factor = bind(cfg.lr_schedule, fn_args=("progress",), key="lr_schedule")
    tokenizer = load_saved(cfg.tokenizer)
    vocab_size = tokenizer.get_vocab_size()
    data = load_dataset(
        list(cfg.train_data.paths), num_tokens=cfg.train_data.num_tokens, vocab_size=vocab_size
    )
    device = runtime.pick_device(cfg.device)
    dtype = runtime.pick_dtype(cfg.dtype, device)
    if device.type == "cpu" and cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    ids = {f"{n}_token_id": tokenizer.token_to_id("<|end|>") for n in ("eos", "pad")}
    settings = {**plain(cfg)["shape"], "vocab_size": vocab_size, **ids}
    model = new_target(settings, seed=cfg.seed, device=device)
    corrections = [p for name, p in model.params.items() if name.endswith("correction")]
    biases = {n: p for n, p in model.params.items() if n.endswith("correction")}
    params = {n: p.requires_grad_() for n, p in model.params.items() if n not in biases}
    everything = params | biases
    average = {name: p.detach().clone() for name, p in everything.items()}
    optimizers = make_optimizers(params)
    num_bytes = torch.tensor(bytes_of_ids(tokenizer))
    heldout = heldout_rows(cfg, vocab_size)
    packing = {
        "row_tokens": cfg.train_data.row_tokens,
        "accumulation": cfg.accumulation,
        "seed": cfg.seed,
    }
    budget = Budget.of(cfg.budget, data, **packing)

    done = Progress(step=0, cursor=Cursor(0, 0), tokens=0, seconds=0.0)
    if cfg.resume is not None:
        done = load_state_(Path(cfg.resume), everything, average, optimizers)
    first_step, began, earlier = done.step, time.perf_counter(), done.seconds
    train_csv = CsvLog(folder / "train.csv", keep_until=done.step)
    eval_csv = CsvLog(folder / "eval.csv", keep_until=done.step)
    run_log.define_axis("step", "train/*")
    run_log.define_axis("step", "eval/*")
    phases = Phases(device)
    sums = torch.zeros(2, device=device)  # nats of the labels; of the balance loss
    labels, logged = 0, done
    loads: list[Any] = []

    def log_progress() -> None:
        """Read the sums on the device, the only wait inside the loop."""
        nonlocal sums, labels, logged
        nats, balance = (sums / torch.tensor([max(labels, 1), 1], device=device)).tolist()
        seconds = phases.take_()
        spent = max(sum(seconds.values()), 1e-9)
        row = {
            "step": done.step,
            "epoch": done.cursor.epoch,
            "tokens": done.tokens,
            "loss": nats,
            "balance": balance / max(done.step - logged.step, 1),
            "least_used_expert": least_used(loads) if loads else "",
            "lr": optimizers[0].param_groups[0]["lr"],
            "grad_norm": float(norm),
            "tokens_per_second": (done.tokens - logged.tokens) / spent,
            **{f"seconds_{name}": x for name, x in seconds.items()},
        }
        train_csv.add(row)
        scalars = {f"train/{k}": v for k, v in row.items() if k != "step" and v != ""}
        run_log.log({"step": done.step, **scalars})
        shares = " ".join(f"{name} {x / spent:.0%}" for name, x in seconds.items())
        print(
            f"step {done.step} tokens {done.tokens:,} loss {nats:.4f} "
            f"{row['tokens_per_second']:,.0f} tokens/s ({shares})",
            flush=True,
        )
        sums, labels, logged = torch.zeros_like(sums), 0, done

    @torch.no_grad()
    def evaluate() -> float | None:
        """Bits a byte of the held-out text, with the averaged weights as they are saved."""
        if not heldout:
            return None
        tree = model.tree(average, dtype)
        bits = bits_per_byte(
            lambda row: packed_forward(tree, model.config, row).hidden,
            tree.lm_head,
            [to_device(row, device) for row in heldout],
            num_bytes,
        )
        eval_csv.add({"step": done.step, "tokens": done.tokens, "bits_per_byte": bits})
        run_log.log({"step": done.step, "eval/bits_per_byte": bits})
        print(f"step {done.step} held out: {bits:.4f} bits a byte", flush=True)
        return bits

    stream = windows(data, start=done.cursor, epochs=budget.epochs, **packing)
    bits = None
    with progress_bar("training", 100) as advance:
        shown = 0
        while (share := budget.share(done)) < 1 and not budget.leaves(done.step):
            cursor, rows = next(stream)
            num_labels = sum(len(row.labels) for row in rows)
            set_lr_(optimizers, lr_factor(share))
            for row in rows:
                row = to_device(row, device)
                phases.mark_("data")
                tree = model.tree(everything, dtype)
                routings: list[Any] = []
                observe = routings.append if hasattr(model.config, "num_experts") else None
                hidden = packed_forward(tree, model.config, row, observe=observe).hidden
                phases.mark_("forward")
                loss = next_token_loss(hidden, tree.lm_head, row)
                total = loss / num_labels
                chosen = [routing.experts for routing in routings]
                if routings and not corrections and cfg.balance.loss:
                    balance = balance_loss([r.scores for r in routings], chosen)
                    total = total + cfg.balance.loss * balance / len(rows)
                    sums[1] += balance.detach() / len(rows)
                phases.mark_("loss")
                total.backward()
                phases.mark_("backward")
                sums[0] += loss.detach()
            norm = clip_(params, cfg.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if corrections:
                shift_corrections_(corrections, chosen, cfg.balance.rate)
            labels += num_labels
            done = done._replace(
                step=done.step + 1,
                cursor=cursor,
                tokens=done.tokens + sum(row.num_tokens for row in rows),
                seconds=earlier + time.perf_counter() - began,
            )
            update_average_(average, everything, done.step, cfg.average_decay)
            phases.mark_("optimizer")
            if done.step % cfg.log_every == 0:
                loads = [expert_loads(c, model.config.num_experts) for c in chosen]
                log_progress()
            if cfg.eval_every and done.step % cfg.eval_every == 0:
                evaluate()
            if cfg.save_every and done.step % cfg.save_every == 0:
                save_state(folder, done, everything, average, optimizers)
            phases.mark_(None)
            while shown < int(100 * budget.share(done)) and shown < 100:
                shown += 1
                advance(f"step {done.step}")
    if done.step > logged.step:
        log_progress()
    bits = evaluate()
    save_state(folder, done, everything, average, optimizers)
    model.save(folder / "target", average, settings)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(Path(cfg.tokenizer) / name, folder / "target" / name)

    summary = {
        "bits_per_byte": bits,
        "steps": done.step,
        "tokens": done.tokens,
        "tokens_in_data": int(data.lengths.sum()),
        "epochs": done.tokens / int(data.lengths.sum()),
        "seconds": done.seconds,
        "tokens_per_second": done.tokens / max(done.seconds, 1e-9),
        "finished": budget.share(done) >= 1,
        "steps_in_this_session": done.step - first_step,
        "parameters": sum(p.numel() for p in everything.values()),
        "least_used_expert": least_used(loads) if loads else None,
        "device": str(device),
        "device_name": runtime.device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "config": plain(cfg),
    }
    write_json(folder / "summary.json", summary)
    run_log.summary({k: v for k, v in summary.items() if k != "config"})
    print(f"results: {folder}")
    return summary


main = hydra_script("pretrain")(pretrain)

if __name__ == "__main__":
    main()
