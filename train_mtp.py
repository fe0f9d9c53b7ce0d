"""Train a draft head on text that the target wrote itself.

    python experiments/generate.py path=data/self
    python train_mtp.py train_data.paths=[data/self] budget.max_tokens=70_000_000 eval_every=200

The head is the usual one of the target's family, unless `draft.family` names another. The run
folder gets `head/` (the checkpoint of best decoded acceptance length, in its family's published
layout), `last/`, `train.csv`, `eval.csv`, `summary.json` and `state.pt` (to resume from).
"""

import math
import shutil
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.errors import ConfigError
from specdec.experiments.jobs import hydra_script, job_info, write_json
from specdec.training.config import register

register()


def train(cfg: DictConfig, folder: Path) -> float | None:
    """One run. Returns the best acceptance length, for sweepers that optimise it."""
    from specdec.build import bind

    check_values(cfg)
    logger = bind(cfg.logger, fn_args=("job",), key="logger")
    with logger(job_info(cfg, folder, "train")) as run_log:
        summary = run(cfg, folder, run_log)
    return summary["acceptance_length"]


def run(cfg: DictConfig, folder: Path, run_log: Any) -> dict[str, Any]:
    """Train until the budget is spent, and write everything to `folder`. Returns the summary."""
    import torch

    from specdec.build import bind, build_stages, load_models
    from specdec.experiments.acceptance import load_prompts
    from specdec.experiments.heads import head_config, target_output, trained_head
    from specdec.experiments.tables import progress as progress_bar
    from specdec.experiments.training import Budget, CsvLog, draft_rows, evaluate
    from specdec.runtime import use_threads
    from specdec.training.checkpoint import Progress, load_state_, save_state
    from specdec.training.data import load_dataset, rank_ids
    from specdec.training.objective import compiled, step_weights, unrolled_loss
    from specdec.training.optimizer import clip_, set_lr_, update_average_
    from specdec.training.packing import Cursor, count_labels, to_device, windows
    from specdec.training.timing import Phases

    objective = bind(cfg.objective, fn_args=("student", "teacher", "labels", "weights"))
    make_optimizers = bind(cfg.optimizer, fn_args=("params",), key="optimizer")
    lr_factor = bind(cfg.lr_schedule, fn_args=("progress",), key="lr_schedule")
    stages = build_stages(cfg)
    prompts = load_prompts(cfg)
    data = load_dataset(list(cfg.train_data.paths), num_tokens=cfg.train_data.num_tokens)
    models = load_models(cfg, uses_draft=None)
    target, device = models.target, models.device
    if data.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the data has a vocabulary of {data.vocab_size} ids, the target {target.vocab_size}"
        )
    use_threads(cfg.num_threads, target)

    ranking = rank_ids(data)
    config = None
    if models.draft is None:
        config = head_config(
            target,
            cfg.draft.family,
            num_layers=cfg.head.num_layers,
            aux_layers=cfg.head.aux_layers,
            axes={k: v for k, v in plain(cfg.draft.axes).items() if v is not None},
        )
    head = trained_head(
        target,
        config,
        seed=cfg.seed,
        start=models.draft,
        num_rows=cfg.head.num_rows,
        ranking=ranking,
    )
    params = {name: p.requires_grad_() for name, p in head.params.items()}
    average = {name: p.detach().clone() for name, p in params.items()}
    optimizers = make_optimizers(params)
    lm_head, d2t, t2d = draft_rows(cfg.draft, cfg.head, target, ranking, models.draft)
    if cfg.compile or (cfg.compile is None and device.type == "cuda"):
        objective = compiled(objective)
    num_steps = cfg.unroll.num_steps
    step_shares = step_weights(num_steps, cfg.unroll.decay)
    packing = {
        "row_tokens": cfg.train_data.row_tokens,
        "accumulation": cfg.accumulation,
        "seed": cfg.seed,
    }
    budget = Budget.of(cfg.budget, data, **packing)

    done = Progress(step=0, cursor=Cursor(0, 0), tokens=0, seconds=0.0)
    if cfg.resume is not None:
        done = load_state_(Path(cfg.resume), params, average, optimizers)
        if done.best is not None and Path(cfg.resume).resolve() != folder.resolve():
            shutil.copytree(Path(cfg.resume) / "head", folder / "head", dirs_exist_ok=True)
    first_step, began = done.step, time.perf_counter()
    earlier = done.seconds
    train_csv = CsvLog(folder / "train.csv", keep_until=done.step)
    eval_csv = CsvLog(folder / "eval.csv", keep_until=done.step)
    run_log.define_axis("step", "train/*")
    run_log.define_axis("step", "eval/*")
    phases = Phases(device)
    sums, labels = torch.zeros(3, num_steps, device=device), [0] * num_steps
    logged = done
    best: dict[str, Any] = {}

    def log_progress() -> None:
        """Read the sums on the device, the only wait inside the loop."""
        nonlocal sums, labels, logged
        counts = torch.tensor(labels, device=device).clamp(min=1)
        loss, agrees, overlap = (sums / counts).tolist()
        seconds = phases.take_()
        spent = max(sum(seconds.values()), 1e-9)
        row = {
            "step": done.step,
            "epoch": done.cursor.epoch,
            "tokens": done.tokens,
            "loss": sum(w * x for w, x in zip(step_shares, loss, strict=True)),
            "lr": optimizers[0].param_groups[0]["lr"],
            "grad_norm": float(norm),
            "tokens_per_second": (done.tokens - logged.tokens) / spent,
            **{f"agrees_{k + 1}": x for k, x in enumerate(agrees)},
            **{f"overlap_{k + 1}": x for k, x in enumerate(overlap)},
            **{f"seconds_{name}": x for name, x in seconds.items()},
        }
        train_csv.add(row)
        if not math.isfinite(row["loss"]):
            raise ConfigError(
                f"the loss is {row['loss']} at step {done.step}; lower optimizer.lr or clip_norm"
            )
        run_log.log({"step": done.step, **{f"train/{k}": v for k, v in row.items() if k != "step"}})
        shares = " ".join(f"{name} {x / spent:.0%}" for name, x in seconds.items())
        print(
            f"step {done.step} tokens {done.tokens:,} loss {row['loss']:.4f} "
            f"agrees {agrees[0]:.3f}..{agrees[-1]:.3f} {row['tokens_per_second']:,.0f} tokens/s "
            f"({shares})",
            flush=True,
        )
        sums, labels, logged = torch.zeros_like(sums), [0] * num_steps, done

    def evaluate_and_keep() -> None:
        """Decode the development set with the averaged head; keep the head that does best."""
        nonlocal done, best
        draft = head.draft(average, d2t=d2t)
        result = evaluate(cfg, models._replace(draft=draft), stages, prompts)
        eval_csv.add({"step": done.step, "tokens": done.tokens, **result})
        scalars = {f"eval/{k}": v for k, v in result.items() if isinstance(v, float)}
        run_log.log({"step": done.step, **scalars})
        length = result["acceptance_length"]
        print(f"step {done.step} acceptance length {length:.4f}", flush=True)
        if done.best is None or length > done.best:
            done = done._replace(best=length, best_step=done.step)
            best = result
            head.save(folder / "head", average, ranking=ranking, d2t=d2t)

    stream = windows(data, start=done.cursor, epochs=budget.epochs, **packing)
    with progress_bar("training", 100) as advance:
        shown = 0
        while (share := budget.share(done)) < 1 and not budget.leaves(done.step):
            cursor, rows = next(stream)
            counts = count_labels(rows, num_steps)
            weights = [w / max(n, 1) for w, n in zip(step_shares, counts, strict=True)]
            set_lr_(optimizers, lr_factor(share))
            for row in rows:
                row = to_device(row, device)
                phases.mark_("data")
                out = target_output(target, row, head.config.aux_layers)
                phases.mark_("target")
                hidden = head.unroll(params, out, row, num_steps)
                phases.mark_("unroll")
                loss, metrics = unrolled_loss(
                    hidden, out.hidden, lm_head, row, objective, weights,
                    own_head=head.lm_head(params), t2d=t2d, num_chunks=cfg.unroll.num_chunks,
                )  # fmt: skip
                phases.mark_("loss")
                loss.backward()
                phases.mark_("backward")
                sums += torch.stack(list(metrics))
            norm = clip_(params, cfg.clip_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            labels = [a + b for a, b in zip(labels, counts, strict=True)]
            done = done._replace(
                step=done.step + 1,
                cursor=cursor,
                tokens=done.tokens + sum(row.num_tokens for row in rows),
                seconds=earlier + time.perf_counter() - began,
            )
            update_average_(average, params, done.step, cfg.average_decay)
            phases.mark_("optimizer")

            if done.step % cfg.log_every == 0:
                log_progress()
            if cfg.eval_every and done.step % cfg.eval_every == 0:
                evaluate_and_keep()
            if cfg.save_every and done.step % cfg.save_every == 0:
                save_state(folder, done, params, average, optimizers)
            phases.mark_(None)
            while shown < int(100 * budget.share(done)) and shown < 100:
                shown += 1
                advance(f"step {done.step}")
    if done.step > logged.step:
        log_progress()
    finished = budget.share(done) >= 1
    evaluated = cfg.eval_every and done.step % cfg.eval_every == 0
    if finished and cfg.eval_every != 0 and not evaluated:
        evaluate_and_keep()
    save_state(folder, done, params, average, optimizers)
    head.save(folder / "last", average, ranking=ranking, d2t=d2t)

    seconds = time.perf_counter() - began
    summary = {
        "acceptance_length": done.best,
        "acceptance_length_ci95": [best.get(f"acceptance_length_{x}") for x in ("low", "high")],
        "num_draft_tokens": stages.num_draft_tokens,
        "best_step": done.best_step,
        "dev": best,
        "steps": done.step,
        "tokens": done.tokens,
        "supervised_tokens_in_data": int(data.num_supervised.sum()),
        "samples_in_data": len(data),
        "epochs": done.cursor.epoch,
        "seconds": done.seconds,
        "tokens_per_second": done.tokens / max(done.seconds, 1e-9),
        "finished": finished,
        "steps_in_this_session": done.step - first_step,
        "seconds_of_this_session": seconds,
        "parameters": sum(p.numel() for p in params.values()),
        "device": str(device),
        "config": plain(cfg),
    }
    write_json(folder / "summary.json", summary)
    run_log.summary({k: v for k, v in summary.items() if k not in ("config", "dev")})
    print(f"results: {folder}")
    return summary


main = hydra_script("train_mtp")(train)

if __name__ == "__main__":
    main()
