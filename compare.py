"""Rollout back ends side by side: the same training in a fresh process for each, read back from MLflow.

    uv run python compare.py run --backends vllm unsloth paged trl --steps 10      flags after -- are train.py's
    uv run python compare.py run --backends paged "paged --use-cuda-graph" "trl --torch-compile"      with a flag of its own
    uv run python compare.py table PARENT --steps 10                               the first 10 steps of longer runs
    uv run python compare.py diff REFERENCE CANDIDATE                              exit code 1: outside of the bands

Each back end is an MLflow run under one parent in the experiment p7-grpo-backends; table and diff read nothing else. All have
the same config but for `backend`: a rollout for each step, no evaluations, and where no batch is given one group a pass. A back
end that fails is a row with its reason, and the others go on. `--noise` runs the first one again with the next seed, which says
how far two runs of one back end are apart. README.md, "Which back end?", has what it found.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import checks
import command_line
import parallel
import pictures
import record
import train
from benchmark import look_at, machine, say, shown, table
from gpu import find_gpu
from stopping import Stop, Stopped

EXPERIMENT = "p7-grpo-backends"
BACKENDS = ("vllm", "unsloth", "paged", "trl")
OWN = (
    "--backend --max-steps --save-steps --eval-problems --eval-steps --sample-steps --output-dir --experiment --run-name "
    "--resume-from-checkpoint"
).split()
# what may differ between two runs that are compared: how they generate, where they lie, and luck
FREE = {"backend", "run_name", "output_dir", "experiment", "seed", "use_cuda_graph", "torch_compile", "lean_decode", "force",
        "kv_cache_gib", "vllm_enable_sleep_mode", "vllm_start_timeout", "gpu_memory_utilization",
        "vram_limit_gib", "save_steps", "sample_steps"}  # fmt: skip
SERIES = {  # what diff compares and the figure shows, by the metric's name
    "loss": "loss",
    "reward": "reward",
    "KL": "kl",
    "grad_norm": "grad_norm",
    "completion length": "completions/mean_length",
    "compression ratio": "completions/compression_ratio",
}
SKIPPED = 3  # steps that compile and warm up


def main(arguments: list[str]) -> None:
    parser = command_line.Parser(prog="compare.py", description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False, help="train with each back end, one after the other")
    run.add_argument("--backends", nargs="+", default=list(BACKENDS), metavar="BACKEND",
                     help=f"{', '.join(BACKENDS)}, or one with flags of its own in quotes")  # fmt: skip
    run.add_argument("--steps", type=int, default=10, help="optimizer steps of each")
    run.add_argument("--noise", action="store_true", help="the first back end once more, with the next seed")
    run.add_argument("--out", help="folder for what the runs write; by itself a new one in benchmarks/")
    one = commands.add_parser("table", allow_abbrev=False, help="speed and memory of the runs under one parent or several")
    one.add_argument("parents", nargs="+", metavar="parent", help="id of a parent run")
    two = commands.add_parser("diff", allow_abbrev=False, help="how far apart two runs are; 1 where a band is left")
    two.add_argument("reference", help="id of a run")
    two.add_argument("candidate", help="id of a run")
    two.add_argument("--anyway", action="store_true", help="compare runs of different configs, as far as both go")
    two.add_argument("--kl-max", type=float, default=0.015, help="largest KL of either (the smallest is 0)")
    two.add_argument("--loss-min", type=float, default=-0.3)
    two.add_argument("--loss-max", type=float, default=1.0)
    two.add_argument("--length-ratio", type=float, default=1.5, help="mean length over the last third, against the reference's")
    two.add_argument("--compression-ratio", type=float, default=1.5,
                     help="how well the answers of the last third compress, against the reference's: a loop compresses better, "
                     "noise worse; either by less than this factor")  # fmt: skip
    for command in (one, two):
        command.add_argument("--steps", type=int, help="only so many of the first steps")
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options, flags = parser.parse_known_args(before)
    options.flags = flags + arguments[len(before) + 1 :]
    if options.command != "run" and options.flags:
        raise checks.Refused(f"{options.command} {options.flags[0]}: {options.command} --help lists what it takes")
    if options.steps is not None and not 1 <= options.steps <= 10**6:
        raise checks.Refused(f"--steps {options.steps}: must be at least 1, and at most 1000000")
    if options.command == "run":
        parallel.refuse_a_launcher("compare.py")
        options.line = f"uv run python compare.py {shlex.join(arguments)}"
        with Stop() as stop:
            run_all(options, find_gpu()[0], stop)
        return
    check_reading(options)
    record.connect(train.PROJECT, EXPERIMENT, must_be_there=True)
    from mlflow import MlflowException

    try:
        if options.command == "table":
            parents = dict.fromkeys(options.parents)
            print(in_a_table([run for parent in parents for run in read_children(parent)], options.steps))
        else:
            sys.exit(difference(options))
    except MlflowException as error:
        raise checks.Refused(f"the MLflow store does not answer ({checks.one_line(error)[:200]}); try again") from None


def check_reading(options) -> None:
    """Refuse ids that no store gives, and bands that let nothing through, or everything."""
    for run_id in options.parents if options.command == "table" else [options.reference, options.candidate]:
        if not run_id.isalnum():
            raise checks.Refused(
                f"{run_id!r} is no id of a run, which has letters and digits alone; compare.py run prints them"
            )
    if options.command == "table":
        return
    for name in ("length_ratio", "compression_ratio"):
        if not getattr(options, name) > 1:
            raise checks.Refused(
                f"{checks.flag(name)} {getattr(options, name):g}: must be above 1; 1.5 is where nothing is said"
            )
    if not options.kl_max >= 0:
        raise checks.Refused(f"--kl-max {options.kl_max:g}: must be 0 or more; 0.015 is where nothing is said")
    if not options.loss_min < options.loss_max:
        said = f"--loss-min {options.loss_min:g} --loss-max {options.loss_max:g}"
        raise checks.Refused(f"{said}: the first must be below the second; -0.3 and 1 are where nothing is said")


# run


def run_all(options, gpu, stop: Stop) -> None:
    """Train with each back end in a process of its own; the table and the figure go to the screen and to the parent run."""
    for word in options.flags:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in OWN:
            raise checks.Refused(f"{word}: compare sets it itself; compare.py run --help lists what can be said")
        if flag in ("--steps", "--backends", "--noise", "--out"):
            raise checks.Refused(f"{word}: it is compare's own, and goes before the --")
        if flag in ("-h", "--help"):
            raise checks.Refused(f"{word}: before the -- it is compare's; for what may come after it, train.py --help")
    if len(set(options.backends)) < len(options.backends):
        twice = next(name for name in options.backends if options.backends.count(name) > 1)
        raise checks.Refused(f"--backends: {twice!r} is there twice; --noise runs the first one again, with the next seed")
    os.environ.update({**train.ENVIRONMENT, **os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})  # NVML counts cards in that order
    flags = [*options.flags, *same_for_all(options.flags, gpu)]
    sizes = f"--max-steps {options.steps} --save-steps {options.steps} --eval-problems 0 --sample-steps 0"
    flags += [*sizes.split(), "--experiment", EXPERIMENT]
    plans = []
    for name in options.backends:
        own = ["--backend", *flags_of(name)]
        plans.append((name, own, command_line.parse(train.Config, train.PRESETS, [*flags, *own], gpu, "compare.py")))
    if options.noise:
        name, own, config = plans[0]
        plans.insert(1, (name, own, dataclasses.replace(config, seed=config.seed + 1)))
    refusals = [refusal for name, _, config in plans if (refusal := refused(name, config, gpu))]
    if len(refusals) == len(plans):  # before anything starts; what one of them cannot do is a row
        raise checks.Refused(refusals[0])
    first = plans[0][-1]
    out = Path(options.out or f"benchmarks/backends-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    if next(out.glob("*/*/record.jsonl"), None):
        raise checks.Refused(f"--out {out}: holds the runs of an earlier comparison; give another folder")
    new = not out.exists()
    try:
        checks.check_output_dir(out)
        store = record.connect(train.PROJECT, EXPERIMENT)
    except checks.Refused as refusal:
        if new:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise checks.Refused(str(refusal).replace("--output-dir", "--out")) from None
    say(f"{machine(gpu)}; {options.steps} steps of {first.effective_batch} completions in groups of {first.num_generations}, "
        f"a rollout for each {'step' if first.steps_per_rollout == 1 else f'{first.steps_per_rollout} steps'}")  # fmt: skip

    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name(EXPERIMENT)
    parent = client.create_run(experiment.experiment_id, run_name=" ".join(options.backends)).info.run_id
    status = "FAILED"
    try:
        about = {"command": options.line, "machine": machine(gpu), "commit": record.git_commit(train.PROJECT)}
        for name, value in about.items():
            client.log_param(parent, name, value[:6000])
        for i, (name, own, config) in enumerate(plans):
            say(f"== {name}, seed {config.seed} ({i + 1} of {len(plans)})")
            folder = out / f"{i}-{config.backend}"
            started = [*flags, *own, "--seed", str(config.seed), "--run-name", config.backend, "--output-dir", str(folder)]
            run_id, reason = start(name, started, config, gpu, parent, client, folder)
            if run_id is None:
                with store_may_be_away(f"== {name}: {reason}"):
                    run_id = client.create_run(experiment.experiment_id, run_name=name).info.run_id
                    for tag, value in {"mlflow.parentRunId": parent, "error": reason, "backend": name}.items():
                        client.set_tag(run_id, tag, value[:5000])
                    client.set_terminated(run_id, "FAILED")
            if reason:
                say(f"== {name}: {reason}")
            stop.raise_if_asked()
        status = "FINISHED"
    except (KeyboardInterrupt, Stopped):
        status = "KILLED"
        raise
    finally:
        stop.leaving = True
        runs = []
        with store_may_be_away(f"once it answers: uv run python compare.py table {parent}"):
            runs = children(client, parent)
        finished = any(run.status == "FINISHED" for run in runs)
        with store_may_be_away(f"the parent run {parent} stays RUNNING"):
            client.set_terminated(parent, status if finished or status != "FINISHED" else "FAILED")
        if runs:
            conclude(client, parent, runs, out)
        say(f"parent run {parent}; {record.how_to_open(store, train.PROJECT)}, experiment {EXPERIMENT}")
    if not finished:
        sys.exit(1)


def flags_of(name: str) -> list[str]:
    """A back end with flags of its own as words. Refuses a back end that there is not, and flags that change more than it."""
    try:
        words = shlex.split(name)
    except ValueError as error:
        raise checks.Refused(f"--backends {name!r}: {str(error).lower()}; for example 'trl --torch-compile'") from None
    if not words or words[0] not in BACKENDS:
        raise checks.Refused(f"--backends {name!r}: there are {', '.join(BACKENDS)}, each also with flags in quotes")
    if words[1:2] and not words[1].startswith("-"):
        raise checks.Refused(f"--backends {name!r}: {words[1]!r} is no flag; without quotes each is a back end: {name}")
    for word in words[1:]:
        flag = word.partition("=")[0].replace("_", "-")
        field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not flag.startswith("-"):
            continue
        if field not in train.Config.__dataclass_fields__ or field == "processes":
            raise checks.Refused(f"--backends {name!r}: train.py has no flag {word}; uv run python train.py --help lists all")
        if flag in OWN or field not in FREE:
            raise checks.Refused(f"--backends {name!r}: {word} would make it another training; after -- it is for all of them")
    return words


def refused(name: str, config, gpu) -> str | None:
    """Why a config cannot run here, in words, for the back end that it is of."""
    try:
        look_at(config, gpu)
    except checks.Refused as refusal:
        return f"{name}: {refusal}"


@contextlib.contextmanager
def store_may_be_away(instead: str):
    """What the store does not take is said, with `instead`, and stops nothing: the runs keep what they have for later."""
    try:
        yield
    except Exception as error:
        say(f"the MLflow store does not answer ({checks.one_line(error)[:200]}); {instead}")


def same_for_all(flags: list[str], gpu) -> list[str]:
    """Flags that are not given: a batch of one group in each pass, and a rollout for each step."""
    given = {word.partition("=")[0].replace("_", "-") for word in flags}
    config = command_line.parse(train.Config, train.PRESETS, flags, gpu, "compare.py")
    added = []
    if "--per-device-train-batch-size" not in given:
        added += ["--per-device-train-batch-size", str(config.num_generations)]
    if "--steps-per-generation" not in given:
        added += ["--steps-per-generation", "None"]
    return added


def start(name: str, flags: list[str], config, gpu, parent: str, client, folder: Path) -> tuple[str | None, str | None]:
    """Train in a process of its own; returns the id of its run, and in words why it failed, where it did.

    The run becomes the parent's, by the name of its row, as soon as it is there. A signal to this process is passed on, and
    waited for.
    """
    try:
        look_at(config, gpu)
    except checks.Refused as refusal:
        return None, str(refusal).replace("\n", " ")
    folder.mkdir(parents=True, exist_ok=True)
    run_id = reason = None
    with open(folder / "stderr", "w+", errors="replace") as errors:
        command = [sys.executable, str(train.PROJECT / "train.py"), *flags]
        with subprocess.Popen(command, stderr=errors) as process:
            try:
                while process.poll() is None:
                    run_id = run_id or adopt(folder, name, parent, client)
                    time.sleep(0.2)
            except Stopped as stopped:
                end(process, stopped.signum)
                raise
            finally:
                run_id = run_id or adopt(folder, name, parent, client)
                if run_id and process.returncode:
                    reason = close(folder, run_id, process.returncode, client)
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    if run_id is None and process.returncode:
        return None, checks.one_line(" ".join(said[-2:]) or in_words(process.returncode))
    return run_id, reason


def close(folder: Path, run_id: str, code: int, client) -> str | None:
    """Send what the journal of a run has left, where its process could not; returns why it failed, in words."""
    error = in_words(code)
    with store_may_be_away(error):
        if code < 0 or client.get_run(run_id).info.status == "RUNNING":
            record.upload(next(folder.glob("*/record.jsonl")).parent, train.PROJECT)
        run = client.get_run(run_id)
        if run.info.status == "FINISHED":  # trained, and all of it is there now
            return None
        if "error" not in run.data.tags:
            client.set_tag(run_id, "error", error)
        error = run.data.tags.get("error", error).removeprefix("Refused: ")
    return error


def in_words(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"


def end(process: subprocess.Popen, signum: int) -> None:
    """Pass a signal on and wait. Another one, at least a second later, is passed on too; a third kills."""
    for each in (signum, signum, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(each)
        with contextlib.suppress(Stopped):
            process.wait()
            return


def adopt(folder: Path, name: str, parent: str, client) -> str | None:
    """The id of the run that writes into the folder, now under its parent; None while it is not there."""
    for journal in folder.glob("*/record.jsonl"):
        with contextlib.suppress(Exception):  # half a line, or a store that is away: it is tried again
            run_id = json.loads(journal.read_text().splitlines()[0])["run_id"]
            client.set_tag(run_id, "mlflow.parentRunId", parent)
            client.set_tag(run_id, "backend", name)
            return run_id
    return None


def conclude(client, parent: str, runs: list["Run"], out: Path) -> None:
    """Print the table, and put table and figure beside the parent run."""
    text = in_a_table(runs, None)
    say(text)
    with store_may_be_away("the table is on the screen alone"):
        client.log_text(parent, text, "table.md")
    if drawn := {run.name: run.series() for run in runs if len(run.steps) > 1}:
        figure = pictures.backends(drawn)
        with contextlib.suppress(OSError):
            out.mkdir(parents=True, exist_ok=True)
            figure.savefig(out / "backends.png")
            say(f"figure: {out / 'backends.png'}")
        with store_may_be_away("the figure is in that folder alone"):
            client.log_figure(parent, figure, "backends.png")


# what MLflow has


@dataclasses.dataclass
class Run:
    """One back end's run, with every metric that was logged for a step in one dict of that step."""

    run_id: str
    parent: str | None
    name: str
    status: str
    params: dict[str, str]
    metrics: dict[str, float]  # the latest of each
    error: str | None
    steps: dict[int, dict[str, float]]

    def each(self, part: str = "") -> dict[int, float]:
        """Seconds of each step, or those of a part of it; where a rollout feeds several steps, the mean over those."""
        own = {
            step: sum(value for name, value in metrics.items() if name.startswith(f"seconds/{part}"))
            for step, metrics in self.steps.items()
        }
        size = int(self.params.get("steps_per_rollout", 1))
        rollouts = {}
        for step in own:
            rollouts.setdefault((step - 1) // size, []).append(own[step])
        return {step: statistics.mean(rollouts[(step - 1) // size]) for step in own}

    def latest(self, name: str) -> dict[int, float]:
        """A metric by step; the later steps of a rollout, which log none of its answers, have that of its first one."""
        found, last = {}, None
        for step, metrics in self.steps.items():
            last = metrics.get(name, last)
            if last is not None:
                found[step] = last
        return found

    def series(self) -> dict[str, list]:
        """What is drawn over the steps."""
        found = {"step": list(self.steps), "seconds a step": list(self.each().values())}
        for title, name in SERIES.items():
            found[title] = [metrics.get(name) for metrics in self.steps.values()]
        return found


def read_run(client, run_id: str) -> Run:
    """A run by its id. Refuses one that the store does not have."""
    if not record.knows(client, run_id):
        raise checks.Refused(f"run {run_id}: the store has none of that id; compare.py table PARENT lists them")
    run = client.get_run(run_id)
    if "backend" not in {**run.data.params, **run.data.tags}:
        raise checks.Refused(f"run {run_id} is none of a back end; compare.py table {run_id} lists those under a parent")
    steps: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run_id, name):
            if metric.step >= 1:
                steps.setdefault(metric.step, {})[name] = metric.value
    steps = {step: steps[step] for step in sorted(steps) if any(name.startswith("seconds/") for name in steps[step])}
    tags, params = run.data.tags, run.data.params
    name = tags.get("backend") or params.get("backend") or run.info.run_name
    parent = tags.get("mlflow.parentRunId")
    return Run(run_id, parent, name, run.info.status, params, run.data.metrics, tags.get("error"), steps)


def read_children(parent: str) -> list[Run]:
    """The runs under a parent, in the order of their start. Refuses a parent without any."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    if runs := children(client, parent):
        return runs
    own = client.get_run(parent).data.tags.get("mlflow.parentRunId") if record.knows(client, parent) else None
    other = f"it is under {own} itself" if own else "compare.py run prints the id"
    raise checks.Refused(f"parent {parent}: no run in experiment {EXPERIMENT} is under it; {other}")


def children(client, parent: str) -> list[Run]:
    """The runs under a parent, in the order of their start; a second one of a back end is named with its seed."""
    experiment = client.get_experiment_by_name(EXPERIMENT)
    found = client.search_runs(
        [experiment.experiment_id], f"tags.mlflow.parentRunId = '{parent}'", order_by=["attributes.start_time ASC"]
    )
    runs = [read_run(client, run.info.run_id) for run in found]
    for i, run in enumerate(runs):
        if any(run.name == earlier.name for earlier in runs[:i]):
            run.name = f"{run.name}, seed {run.params.get('seed', '?')}"
    return runs


# table


def in_a_table(runs: list[Run], steps: int | None) -> str:
    """Speed and memory of each run, in its first `steps` steps; seconds from step 4 on, where there are so many."""
    longest = max(len(run.steps) for run in runs)
    if steps and steps > longest:
        raise checks.Refused(f"--steps {steps}: the longest of these runs has {longest}")
    counted = steps or longest
    first = SKIPPED + 1 if counted > SKIPPED else 1
    rows, pace = [], f"median step, s (from step {first})"
    for run in runs:
        seconds = {step: value for step, value in run.each().items() if step <= counted}
        late = {step: value for step, value in seconds.items() if step >= first}
        row = {"back end": run.name, "run": run.run_id, "steps": len(seconds)}
        if late:
            generating, rewards = run.each("generation"), run.latest("reward")
            lengths = {step: length for step, length in run.latest("completions/mean_length").items() if step in late}
            tokens = sum(lengths.values()) * int(run.params.get("effective_batch", 0))
            start = [run.metrics.get(f"start_seconds/{part}") for part in ("imports", "to_first_step")]
            card, before = (run.metrics.get(f"vram_{name}_nvml_gib") for name in ("peak", "before"))
            row |= {
                "training, s": sum(seconds.values()),
                pace: statistics.median(late.values()),
                "p90, s": percentile(list(late.values()), 0.9),
                "of it generating, s": statistics.median(generating[step] for step in late),
                "mean length, tokens": statistics.mean(lengths.values()) if lengths else None,
                "generated tokens/s": tokens / sum(late[step] for step in lengths) if tokens else None,
                "peak, GiB (on the card, or of RAM)": run.metrics.get("rss_peak_gib") if card is None else card - before,
                "start to end of step 1, s": None if None in start else sum(start),
                "last reward": rewards.get(max(late)),
            }
        row["what went wrong"] = run.error or ("" if run.status == "FINISHED" else run.status)
        rows.append(row)
    columns = list(max(rows, key=len))
    vllm = [(run.parent, row[pace]) for run, row in zip(runs, rows) if run.params.get("backend") == "vllm" and pace in row]
    if vllm:  # a parent's own, where it has one
        columns.insert(columns.index(pace) + 1, "of vLLM's speed")
        for run, row in zip(runs, rows):
            own = dict(reversed(vllm)).get(run.parent, vllm[0][1])
            row["of vLLM's speed"] = f"{100 * own / row[pace]:.0f} %" if pace in row else ""
    return table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value) -> str:
    return shown(value) if isinstance(value, float) else "" if value is None else str(value)


def percentile(values: list[float], share: float) -> float:
    """By the nearest rank."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


# diff


def difference(options) -> int:
    """Print how far apart two runs are by step, beside two seeds of one back end where there are such; 1 for a band left."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    reference, candidate = (read_run(client, run_id) for run_id in (options.reference, options.candidate))
    problems = not_comparable(reference, candidate)
    if problems and not options.anyway:
        raise checks.Refused(f"not comparable: {'; '.join(problems)}. --anyway compares them as far as both go")
    steps = [step for step in reference.steps if step in candidate.steps and step <= (options.steps or math.inf)]
    if not steps or options.steps and len(steps) < options.steps:
        raise checks.Refused(
            f"the runs have {len(steps)} steps in common" + (f", not {options.steps}" if options.steps else "")
        )
    logged = {title: [run.latest(name).keys() & set(steps) for run in (reference, candidate)] for title, name in SERIES.items()}
    missing = [title for title, both in logged.items() if not all(both)]
    if len(missing) == len(SERIES):
        raise checks.Refused(f"nothing to compare: in these steps one of them logged none of {', '.join(SERIES)}")
    noise = noise_of(client, reference)
    rows = []
    for title, name in SERIES.items():
        row = [title, *apart(reference, candidate, name, steps)]
        rows.append(row + (apart(reference, noise, name, steps) if noise else []))
    seeds = reference.params.get("seed"), candidate.params.get("seed")
    columns = ["by step", f"max, {reference.name} (seed {seeds[0]}) and {candidate.name} (seed {seeds[1]})", "mean"]
    if noise:
        columns += [f"max, {reference.name} with seeds {seeds[0]} and {noise.params.get('seed')}", "mean"]
    print(table(columns, rows))
    left = bands_left(reference, candidate, steps, options)
    if missing:
        print(f"not checked, since one of them did not log it: {', '.join(missing)}")
    print(
        f"outside of the bands: {'; '.join(left)}"
        if left
        else f"within the bands over {len(steps)} step{'s' * (len(steps) > 1)}"
    )
    return 1 if left else 0


def not_comparable(reference: Run, candidate: Run) -> list[str]:
    """Why two runs should not be compared, each reason in a few words."""
    found = []
    for run in (reference, candidate):
        if run.status != "FINISHED":
            found.append(f"{run.name} ({run.run_id}) is {run.status}" + (f": {run.error}" if run.error else ""))
    names = {field.name for field in dataclasses.fields(train.Config)} - FREE
    for name in sorted(names):
        default = "1" if name == "processes" else None  # of runs from before it was one
        own, other = reference.params.get(name, default), candidate.params.get(name, default)
        if own != other and (name in reference.params or name in candidate.params):
            found.append(f"--{name.replace('_', '-')} {own} and {other}")
    return found


def noise_of(client, reference: Run) -> Run | None:
    """Another run of the reference's back end under the same parent, with the same config but for the seed."""
    parent = client.get_run(reference.run_id).data.tags.get("mlflow.parentRunId")
    for run in children(client, parent) if parent else []:
        same = run.params.get("backend") == reference.params.get("backend") and not not_comparable(reference, run)
        if same and run.params.get("seed") != reference.params.get("seed"):
            return run
    return None


def values_of(run: Run, name: str, steps: list[int]) -> list[float | None]:
    return [run.steps.get(step, {}).get(name) for step in steps]


def apart(one: Run, other: Run, name: str, steps: list[int]) -> list[str]:
    """The largest and the mean difference of a metric, step by step."""
    pairs = [pair for pair in zip(values_of(one, name, steps), values_of(other, name, steps)) if None not in pair]
    if not pairs:
        return ["not logged by both", ""]
    if not all(is_number(value) for pair in pairs for value in pair):
        return ["nan", "nan"]
    differences = [abs(a - b) for a, b in pairs]
    return [shown(max(differences)), shown(statistics.mean(differences))]


def is_number(value: float) -> bool:
    """Whether a metric is finite, also by what MLflow's SQL stores make of an infinite one: the largest number there is."""
    return abs(value) < 1e300


def bands_left(reference: Run, candidate: Run, steps: list[int], options) -> list[str]:
    """What of either run is outside: losses, KL, numbers that are none, answers that grow without end, or say nothing."""
    left = []
    for run in (reference, candidate):
        values = {title: values_of(run, name, steps) for title, name in SERIES.items()}
        for title, found in values.items():
            if bad := [step for step, value in zip(steps, found) if value is not None and not is_number(value)]:
                left.append(f"{title} of {run.name} is no number in step {bad[0]}")
        for title, low, high in (("KL", -1e-6, options.kl_max), ("loss", options.loss_min, options.loss_max)):
            far = [(step, v) for step, v in zip(steps, values[title]) if v is not None and not low <= v <= high]
            if far:
                step, value = max(far, key=lambda pair: abs(pair[1]) if is_number(pair[1]) else math.inf)
                left.append(f"{title} of {run.name} is {value:.4g} in step {step} (band: {low:g} to {high:g})")
    last = steps[-max(len(steps) // 3, 1) :]
    whose = f"in the last {f'{len(last)} steps' if len(last) > 1 else 'step'}, {reference.name}'s"
    length = [mean_of(run, "completion length", last) for run in (reference, candidate)]
    if all(length) and length[1] > options.length_ratio * length[0]:
        left.append(f"answers of {candidate.name} have {length[1]:.0f} tokens {whose} {length[0]:.0f}")
    ratio = [mean_of(run, "compression ratio", last) for run in (reference, candidate)]
    if all(ratio) and not 1 / options.compression_ratio < ratio[1] / ratio[0] < options.compression_ratio:
        left.append(
            f"answers of {candidate.name} compress {ratio[1]:.2f} to 1 {whose} {ratio[0]:.2f} to 1: gibberish, or a loop"
        )
    return left


def mean_of(run: Run, title: str, steps: list[int]) -> float | None:
    """The mean of a series over some steps, those of a rollout by its first one."""
    found = [value for step, value in run.latest(SERIES[title]).items() if step in steps]
    return statistics.mean(found) if found else None


if __name__ == "__main__":
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        main(sys.argv[1:])
    except checks.Refused as refusal:
        print(f"compare.py: {refusal}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, Stopped) as stopped:
        sys.exit(128 + getattr(stopped, "signum", 2))
