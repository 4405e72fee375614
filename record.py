"""The MLflow run: where it is kept, what is in it. One path, whether the store is a file or a server."""

import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import subprocess
import urllib.parse
from pathlib import Path

from checks import Refused, one_line
from data import last_message

LIBRARIES = ("torch", "transformers", "trl", "peft", "unsloth", "unsloth_zoo", "vllm", "bitsandbytes", "datasets", "mlflow")


def connect(project: Path, experiment: str) -> str:
    """Choose the store and the experiment; returns the store's address without credentials.

    MLFLOW_TRACKING_URI where it is set, else SQLite in the project folder. Refuses within seconds a server that does not
    answer, which MLflow's client by itself would ask for minutes. A run of its own is opened whatever run or nesting the
    environment names, since the trainer's callback would otherwise write into another one.
    """
    own = f"sqlite:///{project / 'mlflow.db'}"
    uri, shown = hide_credentials(os.environ.get("MLFLOW_TRACKING_URI") or own)
    if ":" in uri and not re.match(r"[a-z+0-9]+:/|file:|databricks", uri):
        raise Refused(f"MLFLOW_TRACKING_URI {shown}: no scheme; http://{shown} for a server, sqlite:///{shown}.db for a file")
    for variable in ("MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN", "MLFLOW_EXPERIMENT_ID"):
        os.environ.pop(variable, None)
    # The trainer's callback would add 220 arguments under names that clash with ours; ours are the whole config.
    os.environ["MLFLOW_MAX_LOG_PARAMS"] = "0"
    # TRL times its functions and logs that in the middle of a step: it should not wait for the store.
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    patience = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    before = {variable: os.environ.get(variable) for variable in patience}
    os.environ.update(patience)
    try:
        mlflow.set_tracking_uri(uri)
        if mlflow.get_experiment_by_name(experiment) is None and uri == own:
            # the files too lie in the project folder, wherever the script is started from
            mlflow.create_experiment(experiment, artifact_location=(project / "mlruns").as_uri())
        mlflow.set_experiment(experiment)
    except Exception as error:
        why = one_line(str(error).replace(uri, shown))
        raise Refused(
            f"MLFLOW_TRACKING_URI {shown}: {why[:200]}. Start a server with `uv run mlflow server`, or unset the variable to "
            "record into mlflow.db here"
        ) from None
    finally:
        for variable, value in before.items():
            os.environ.pop(variable) if value is None else os.environ.update({variable: value})
    return shown


def hide_credentials(uri: str) -> tuple[str, str]:
    """The address for MLflow, and the one to show: neither user nor password may reach a message, a param or a log.

    For a server both move to the variables that MLflow's client reads them from, so that its own messages are clean too.
    """
    if uri.startswith(("sqlite:", "file:")):
        return uri, uri
    shown = re.sub(r"^([a-z0-9+]+://)?.*@", r"\1", uri)
    shown = re.sub(r"(password|passwd|pwd|token)=[^&]*", r"\1=***", shown, flags=re.IGNORECASE)
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https") or "@" not in parts.netloc:
        return uri, shown
    for variable, value in (("MLFLOW_TRACKING_USERNAME", parts.username), ("MLFLOW_TRACKING_PASSWORD", parts.password)):
        if value:
            os.environ[variable] = urllib.parse.unquote(value)
    os.environ["MLFLOW_TRACKING_URI"] = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return os.environ["MLFLOW_TRACKING_URI"], shown


def start(config, gpu, project: Path, run_dir: Path) -> str:
    """Open the run and write down what is known before the model loads; returns the run's id."""
    import mlflow

    mlflow.enable_system_metrics_logging()
    run = mlflow.start_run(run_name=config.run_name)
    params = {k: v for k, v in dataclasses.asdict(config).items() if k != "model"}
    mlflow.log_params({
        **params,
        "model_requested": config.model,
        "group": config.num_generations,
        "max_seq_length": config.max_seq_length,
        "effective_batch": config.effective_batch,
        "prompts_per_step": config.prompts_per_step,
        "uv_lock": lock_digest(project / "uv.lock"),
        "driver": gpu.driver if gpu else "none",
        "precision": "bf16" if gpu else "fp32",
    }, synchronous=True)  # fmt: skip
    mlflow.set_tags({
        "git_commit": git_commit(project),
        "card": gpu.name if gpu else f"none ({platform.machine()}, {os.cpu_count()} cores)",
        "python": platform.python_version(),
        "run_dir": str(run_dir.resolve()),
        **{f"version.{name}": importlib.metadata.version(name) for name in LIBRARIES},
    }, synchronous=True)  # fmt: skip
    return run.info.run_id


def training_data(train_set, dropped: int, task: str) -> None:
    """The problems that are trained on, as the run's input, and how many were dropped for their length."""
    import mlflow

    mlflow.log_input(mlflow.data.from_huggingface(train_set, name=Path(task).stem), context="training")
    mlflow.log_params({"dropped_problems": dropped}, synchronous=True)


def lock_digest(lock: Path) -> str:
    """Which lock a run was made with: 12 hex digits of the file's SHA-256, or "nolock" where there is no file."""
    if not lock.is_file():
        return "nolock"
    with lock.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


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

    mlflow.log_metrics({f"held_out/{name}": value for name, value in scores.items()}, step=step, synchronous=True)
    questions = [last_message(prompt) for prompt in problems["prompt"]]
    table = {"step": [step] * len(texts), "prompt": questions, "completion": texts}
    mlflow.log_table(table, "held_out.json")


def loaded(model) -> None:
    """What is known once the model is there: its resolved name, the trainable parameters, what vLLM made of its share."""
    import mlflow

    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    mlflow.log_params({"model": model.config._name_or_path, "trainable_parameters": trainable}, synchronous=True)
    engine = getattr(model, "vllm_engine", None)
    if engine is not None:
        mlflow.log_params({f"vllm.{name}": v for name, v in engine_figures(engine).items()}, synchronous=True)


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

        mlflow.log_metric("rss_peak_gib", memory_gib(None), synchronous=True)
        return f"peak memory {memory_gib(None):.2f} GiB of RAM (no GPU, so no VRAM)"
    torch_gib = torch.cuda.max_memory_allocated() / 2**30
    mlflow.log_metrics({
        "vram_peak_gib": torch_gib,
        "vram_peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "vram_peak_nvml_gib": peak.peak_gib,
        "vram_before_nvml_gib": peak.start_gib,
    }, synchronous=True)  # fmt: skip
    return f"peak VRAM {torch_gib:.2f} GiB by torch, {peak.peak_gib:.2f} GiB on the card ({peak.start_gib:.2f} at the start)"


def adapter(folder: Path) -> str:
    """The adapter's files, under lora/; says the largest entry of its B matrices, which start at 0."""
    import mlflow
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    largest = max(float(tensor.abs().max()) for name, tensor in tensors.items() if "lora_B" in name)
    mlflow.log_metric("adapter_largest_b", largest, synchronous=True)
    mlflow.log_artifacts(str(folder), artifact_path="lora")
    learned = f"largest entry of B {largest:.2g}" if largest else "B is all 0: nothing was learned, no group had spread"
    return f"adapter: {folder.resolve()} ({learned})"


def end(status: str, console) -> None:
    """Close the run as FINISHED, FAILED or KILLED, once everything that was logged in the background has arrived."""
    import mlflow

    try:
        if mlflow.active_run():
            mlflow.flush_async_logging()
            mlflow.end_run(status)
    except Exception as error:  # what has been trained is on disk, whatever the store does
        console.say(f"the record could not be closed as {status}: {one_line(error)}")


def how_to_open(store: str, project: Path) -> str:
    """The command or address that shows the curves."""
    if store.startswith("http"):
        return store
    default = store == f"sqlite:///{project / 'mlflow.db'}"
    return f"cd {project} && uv run mlflow ui" if default else f"uv run mlflow ui --backend-store-uri {store}"
