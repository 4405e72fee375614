"""The MLflow run: where it is kept, what is in it. One path, whether the store is a file or a server.

uv run python record.py outputs/RUN          send what a run could not, once the store answers again
"""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import traceback
import urllib.parse
from pathlib import Path

import journal
from checks import Refused, command, digest, one_line
from data import last_message

LIBRARIES = ("torch", "transformers", "trl", "peft", "unsloth", "unsloth_zoo", "vllm", "bitsandbytes", "datasets", "mlflow")


def connect(project: Path, experiment: str, must_be_there: bool = False) -> str:
    """Choose the store and the experiment; returns the store's address without credentials.

    MLFLOW_TRACKING_URI where it is set, else SQLite in the project folder. Refuses within seconds a server that does not
    answer, which MLflow's client by itself would ask for minutes; with `must_be_there` also a new SQLite file. Where the
    environment names a run, a nesting or another experiment, that is forgotten: MLflow would go on with that run instead of
    opening one.
    """
    own = own_store(project)
    uri, shown = hide_credentials(os.environ.get("MLFLOW_TRACKING_URI") or own)
    if ":" in uri and not re.match(r"[a-z+0-9]+:/|file:|databricks", uri):
        raise Refused(f"MLFLOW_TRACKING_URI {shown}: no scheme; http://{shown} for a server, sqlite:///{shown}.db for a file")
    file = sqlite_file(uri)
    if must_be_there and file and not file.is_file():
        raise Refused(f"the store {shown}: {file} is not there, so it has no runs; MLFLOW_TRACKING_URI names the store")
    for variable in ("MLFLOW_RUN_ID", "MLFLOW_NESTED_RUN", "MLFLOW_EXPERIMENT_ID"):
        os.environ.pop(variable, None)
    # by itself the client asks a dead server for minutes; the journal tries again anyway
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        with impatience(), one_at_a_time(file):
            mlflow.set_tracking_uri(uri)
            if mlflow.get_experiment_by_name(experiment) is None and uri == own:
                # the files too lie in the project folder, wherever the script is started from
                mlflow.create_experiment(experiment, artifact_location=(project / "mlruns").as_uri())
            mlflow.set_experiment(experiment)
    except Exception as error:
        why = one_line(str(error).replace(uri, shown))
        if cause := re.search(r"Caused by (\w+)", str(error)):  # urllib3 says much else
            why = f"no answer within 5 s ({cause[1]})" if "Timeout" in cause[1] else f"cannot be reached ({cause[1]})"
        raise Refused(
            f"MLFLOW_TRACKING_URI {shown}: {why[:200]}. Start a server with `uv run mlflow server`, or unset the variable to "
            "record into mlflow.db here"
        ) from None
    return shown


def sqlite_file(uri: str) -> Path | None:
    """The file of a store that is one; of an address that cannot be read MLflow says so itself."""
    if not uri.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        file = make_url(uri).database
    except ArgumentError:
        return None
    return Path(file) if file and not file.startswith(("file:", ":memory:")) else None


@contextlib.contextmanager
def one_at_a_time(file: Path | None):
    """MLflow makes a new SQLite file in many steps, and a second process that meets half of one fails: it waits instead."""
    with contextlib.ExitStack() as stack:
        if file:
            with contextlib.suppress(OSError):  # no such folder, or a file system without locks
                folder = os.open(file.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def impatience():
    """Before training a store has 5 seconds to answer, and no second chance: the user waits.

    For a database MLflow has a number of its own, of attempts that take 100 s (mlflow 3.17.2, a test holds it in place).
    """
    import mlflow.store.db.utils as database

    variables = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "5", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    before = {variable: os.environ.get(variable) for variable in variables}
    os.environ.update(variables)
    attempts, database.MAX_RETRY_COUNT = database.MAX_RETRY_COUNT, 1
    try:
        yield
    finally:
        database.MAX_RETRY_COUNT = attempts
        for variable, value in before.items():
            os.environ.pop(variable) if value is None else os.environ.update({variable: value})


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


class Record:
    """One MLflow run, opened here and closed by `end`. Its items go through the journal: none holds up a step."""

    def __init__(self, config, gpu, project: Path, store: str, run_dir: Path, origin: dict | None):
        """Open the run, and write down what is known before the model loads.

        `origin` is what the checkpoint says of the run that is gone on with. Refuses a store that takes no artifact, which
        is tried here with the config.
        """
        import mlflow

        self.store, self.project, self.run_dir = store, project, run_dir
        self.kv_cache_gib = 0.0  # vLLM's, once it is there
        self.figures = {}  # for the end: by name in pictures.FIGURES, a function that returns the data, or None
        self.client = mlflow.MlflowClient()
        params = {k: v for k, v in dataclasses.asdict(config).items() if k != "model"}
        params["target_modules"] = " ".join(config.target_modules)  # the journal would give a tuple back as a list
        params |= {
            "model_requested": config.model,
            "group": config.num_generations,
            "max_seq_length": config.max_seq_length,
            "effective_batch": config.effective_batch * config.processes,
            "prompts_per_rollout": config.prompts_per_rollout * config.processes,
            "steps_per_rollout": config.steps_per_rollout,
            "uv_lock": digest(project / "uv.lock") or "nolock",
            "task_file": digest(Path(config.task)),
            "driver": gpu.driver if gpu else "none",
            "precision": "bf16" if gpu else "fp32",
        }
        if config.processes > 1:
            params["learning_rate_rule"] = "as given, not scaled with processes"
        tags = {
            "git_commit": git_commit(project),
            "card": gpu.name if gpu else f"none ({platform.machine()}, {os.cpu_count()} cores)",
            "python": platform.python_version(),
            "run_dir": str(run_dir.resolve()),
            **{f"version.{name}": importlib.metadata.version(name) for name in LIBRARIES},
        }
        if origin:
            tags |= {"resumed_from": config.resume_from_checkpoint, "resumed_from_run": origin["run_id"],
                     "resumed_at_step": origin["step"], "changed": "; ".join(origin["changes"]) or "nothing"}  # fmt: skip
        run = None
        try:
            with impatience():
                if origin and self.close_what_died(origin):
                    tags["mlflow.parentRunId"] = origin["run_id"]
                mlflow.enable_system_metrics_logging()
                run = mlflow.start_run(run_name=config.run_name, nested=mlflow.active_run() is not None)
                self.run_id = run.info.run_id
                self.client.log_dict(self.run_id, params, "config.json")
        except BaseException as error:
            if run:
                with contextlib.suppress(Exception):
                    mlflow.end_run("FAILED")
                    self.client.delete_run(self.run_id)
            if isinstance(error, Refused) or not isinstance(error, Exception):
                raise
            raise Refused(
                f"MLFLOW_TRACKING_URI {store}: takes {'no artifacts' if run else 'no runs'} ({one_line(error)[:200]}). A "
                "server that does: uv run mlflow server --artifacts-destination ./mlartifacts"
            ) from None
        self.journal = journal.Journal(run_dir, self.client, self.run_id)
        self.journal.write({"run_id": self.run_id, "run_name": config.run_name, "experiment": config.experiment})
        self.journal.put("params", values=params)
        self.journal.put("tags", values=tags)
        self.journal.put("text", text=json.dumps(params, indent=1), file="config.json")

    def close_what_died(self, origin: dict) -> bool:
        """Whether the store has the run that is gone on with; if it still says RUNNING though its process is gone: KILLED."""
        if not knows(self.client, origin["run_id"]):
            return False
        with contextlib.suppress(Refused):  # a run that goes on, or whose folder is gone
            journal.read(Path(origin["run_dir"]))
            if self.client.get_run(origin["run_id"]).info.status == "RUNNING":
                self.client.set_terminated(origin["run_id"], "KILLED")
        return True

    def metrics(self, values: dict, step: int = 0) -> None:
        """Numbers at a step; what is no number (a reward that applied nowhere) is left out."""
        allowed = {re.sub(r"[^\w\-. :/]", "_", k): v for k, v in values.items() if isinstance(v, (int, float))}
        self.journal.put("metrics", values=allowed, step=step)

    def training_data(self, train_set, dropped: int, task: str) -> None:
        """The problems that are trained on, as the run's input, and how many were dropped for their length."""
        import mlflow

        dataset = mlflow.data.from_huggingface(train_set, name=Path(task).stem)
        self.journal.put("dataset", dataset=dataset.to_dict(), context="training")
        self.journal.put("params", values={"dropped_problems": dropped})

    def held_out(self, scores: dict, problems, texts, step: int) -> None:
        """An evaluation's scores as metrics at `step`, its answers as a table."""
        self.metrics({f"held_out/{name}": value for name, value in scores.items()}, step)
        questions = [last_message(prompt) for prompt in problems["prompt"]]
        table = {"step": [step] * len(texts), "prompt": questions, "completion": list(texts)}
        self.journal.put("table", columns=table, file="held_out.json")

    def samples(self, columns: dict) -> None:
        """Completions of a step, with their rewards, as rows of samples.json."""
        self.journal.put("table", columns=columns, file="samples.json")

    def warning(self, name: str, text: str, step: int) -> None:
        """A symptom: a metric at the step it was seen, its text in warnings.json."""
        self.metrics({f"warning/{name}": 1}, step)
        self.journal.put("table", columns={"step": [step], "warning": [name], "text": [text]}, file="warnings.json")

    def loaded(self, model) -> None:
        """What is known once the model is there: its resolved name, the trainable parameters, what vLLM made of its share."""
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        params = {"model": model.config._name_or_path, "trainable_parameters": trainable}
        engine = getattr(model, "vllm_engine", None)
        if engine is not None:
            figures = engine_figures(engine)
            self.kv_cache_gib = figures["kv_cache_gib"]
            params |= {f"vllm.{name}": value for name, value in figures.items()}
        self.journal.put("params", values=params)

    def trainer_arguments(self, arguments) -> None:
        """All of TRL's arguments as they stand after Unsloth and TRL have had their say, as an artifact."""
        text = json.dumps({k: str(v) for k, v in arguments.to_dict().items()}, indent=1)
        self.journal.put("text", text=text, file="trainer_arguments.json")

    def plan(self, plan) -> None:
        """The memory plan, a budget.Plan or None: predicted GiB by line as metrics, its lines with their formulas as a text."""
        import budget

        if plan is None:
            return
        values = {f"vram_predicted/{line.key}_gib": line.gib for line in plan.lines if line.gib}
        self.metrics({**values, "vram_predicted/total_gib": plan.total_gib})
        self.journal.put("text", text="\n".join(budget.table(plan)), file="memory_plan.txt")

    def memory_table(self, rows: list[dict], counters: dict) -> None:
        """Predicted and measured GiB by line, the measured ones as metrics, and a vram.Meter's counters after each phase."""
        measured = {f"vram/{row['key']}_gib": row["measured_gib"] for row in rows}
        self.metrics(measured)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self.journal.put("table", columns=columns, file="memory.json")
        self.journal.put("table", columns=counters, file="memory_phases.json")

    def memory(self, peak, phases, sleeps: bool) -> str:
        """Log the peaks, and say them: torch's counter (its live tensors), and the whole card's, from NVML.

        `sleeps`: vLLM's cache leaves the card between rollouts, though not torch's counters.
        """
        if peak is None:
            from progress import memory_gib

            self.metrics({"rss_peak_gib": memory_gib(None)})
            return f"peak memory {memory_gib(None):.2f} GiB of RAM (no GPU, so no VRAM)"
        phases.settle()
        torch_gib, reserved_gib = phases.allocated / 2**30, phases.reserved / 2**30
        self.metrics({
            "vram_peak_gib": torch_gib,
            "vram_peak_reserved_gib": reserved_gib,
            "vram_peak_nvml_gib": peak.peak_gib,
            "vram_before_nvml_gib": peak.start_gib,
        })  # fmt: skip
        asleep = ", which count vLLM's cache while it sleeps" if sleeps else ""
        return (
            f"peak VRAM {torch_gib:.2f} GiB in torch's tensors, {reserved_gib:.2f} in its blocks{asleep}, "
            f"{peak.peak_gib:.2f} on the card ({peak.start_gib:.2f} at the start)"
        )

    def adapter(self, folder: Path, to: str = "lora") -> None:
        """An adapter's files, as artifacts below `to`."""
        self.journal.put("folder", path=str(folder.resolve()), to=to)

    def failure(self, error: BaseException, explained: str) -> None:
        """Why a run ended early: one line as a tag, the explanation and the traceback as an artifact."""
        self.journal.put("tags", values={"error": f"{type(error).__name__}: {one_line(error)}"})
        story = "".join(traceback.format_exception(error))
        self.journal.put("text", text=f"{explained}\n\n{story}", file="failure.txt")

    def pictures(self, say) -> None:
        """Draw what `figures` has by now; what cannot be drawn is said, and stops nothing."""
        for name, data_so_far in self.figures.items():
            try:
                if data := data_so_far():
                    self.picture(name, data, say)
            except Exception as error:
                say(f"{name}.png could not be drawn: {type(error).__name__}: {one_line(error)}")

    def picture(self, name: str, data, say) -> None:
        """A figure of pictures.FIGURES, as a file in the run's folder and as an artifact."""
        import pictures

        figure, file = pictures.FIGURES[name](data), self.run_dir / f"{name}.png"
        try:
            figure.savefig(file)
        except OSError as error:  # a full disk
            say(f"{file} could not be written ({error.strerror}); it is only recorded")
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        self.journal.put("figure", name=name, data=data, file=file.name)

    def end(self, status: str, say, stop=None) -> str | None:
        """Draw the figures, and close the run as FINISHED, FAILED or KILLED.

        Returns what the store does not have, in words, or None. A signal to `stop`, a stopping.Stop, ends the wait for a slow
        store.
        """
        import mlflow

        if stop:
            stop.hurry = self.journal.given_up.set
        self.pictures(say)
        self.journal.put("status", status=status)
        missing = self.journal.close(say)
        # also where the store is away, the run must not stay the active one
        with contextlib.suppress(Exception), impatience() if missing else contextlib.nullcontext():
            mlflow.end_run(status)
        if not missing:
            return None
        file = self.run_dir / journal.FILE
        kept = f"Nothing is lost: it is in {file}" if self.journal.whole else f"{file} does not hold all of it either"
        return (
            f"NOT RECORDED in {self.store}: {journal.in_words(missing)} ({self.journal.trouble[:200]}).\n"
            f"{kept}. {how_to_send(self.run_dir, self.project)}"
        )


def how_to_send(run_dir: Path, project: Path) -> str:
    """The command that sends what the store of a run does not have."""
    send = f"{command(project, 'record.py')} {shlex.quote(str(run_dir))}"
    return f"Once the store answers, with MLFLOW_TRACKING_URI as it was: {send}"


def upload(folder: Path, project: Path) -> str:
    """Send to the store what a run's journal says it does not have, or all of it where it does not know the run.

    Returns what was done, in words. Raises Refused for a folder that is no run's, a run that goes on, and a store that is
    away or does not take everything.
    """
    import mlflow

    runs, head, items = journal.read(folder)
    store = connect(project, head["experiment"])
    client = mlflow.MlflowClient()
    run_id, new = next((run_id for run_id in runs if knows(client, run_id)), None), ""
    if run_id is None:
        experiment = client.get_experiment_by_name(head["experiment"])
        began = items[0]["time"] if items else None
        run = client.create_run(experiment.experiment_id, start_time=began, run_name=head["run_name"])
        run_id, new = run.info.run_id, "new "
    missing = [item for item in items if item["n"] not in runs.get(run_id, ())]
    killed = not any(item["kind"] == "status" for item in items)  # with -9: nobody said how it ended
    if killed and len(items) not in runs.get(run_id, ()):
        missing.append({"n": len(items), "kind": "status", "status": "KILLED", "time": int(time.time() * 1000)})
    refused, why = [], ""
    with open(folder / journal.FILE, "a", buffering=1) as file:
        for item in missing:
            try:
                journal.deliver(client, run_id, item)
            except Exception as error:
                refused, why = [*refused, item], one_line(error)[:200]
            else:
                file.write(json.dumps({"sent": item["n"], "run_id": run_id}) + "\n")
    if refused:
        raise Refused(f"{store}: {why}; still to send: {journal.in_words(refused)}")
    return f"{store}, {new}run {run_id}: sent {journal.in_words(missing) or 'nothing, for it has all'}"


def knows(client, run_id: str) -> bool:
    """Whether the store has a run."""
    import mlflow

    try:
        return client.get_run(run_id) is not None
    except mlflow.MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise Refused(f"the store does not say whether it has run {run_id}: {one_line(error)[:200]}") from None


def own_store(project: Path) -> str:
    """The store where MLFLOW_TRACKING_URI names none."""
    return f"sqlite:///{project / 'mlflow.db'}"


def git_commit(project: Path) -> str:
    """The commit of the project's checkout, with "-dirty" for changes on top; "none" outside of a checkout."""
    try:
        git = ["git", "-C", str(project), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


def worker_of(engine):
    """What runs the model for an engine in this process, in vLLM 0.26.0."""
    return engine.llm_engine.model_executor.driver_worker.worker


def engine_figures(engine) -> dict:
    """What vLLM settled on, since it retries with less where memory is short: read from its config in vLLM 0.26.0."""
    config, worker = engine.llm_engine.vllm_config, worker_of(engine)
    return {
        "max_model_len": config.model_config.max_model_len,
        "kv_cache_gib": worker.available_kv_cache_memory_bytes / 2**30,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "kv_cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "compilation_mode": config.compilation_config.mode.name,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
    }


def how_to_open(store: str, project: Path) -> str:
    """The command or address that shows the curves."""
    if store.startswith("http"):
        return store
    default = store == own_store(project)
    return f"cd {project} && uv run mlflow ui" if default else f"uv run mlflow ui --backend-store-uri {store}"


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
            raise Refused("give the folder of one run: uv run python record.py outputs/RUN")
        print(upload(Path(sys.argv[1]), Path(__file__).resolve().parent))
    except Refused as refusal:
        print(f"record.py: {refusal}", file=sys.stderr)
        sys.exit(2)
