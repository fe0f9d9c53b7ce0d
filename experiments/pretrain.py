"""Train a small target of any family from scratch, on a data set of experiments/retokenize.py.

    python experiments/pretrain.py shape=qwen3_next_tiny tokenizer=data/small/tokenizer \
        train_data.paths=[data/small/train] heldout_path=data/small/heldout

The run folder gets `target/` (the averaged weights in bf16 in the family's published layout, with
config.json, tokenizer and chat template: what `target.path` and transformers read), `train.csv`,
`eval.csv`, `summary.json` and `state.pt` (to resume from, as train_mtp.py does).
"""

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.experiments.jobs import hydra_script, job_info, write_json
from specdec.experiments.resuming import tell_if_spent, with_overrides_of_run
from specdec.training.pair_config import register

register()

# What may differ when a run goes on.
FREE = (
    *("budget", "logger", "resume", "eval_every", "log_every", "save_every"),
    *("device", "num_threads"),
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def pretrain(cfg: DictConfig, folder: Path) -> float | None:
    """One run: train until the budget is spent, and write everything to `folder`.

    Returns:
        The bits a byte of the held-out text, for sweepers that optimise it.
    """
    import torch

    from specdec import runtime
    from specdec.bind import bind
    from specdec.experiments.tables import progress as progress_bar
    from specdec.experiments.targets import new_target, packed_forward
    from specdec.experiments.training import CsvLog, bring_records, heldout_rows
    from specdec.training.checkpoint import Progress, Weights, check_state, load_state_, save_state
    from specdec.training.data import fingerprint, load_dataset
    from specdec.training.loop import Budget, Every, train_
    from specdec.training.packing import to_device, windows
    from specdec.training.pretraining import (
        balance_loss,
        bits_per_byte,
        expert_loads,
        least_used,
        next_token_loss,
        shift_corrections_,
    )
    from specdec.training.settings import settings_of
    from specdec.training.timing import Phases
    from specdec.training.tokenizer import bytes_of_ids, load_saved

    check_values(cfg)
    logger = bind(cfg.logger, fn_args=("job",), key="logger")
    make_optimizers = bind(cfg.optimizer, fn_args=("params",), key="optimizer")
    lr_factor = bind(cfg.lr_schedule, fn_args=("progress",), key="lr_schedule")
    if cfg.resume is not None:
        check_state(cfg.resume, plain(cfg), free=FREE)
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
    shape = {**plain(cfg)["shape"], "vocab_size": vocab_size, **ids}
    model = new_target(shape, seed=cfg.seed, device=device)
    biases = {n: p for n, p in model.params.items() if n.endswith("correction")}
    trained = {n: p.requires_grad_() for n, p in model.params.items() if n not in biases}
    params = trained | biases  # no optimiser knows the biases of DeepSeek's routers
    average = {name: p.detach().clone() for name, p in params.items()}
    weights = Weights(params, average, make_optimizers(trained))
    num_bytes = torch.tensor(bytes_of_ids(tokenizer))
    heldout = heldout_rows(cfg, vocab_size)
    packing = {
        "row_tokens": cfg.train_data.row_tokens,
        "accumulation": cfg.accumulation,
        "seed": cfg.seed,
    }
    budget = Budget.of(cfg.budget, data, **packing)

    contents = {
        "tokenizer": sha256((Path(cfg.tokenizer) / TOKENIZER_FILES[0]).read_bytes()).hexdigest(),
        "train_data.paths": fingerprint(data),
    }
    dtype_name = str(dtype).removeprefix("torch.")
    settings = settings_of({**plain(cfg), "dtype": dtype_name}, contents)
    start = Progress()
    if cfg.resume is not None:
        start, _ = load_state_(cfg.resume, weights, settings, free=FREE)
        tell_if_spent(budget, start, cfg.resume, folder)
        bring_records(Path(cfg.resume), folder, ["train.csv", "eval.csv"])
    train_csv = CsvLog(folder / "train.csv", keep_until=start.step)
    eval_csv = CsvLog(folder / "eval.csv", keep_until=start.evaluated_step or 0)
    phases = Phases(device)
    sums = torch.zeros(2, device=device)  # nats of the labels; of the balance loss
    labels, logged = 0, start
    chosen: list[Any] = []  # experts of the last row, by layer
    loads: list[Any] = []

    def gradients(rows: list[Any]) -> None:
        """Of a step's rows, and what they add to the sums on the device."""
        nonlocal labels, chosen
        num_labels = sum(len(row.labels) for row in rows)
        for row in rows:
            row = to_device(row, device)
            phases.mark_("data")
            tree = model.tree(params, dtype)
            routings: list[Any] = []
            observe = routings.append if hasattr(model.config, "num_experts") else None
            hidden = packed_forward(tree, model.config, row, observe=observe).hidden
            phases.mark_("forward")
            loss = next_token_loss(hidden, tree.lm_head, row)
            total = loss / num_labels
            chosen = [routing.experts for routing in routings]
            if routings and not biases and cfg.balance.loss:
                balance = balance_loss([r.scores for r in routings], chosen)
                total = total + cfg.balance.loss * balance / len(rows)
                sums[1] += balance.detach() / len(rows)
            phases.mark_("loss")
            total.backward()
            phases.mark_("backward")
            sums[0] += loss.detach()
        if biases:
            shift_corrections_(list(biases.values()), chosen, cfg.balance.rate)
        labels += num_labels

    with logger(job_info(cfg, folder, "train")) as run_log:
        run_log.define_axis("step", "train/*")
        run_log.define_axis("step", "eval/*")

        def report(done: Progress, norm: Any) -> None:
            """Read the sums on the device, the only wait inside the loop."""
            nonlocal sums, labels, logged, loads
            loads = [expert_loads(c, model.config.num_experts) for c in chosen]
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
                "lr": weights.optimizers[0].param_groups[0]["lr"],
                "grad_norm": float(norm),
                "tokens_per_second": (done.tokens - logged.tokens) / spent,
                **{f"seconds_{name}": x for name, x in seconds.items()},
            }
            train_csv.add(row)
            scalars = {f"train/{k}": v for k, v in row.items() if k != "step" and v != ""}
            run_log.log({"step": done.step, **scalars})
            parts = " ".join(f"{name} {x / spent:.0%}" for name, x in seconds.items())
            print(
                f"step {done.step} tokens {done.tokens:,} loss {nats:.4f} "
                f"{row['tokens_per_second']:,.0f} tokens/s ({parts})",
                flush=True,
            )
            sums, labels, logged = torch.zeros_like(sums), 0, done

        @torch.no_grad()
        def evaluate(done: Progress) -> Progress:
            """Bits a byte of the held-out text, with the averaged weights as they are saved."""
            if not heldout:
                return done
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
            return done._replace(evaluated_step=done.step, dev={"bits_per_byte": bits})

        def save(done: Progress) -> None:
            save_state(folder, done, weights, settings)

        with progress_bar("training", 100) as advance:
            done = train_(
                start,
                windows(data, start=start.cursor, epochs=budget.epochs, **packing),
                weights,
                budget=budget,
                every=Every(cfg.log_every, cfg.eval_every, cfg.save_every),
                lr_factor=lr_factor,
                clip_norm=cfg.clip_norm,
                average_decay=cfg.average_decay,
                gradients=gradients,
                report=report,
                evaluate=evaluate,
                save=save,
                advance=advance,
                phases=phases,
            )
        if done.evaluated_step != done.step:
            done = evaluate(done)
        save(done)
        model.save(folder / "target", average, shape)
        for name in TOKENIZER_FILES:
            shutil.copyfile(Path(cfg.tokenizer) / name, folder / "target" / name)

        summary = {
            "bits_per_byte": done.dev.get("bits_per_byte"),
            "steps": done.step,
            "tokens": done.tokens,
            "tokens_in_data": int(data.lengths.sum()),
            "epochs": done.tokens / int(data.lengths.sum()),
            "seconds": done.seconds,
            "tokens_per_second": done.tokens / max(done.seconds, 1e-9),
            "finished": budget.share(done) >= 1,
            "steps_in_this_session": done.step - start.step,
            "parameters": sum(p.numel() for p in params.values()),
            "least_used_expert": least_used(loads) if loads else None,
            "device": str(device),
            "device_name": runtime.device_name(device),
            "dtype": dtype_name,
            "config": plain(cfg),
        }
        write_json(folder / "summary.json", summary)
        run_log.summary({k: v for k, v in summary.items() if k != "config"})
    print(f"results: {folder}")
    return summary["bits_per_byte"]


main = hydra_script("pretrain", arguments=with_overrides_of_run)(pretrain)

if __name__ == "__main__":
    main()
