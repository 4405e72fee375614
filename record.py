"""The MLflow run: where it is kept, what is in it. One path, whether the store is a file or a server."""

import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import platform
import subprocess
import urllib.parse
from pathlib import Path

from checks import Refused, one_line

LIBRARIES = ("torch", "transformers", "trl", "peft", "unsloth", "unsloth_zoo", "vllm", "bitsandbytes", "datasets", "mlflow")


def connect(project: Path, experiment: str) -> str:
    """Choose the store and the experiment; returns the store's address, without credentials.

    MLFLOW_TRACKING_URI where it is set, else SQLite in the project folder. A user and password in the address move to
    the variables that MLflow's client reads them from, so that no message, param or log can show them.
    """
    own = f"sqlite:///{project / 'mlflow.db'}"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or own
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme in ("http", "https") and "@" in parts.netloc:
        if parts.username:
            os.environ["MLFLOW_TRACKING_USERNAME"] = urllib.parse.unquote(parts.username)
        if parts.password:
            os.environ["MLFLOW_TRACKING_PASSWORD"] = urllib.parse.unquote(parts.password)
        uri = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        os.environ["MLFLOW_TRACKING_URI"] = uri
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # TRL times its functions and logs that in the middle of a step: it should not wait for the store.
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    # The trainer's own callback would add 220 arguments under names that clash with ours; ours are the whole config.
    os.environ["MLFLOW_MAX_LOG_PARAMS"] = "0"
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    mlflow.set_tracking_uri(uri)
    try:
        if parts.scheme in ("http", "https"):
            ask_server(uri)
        elif uri == own and mlflow.get_experiment_by_name(experiment) is None:
            # the files too lie in the project folder, wherever the script is started from
            mlflow.create_experiment(experiment, artifact_location=(project / "mlruns").as_uri())
        mlflow.set_experiment(experiment)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"MLflow at {uri} does not take the experiment {experiment}: {one_line(error)}") from None
    return uri


def ask_server(uri: str) -> None:
    """Refuse a tracking server that does not answer within 5 s: MLflow's client itself would try for minutes."""
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=5).raise_for_status()
    except requests.RequestException as error:
        raise Refused(
            f"MLFLOW_TRACKING_URI {uri}: no MLflow server answers ({type(error).__name__}). Start one with "
            "`uv run mlflow server`, or unset the variable to record into mlflow.db here"
        ) from None


def start(c, gpu, project: Path, run_dir: Path, train_set) -> str:
    """Open the run and write down what is known before the model loads; returns the run's id."""
    import mlflow

    mlflow.enable_system_metrics_logging()
    run = mlflow.start_run(run_name=c.run_name)
    params = {k: v for k, v in dataclasses.asdict(c).items() if k != "model"}
    mlflow.log_params({
        **params,
        "model_requested": c.model,
        "group": c.num_generations,
        "max_seq_length": c.max_seq_length,
        "effective_batch": c.effective_batch,
        "prompts_per_step": c.prompts_per_step,
        "uv_lock": uv_lock_hash(project),
        "driver": gpu.driver if gpu else "none",
        "precision": "bf16" if gpu else "fp32",
    })  # fmt: skip
    mlflow.set_tags({
        "git_commit": git_commit(project),
        "card": gpu.name if gpu else f"none ({platform.machine()}, {os.cpu_count()} cores)",
        "python": platform.python_version(),
        "run_dir": str(run_dir.resolve()),
        **{f"version.{name}": importlib.metadata.version(name) for name in LIBRARIES},
    })  # fmt: skip
    dataset = mlflow.data.from_huggingface(train_set, name=Path(c.task).stem)
    mlflow.log_input(dataset, context="training")
    return run.info.run_id


def uv_lock_hash(project: Path) -> str:
    """The first 12 hex digits of uv.lock's SHA-256: the same lock, the same stack. "nolock" where there is none."""
    lock = project / "uv.lock"
    return hashlib.sha256(lock.read_bytes()).hexdigest()[:12] if lock.is_file() else "nolock"


def git_commit(project: Path) -> str:
    """The commit of the project's checkout, with "-dirty" for changes on top; "none" outside of a checkout."""
    try:
        git = ["git", "-C", str(project), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def held_out(scores: dict, problems, texts, step: int) -> None:
    """An evaluation's scores as metrics at `step`, its answers as a table."""
    import mlflow

    mlflow.log_metrics({f"held_out/{name}": value for name, value in scores.items()}, step=step)
    questions = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in problems["prompt"]]
    table = {"step": [step] * len(texts), "prompt": questions, "completion": texts}
    mlflow.log_table(table, "held_out.json")


def loaded(model) -> None:
    """What is known once the model is there: its resolved name, the trainable parameters, what vLLM made of its share."""
    import mlflow

    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    mlflow.log_params({"model": model.config._name_or_path, "trainable_parameters": trainable})
    engine = getattr(model, "vllm_engine", None)
    if engine is not None:
        mlflow.log_params({f"vllm.{name}": value for name, value in engine_figures(engine).items()})


def engine_figures(engine) -> dict:
    """What vLLM settled on, since it retries with less where memory is short: read from its config in vLLM 0.26.0."""
    config = engine.llm_engine.vllm_config
    return {
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "kv_cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def trainer_arguments(arguments) -> None:
    """All of TRL's arguments as they stand after Unsloth and TRL have had their say, as an artifact."""
    import mlflow

    mlflow.log_dict({k: str(v) for k, v in arguments.to_dict().items()}, "trainer_arguments.json")


def memory(peak) -> str:
    """Log the peaks, and say them: torch's counter (its live tensors), and the whole card's, from NVML."""
    import mlflow
    import torch

    if peak is None:
        from progress import memory_gib

        mlflow.log_metric("rss_peak_gib", memory_gib(None))
        return f"peak memory {memory_gib(None):.2f} GiB of RAM (no GPU, so no VRAM)"
    torch_gib = torch.cuda.max_memory_allocated() / 2**30
    mlflow.log_metrics({
        "vram_peak_gib": torch_gib,
        "vram_peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "vram_peak_nvml_gib": peak.peak_gib,
        "vram_before_nvml_gib": peak.start_gib,
    })  # fmt: skip
    return f"peak VRAM {torch_gib:.2f} GiB by torch, {peak.peak_gib:.2f} GiB on the card ({peak.start_gib:.2f} at the start)"


def adapter(folder: Path) -> None:
    """The adapter's files, under lora/."""
    import mlflow

    mlflow.log_artifacts(str(folder), artifact_path="lora")


def end(status: str) -> None:
    """Close the run as FINISHED, FAILED or KILLED, once everything that was logged in the background has arrived."""
    import mlflow

    mlflow.flush_async_logging()
    mlflow.end_run(status)
