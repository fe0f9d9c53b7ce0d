"""Serve a model over HTTP in the manner of OpenAI's API, with speculative decoding.

    python serve.py propose.num_draft_tokens=4 port=8000
    python serve.py model=llama_ngram verify=greedy host=0.0.0.0 api_key=SECRET

The key may also come from SPECDEC_API_KEY, which keeps it out of the process list.
"""

import logging
import signal
import socket
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specdec.checks import check_values
from specdec.errors import ConfigError
from specdec.experiments.jobs import hydra_script
from specdec.serving.config import register

register()

log = logging.getLogger(__name__)


def serve(cfg: DictConfig, folder: Path) -> None:
    """Load, listen, and serve until SIGTERM or SIGINT; running requests are then finished."""
    check_values(cfg)
    if cfg.api_key == "":
        raise ConfigError("api_key is empty; give a key, or null to accept any")
    with listen(cfg.host, cfg.port) as sock:  # before the model is loaded, which takes a while
        run(cfg, sock)


def run(cfg: DictConfig, sock: socket.socket) -> None:
    """Build the engine and its application, and serve them on a bound socket."""
    import uvicorn

    from specdec.build import build_engine, build_stages, context_length, load_models
    from specdec.experiments.tables import warm_up
    from specdec.runtime import use_threads
    from specdec.serving.app import Served, create_app
    from specdec.serving.metrics import ServerMetrics
    from specdec.serving.protocol import Defaults
    from specdec.serving.text import text_codec
    from specdec.serving.worker import EngineThread
    from specdec.verify import traits_of

    bound = build_stages(stage_config(cfg))
    models = load_models(cfg, uses_draft=bound.uses_draft)
    num_threads = use_threads(cfg.num_threads, models.target)
    engine = build_engine(
        cfg,
        models,
        bound,
        longest=context_length(cfg, models),
        num_requests=cfg.schedule.max_num_seqs,
        penalties=cfg.penalties,
    )
    warm_up(engine)
    name = cfg.served_model_name or model_name(cfg.target.path)
    metrics = ServerMetrics(name, bound.num_draft_tokens)
    worker = EngineThread(engine, lambda outputs: metrics.record_step_(engine, outputs))
    greedy_only = traits_of(bound.stages.verify).greedy_only
    defaults = Defaults(engine.limits, models.target.vocab_size, greedy_only, cfg.penalties)
    app = create_app(
        Served(name, cfg.target.path, int(time.time()), defaults),
        worker,
        text_codec(models.tokenizer),
        metrics,
        api_key=cfg.api_key,
    )
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=cfg.drain_seconds)
    )
    host, port = sock.getsockname()[:2]
    log.info(
        "%s on %s, %s, %d threads, %d requests of %d tokens at once",
        name,
        models.device,
        models.dtype,
        num_threads,
        engine.limits.max_num_seqs,
        engine.limits.max_model_len,
    )
    log.info("serving http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)
    # uvicorn catches both, drains, and raises them once more when all is done: a clean exit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[sock])


def stage_config(cfg: DictConfig) -> DictConfig:
    """The stages' nodes for `build_stages`, without a claim about the requests' temperatures."""
    nodes: dict[str, Any] = {k: cfg[k] for k in ("schedule", "verify", "postprocess", "propose")}
    return OmegaConf.create({**nodes, "sampling": {"temperature": 0.0}})


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError when the address cannot be had."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another") from error
    return sock


def model_name(path: str) -> str:
    """The name of a checkpoint's file or folder, without the suffix of a weights file."""
    name = Path(path).name or path
    return name.removesuffix(".gguf").removesuffix(".safetensors")


if __name__ == "__main__":
    hydra_script("serve", record=False)(serve)()
