"""Train a draft head on text that the target wrote itself.

    python experiments/generate.py path=data/self
    python train_mtp.py train_data.paths=[data/self] budget.max_tokens=70_000_000 eval_every=200
    python train_mtp.py resume=outputs/DATE/TIME

The head is the usual one of the target's family, unless `draft.family` names another. The run
folder gets `head/` (the checkpoint of best decoded acceptance length, in its family's published
layout), `last/`, `train.csv`, `eval.csv`, `summary.json` and `state.pt` (to resume from). A resumed
run has the overrides of the one that it goes on with, and those given beside; it writes to a folder
of its own unless `hydra.run.dir` names the old one.
"""

import math
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from specdec.checks import check_values, plain
from specdec.errors import ConfigError
from specdec.experiments.jobs import hydra_script, job_info, write_json
from specdec.experiments.resuming import tell_if_spent, with_overrides_of_run
from specdec.training.config import register

register()

# What may differ when a run goes on. A change of JUDGED starts the choice of the best head anew.
FREE = (
    *("budget", "logger", "resume", "eval_every", "log_every", "save_every", "unroll.num_chunks"),
    *("compile", "device", "num_threads", "kernels", "cache", "schedule"),
)
JUDGED = ("data", "propose", "sampling", "verify", "postprocess")


def train(cfg: DictConfig, folder: Path) -> float | None:
    """One run: train until the budget is spent, and write everything to `folder`.

    Returns:
        The best acceptance length, for sweepers that optimise it.
    """
    import torch

    from specdec.bind import bind
    from specdec.build import build_stages, load_models
    from specdec.experiments.acceptance import load_prompts
    from specdec.experiments.heads import head_config, target_output, trained_head
    from specdec.experiments.identity import checkpoint_sha256, identify
    from specdec.experiments.tables import progress as progress_bar
    from specdec.experiments.training import CsvLog, bring_records, draft_rows, evaluate
    from specdec.models.checkpoint import resolve_path
    from specdec.runtime import use_threads
    from specdec.training.checkpoint import Progress, Weights, check_state, load_state_, save_state
    from specdec.training.data import fingerprint, load_dataset, rank_ids
    from specdec.training.loop import Budget, Every, train_
    from specdec.training.objective import compiled, step_weights, unrolled_loss
    from specdec.training.packing import count_labels, to_device, windows
    from specdec.training.settings import below, differences, settings_of, told
    from specdec.training.timing import Phases

    check_values(cfg)
    logger = bind(cfg.logger, fn_args=("job",), key="logger")
    objective = bind(cfg.objective, fn_args=("student", "teacher", "labels", "weights"))
    make_optimizers = bind(cfg.optimizer, fn_args=("params",), key="optimizer")
    lr_factor = bind(cfg.lr_schedule, fn_args=("progress",), key="lr_schedule")
    stages = build_stages(cfg)
    if cfg.resume is not None:
        check_state(cfg.resume, plain(cfg), free=(*FREE, *JUDGED))
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
    weights = Weights(params, average, make_optimizers(params))
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

    found = identify(cfg.target.path, models.tokenizer, prompts)
    contents = {
        "target.path": found["target_sha256"],
        "train_data.paths": fingerprint(data),
        "data.path": found["prompts_sha256"] + found["template_sha256"],
    }
    if cfg.draft.path is not None:
        contents["draft.path"] = checkpoint_sha256(resolve_path(cfg.draft.path))
    dtype = str(models.dtype).removeprefix("torch.")
    settings = settings_of({**plain(cfg), "dtype": dtype}, contents)
    start = Progress()
    if cfg.resume is not None:
        start, before = load_state_(cfg.resume, weights, settings, free=(*FREE, *JUDGED))
        tell_if_spent(budget, start, cfg.resume, folder)
        bring_records(Path(cfg.resume), folder, ["head", "train.csv", "eval.csv"])
        judged = [key for key in differences(before, settings) if below(key, JUDGED)]
        if judged and start.best is not None:
            why = told(before, settings, judged[0])
            print(f"{why}: heads were judged otherwise, the best is chosen anew", flush=True)
            start = start._replace(best=None, best_step=None, evaluated_step=None, dev={})
            save_state(folder, start, weights, settings)
            if (folder / "eval.csv").exists():
                (folder / "eval.csv").replace(folder / f"eval_until_{start.step}.csv")
    train_csv = CsvLog(folder / "train.csv", keep_until=start.step)
    eval_csv = CsvLog(folder / "eval.csv", keep_until=start.evaluated_step or 0)
    phases = Phases(device)
    sums, labels = torch.zeros(3, num_steps, device=device), [0] * num_steps
    logged = start

    def gradients(rows: list[Any]) -> None:
        """Of a step's rows, and what they add to the sums on the device."""
        nonlocal sums, labels
        counts = count_labels(rows, num_steps)
        shares = [w / max(n, 1) for w, n in zip(step_shares, counts, strict=True)]
        for row in rows:
            row = to_device(row, device)
            phases.mark_("data")
            out = target_output(target, row, head.config.aux_layers)
            phases.mark_("target")
            hidden = head.unroll(params, out, row, num_steps)
            phases.mark_("unroll")
            loss, metrics = unrolled_loss(
                hidden, out.hidden, lm_head, row, objective, shares,
                own_head=head.lm_head(params), t2d=t2d, num_chunks=cfg.unroll.num_chunks,
            )  # fmt: skip
            phases.mark_("loss")
            loss.backward()
            phases.mark_("backward")
            sums += torch.stack(list(metrics))
        labels = [a + b for a, b in zip(labels, counts, strict=True)]

    with logger(job_info(cfg, folder, "train")) as run_log:
        run_log.define_axis("step", "train/*")
        run_log.define_axis("step", "eval/*")

        def report(done: Progress, norm: Any) -> None:
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
                "lr": weights.optimizers[0].param_groups[0]["lr"],
                "grad_norm": float(norm),
                "tokens_per_second": (done.tokens - logged.tokens) / spent,
                **{f"agrees_{k + 1}": x for k, x in enumerate(agrees)},
                **{f"overlap_{k + 1}": x for k, x in enumerate(overlap)},
                **{f"seconds_{name}": x for name, x in seconds.items()},
            }
            train_csv.add(row)
            if not math.isfinite(row["loss"]):
                raise ConfigError(
                    f"the loss is {row['loss']} at step {done.step}; "
                    "lower optimizer.lr or clip_norm"
                )
            scalars = {f"train/{k}": v for k, v in row.items() if k != "step"}
            run_log.log({"step": done.step, **scalars})
            parts = " ".join(f"{name} {x / spent:.0%}" for name, x in seconds.items())
            print(
                f"step {done.step} tokens {done.tokens:,} loss {row['loss']:.4f} "
                f"agrees {agrees[0]:.3f}..{agrees[-1]:.3f} "
                f"{row['tokens_per_second']:,.0f} tokens/s ({parts})",
                flush=True,
            )
            sums, labels, logged = torch.zeros_like(sums), [0] * num_steps, done

        def judge(done: Progress) -> Progress:
            """Decode the development set with the averaged head; keep the head that does best."""
            draft = head.draft(average, d2t=d2t)
            result = evaluate(cfg, models._replace(draft=draft), stages, prompts)
            eval_csv.add({"step": done.step, "tokens": done.tokens, **result})
            scalars = {f"eval/{k}": v for k, v in result.items() if isinstance(v, float)}
            run_log.log({"step": done.step, **scalars})
            length = result["acceptance_length"]
            print(f"step {done.step} acceptance length {length:.4f}", flush=True)
            done = done._replace(evaluated_step=done.step)
            if done.best is not None and length <= done.best:
                return done
            head.save(folder / "head", average, ranking=ranking, d2t=d2t)
            return done._replace(best=length, best_step=done.step, dev=result)

        def save(done: Progress) -> None:
            save_state(folder, done, weights, settings)

        began = time.perf_counter()
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
                evaluate=judge,
                save=save,
                advance=advance,
                phases=phases,
            )
        finished = budget.share(done) >= 1
        if finished and cfg.eval_every != 0 and done.evaluated_step != done.step:
            done = judge(done)
        save(done)
        head.save(folder / "last", average, ranking=ranking, d2t=d2t)

        dev = dict(done.dev)
        summary = {
            "acceptance_length": done.best,
            "acceptance_length_ci95": [dev.get(f"acceptance_length_{x}") for x in ("low", "high")],
            "num_draft_tokens": stages.num_draft_tokens,
            "best_step": done.best_step,
            "dev": dev,
            "steps": done.step,
            "tokens": done.tokens,
            "supervised_tokens_in_data": int(data.num_supervised.sum()),
            "samples_in_data": len(data),
            "epochs": done.cursor.epoch,
            "seconds": done.seconds,
            "tokens_per_second": done.tokens / max(done.seconds, 1e-9),
            "finished": finished,
            "steps_in_this_session": done.step - start.step,
            "seconds_of_this_session": time.perf_counter() - began,
            "parameters": sum(p.numel() for p in params.values()),
            "device": str(device),
            "config": plain(cfg),
        }
        write_json(folder / "summary.json", summary)
        run_log.summary({k: v for k, v in summary.items() if k not in ("config", "dev")})
    print(f"results: {folder}")
    return done.best


main = hydra_script("train_mtp", arguments=with_overrides_of_run)(train)

if __name__ == "__main__":
    main()
