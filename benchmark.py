"""How fast is it, and what does it cost in learning? Each command prints a table with card, driver and date.

    uv run python benchmark.py compare "--preset chapter" "--preset qwen3-4b" -- --vram-limit-gib 15
    uv run python benchmark.py scale --kv-cache-gib 34                       step time over G, C and groups a rollout
    uv run python benchmark.py learn --preset smollm2 --max-operand 60 --max-steps 96    held-out accuracy, paired seeds

compare starts train.py anew for each set of flags, one after the other, as often as --starts says, and reports the last
start: by then compiled kernels are on disk. scale and learn load one model and run TRL's trainer on it again and again, each
time with a new adapter. Flags after the command, or after --, are train.py's. Figures land as they come in OUT/COMMAND.json
(OUT is by itself a new folder in benchmarks/), and beside it, for scale and learn, a picture and what the libraries say. A
benchmark that is stopped shows what it has.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cards
import checks
import command_line
import engine
import models
import parallel
import pictures
import roofline
import train
from console import Console
from data import build_dataset, drop_long_prompts, in_order
from gpu import find_gpu
from record import git_commit
from stopping import Stop, Stopped, time_limit
from trainer import grpo_arguments, make_ready, trainer_class

OWN = {  # flags of train.py that a command sets itself
    "compare": "--max-steps --save-steps --eval-problems --sample-steps --output-dir --experiment --resume-from-checkpoint",
    "scale": "--num-generations --per-device-train-batch-size --gradient-accumulation-steps --max-completion-length "
    "--steps-per-generation --max-steps --train-problems --resume-from-checkpoint",
    "learn": "--steps-per-generation --resume-from-checkpoint",
}
# Student's t for the mean of so many, 95 %
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def main(arguments: list[str]) -> None:
    parser = command_line.Parser(prog="benchmark.py", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("compare", "scale", "learn"):
        others = (
            "Flags of train.py (--model, --preset, ...) come after these, or after --; those that it sets itself are refused."
        )
        command = commands.add_parser(name, allow_abbrev=False, epilog=others)
        command.add_argument("--out", help="folder for figures and pictures; by itself a new one in benchmarks/")
        if name == "compare":
            command.add_argument("runs", nargs="+", metavar="FLAGS", help="a run's flags, as one argument with a space")
            command.add_argument("--starts", type=int, default=2, help="starts of each; the last one counts")
            command.add_argument("--rollouts", type=int, default=3, help="rollouts that count, after the first")
            command.add_argument("--least", type=int, default=5, help="steps that count at least, after the first three")
        elif name == "scale":
            points = [*range(len(POINTS))]
            which = "points to measure, in the order of README.md's table"
            command.add_argument("--only", type=int, nargs="+", default=points, choices=points, help=which)
        else:
            command.add_argument("--seeds", type=int, default=3, help="paired seeds, 2 to 10, from --seed on")
            command.add_argument("--rollout", type=int, nargs="+", default=[8], help="groups a rollout, each against one")
            command.add_argument("--points", type=int, default=4, help="evaluations after the first")
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options, flags = parser.parse_known_args(before)
    if options.command == "compare" and flags:
        raise checks.Refused(
            f"compare {flags[0]}: a run's flags are one argument with a space in it ('{flags[0]} '); those of all runs come "
            "after --"
        )
    options.flags = flags + arguments[len(before) + 1 :]
    try:
        options.runs = [(run, shlex.split(run)) for run in getattr(options, "runs", [])]
    except ValueError as error:
        raise checks.Refused(f"compare {shlex.join(options.runs)}: {error}") from None
    for word in options.flags + [word for _, words in options.runs for word in words]:
        if word.partition("=")[0].replace("_", "-") in OWN[options.command].split():
            raise checks.Refused(f"{word}: {options.command} sets it itself; {options.command} --help lists what can be said")
    for name, least in (("starts", 1), ("rollouts", 1), ("least", 1), ("seeds", 2), ("rollout", 2), ("points", 1)):
        given = getattr(options, name, least)
        if (smallest := min(given) if isinstance(given, list) else given) < least:
            raise checks.Refused(f"--{name} {smallest}: must be at least {least}")
    if getattr(options, "seeds", 2) not in T_95:
        raise checks.Refused(f"--seeds {options.seeds}: at most {max(T_95)}")
    os.environ.update({**train.ENVIRONMENT, **os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})  # NVML counts cards in that order
    parallel.refuse_a_launcher("benchmark.py")
    gpu = find_gpu()[0]
    options.line = f"uv run python benchmark.py {shlex.join(arguments)}"
    say(f"$ {options.line}\n{machine(gpu)}")
    with Stop() as options.stop:
        try:
            {"compare": compare, "scale": scale, "learn": learn}[options.command](options, gpu)
        finally:
            engine.leave_process_group()


def look_at(config, gpu) -> None:
    """Refuse what cannot run, before anything slow."""
    checks.check_config(config)
    checks.check_machine(config, gpu)
    models.check_model(config.model, config.load_in)
    checks.load_task(config.task)
    engine.look_at(config, gpu)


def say(text: str) -> None:
    """Print; a screen that has gone (`| head`, ssh) costs no figures."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def open_out(options) -> Path:
    """The folder for what a command finds; one that holds such figures already is refused, so that none are lost."""
    out = Path(options.out or f"benchmarks/{options.command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise checks.Refused(f"--out {out}: {error.strerror}; give a folder that can be written") from None
    if (out / f"{options.command}.json").exists():
        raise checks.Refused(f"--out {out}: holds the {options.command}.json of an earlier run; give another folder")
    return out


def keep(options, gpu, out: Path, found: dict, say=say) -> None:
    """What was measured so far, as JSON: a benchmark of many minutes that is cut off leaves what it has."""
    how = {"command": options.line, "commit": git_commit(train.PROJECT), "machine": machine(gpu)}
    path = out / f"{options.command}.json"
    aside = path.with_suffix(".part")
    try:
        aside.write_text(json.dumps({**how, **found}, indent=1))
        os.replace(aside, path)
    except OSError as error:  # the figures are on the screen too
        say(f"{path} not written: {error.strerror}")
        with contextlib.suppress(OSError):
            aside.unlink()


def draw(figure, path: Path, say) -> None:
    try:
        figure.savefig(path)
    except OSError as error:
        say(f"{path} not written: {error.strerror}")


def machine(gpu) -> str:
    """Card, driver and date, or the processor."""
    where = f"{gpu.name}, driver {gpu.driver}" if gpu else f"{os.cpu_count()} cores, {platform.machine()}, no GPU"
    return f"{where}, {time.strftime('%Y-%m-%d')}"


def table(columns: list[str], rows: list[list]) -> str:
    """A table as README.md has them."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


# compare: whole starts of train.py


def compare(options, gpu) -> None:
    """Start each set of flags, and print what the last start of each took, with ratios to the first set."""
    runs, found, starts = [], [], options.starts
    for flags, words in options.runs:
        config = command_line.parse(train.Config, train.PRESETS, [*options.flags, *words], gpu)
        checks.check_config(config)
        each = config.steps_per_rollout
        skipped = math.ceil(3 / each) * each  # compiling and warming up: the chapter's first three steps
        steps = skipped + max(options.rollouts * each, math.ceil(options.least / each) * each)
        config = dataclasses.replace(config, max_steps=steps, save_steps=steps, eval_problems=0, sample_steps=0)
        look_at(config, gpu)
        runs.append((flags, words, config, skipped))
    out = open_out(options)
    try:
        for flags, words, config, skipped in runs:
            for i in range(starts):
                say(f"{flags}: start {i + 1} of {starts}, {config.max_steps} steps")
                figures = start(flags, [*options.flags, *words], config, skipped)
                found.append({"run": flags, "start": i + 1, **figures})
                keep(options, gpu, out, {"starts": found})
                say(f"{flags}: {json.dumps(figures)}")
    finally:
        if found:
            say(compared(found, starts, whole=len(found) == starts * len(runs)))
            say(f"figures: {out / 'compare.json'}")


def compared(found: list[dict], starts: int, whole: bool) -> str:
    """A table of the last start of each set of flags, and where all were started as often, the first's ratios to the last."""
    last = [found[i : i + starts][-1] for i in range(0, len(found), starts)]
    heads = [f"`{f['run']}`" + (f", start {f['start']} of {starts}" if f["start"] < starts else "") for f in last]
    rows = [
        [name, *(shown(figures.get(name)) for figures in last), ratio(last[0], last[-1], name) if whole else ""]
        for name in last[0]
        if name not in ("run", "start")
    ]
    return table(["", *heads, "first / last"], rows)


def start(flags: str, words: list[str], config, skipped: int) -> dict[str, float]:
    """One run of train.py without evaluations, in a folder that goes away, with its record; what it took."""
    with tempfile.TemporaryDirectory() as folder:
        store, steps = store_in(folder, "benchmark"), config.max_steps
        sizes = f"--max-steps {steps} --save-steps {steps} --eval-problems 0 --sample-steps 0 --experiment benchmark".split()
        command = [sys.executable, str(train.PROJECT / "train.py"), *words, *sizes, "--output-dir", folder]
        done = subprocess.run(command, env={**os.environ, "MLFLOW_TRACKING_URI": store})
        if done.returncode:
            print(f"benchmark.py: train.py {flags}: exit code {done.returncode}; its last words are above", file=sys.stderr)
            sys.exit(1)
        journal = next(Path(folder).glob("*/record.jsonl"))
        items = [json.loads(line) for line in journal.read_text().splitlines()]
    metrics = {}
    for item in items:
        if item.get("kind") == "metrics":
            metrics.setdefault(item["step"], {}).update(item["values"])
    return figures_of(metrics, steps, skipped, config.steps_per_rollout)


def store_in(folder: str, experiment: str) -> str:
    """An MLflow store with an experiment whose artifacts lie in the folder too, and not in ./mlruns."""
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    store = f"sqlite:///{folder}/mlflow.db"
    MlflowClient(store).create_experiment(experiment, artifact_location=Path(folder, "artifacts").as_uri())
    return store


def figures_of(metrics: dict[int, dict], steps: int, skipped: int, each: int) -> dict[str, float]:
    """What a run took, from its metrics by step, in whole rollouts of `each` steps; those up to `skipped` do not count."""
    counted = [metrics[step] for step in range(skipped + 1, steps + 1)]
    parts = [name for name in counted[0] if name.startswith("seconds/")]
    seconds = {part: statistics.mean(step[part] for step in counted) for part in parts}
    found = {"seconds a step": sum(seconds.values())}
    rollouts = [step["tokens_per_second/overall"] for step in counted[each - 1 :: each]]
    found["generated tokens/s, over whole steps"] = statistics.harmonic_mean(rollouts)
    found |= {f"of the step: {part.removeprefix('seconds/')}, s": value for part, value in seconds.items()}
    every = {}
    for step in sorted(metrics):
        every |= metrics[step]
    for name, key in (
        ("imports, s", "start_seconds/imports"),
        ("end of imports to the end of step 1, s", "start_seconds/to_first_step"),
        ("peak on the card, GiB", "vram/total_gib"),
        ("peak of torch's tensors, GiB", "vram_peak_gib"),
    ):
        if key in every:
            found[name] = every[key]
    for name, key in (("clipped share of tokens", "clip_ratio/region_mean"), ("KL", "kl")):
        if key in counted[-1]:
            found[name] = statistics.mean(step[key] for step in counted)
    return found


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(first: dict, last: dict, name: str) -> str:
    return f"{first[name] / last[name]:.2f}" if last.get(name) and not name.startswith(("clipped", "KL")) else ""


# scale and learn: one engine, many runs


class Lab:
    """A model that is loaded once, with vLLM where there is a GPU, and trained again and again from a new adapter."""

    def __init__(self, config, gpu, say):
        self.gpu, self.say = gpu, say
        self.task = checks.load_task(config.task)
        if gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu.cuda_name
            os.environ.update(engine.environment(config))
        if not (gpu and config.plain):
            import unsloth  # noqa: F401, isort: skip

        name = models.resolve_model(config.model, config.load_in, gpu is not None, config.plain)
        self.shape, plan = engine.memory_plan(config, gpu, name, gpu.free_gib()) if gpu else (None, None)
        seconds = config.vllm_start_timeout
        late = f"vLLM has not started within {seconds:g} s (--vllm-start-timeout)"
        with time_limit(seconds, lambda: self.say(late)) if config.fast_inference else contextlib.nullcontext():
            model, self.tokenizer = train.load_model(config, gpu, name, self.shape, plan)
        self.model = train.attach_lora(config, model)
        self.tokenizer.padding_side = "left"

    def run(self, config, on_step=lambda step, seconds: None) -> list[dict]:
        """Train a new adapter; returns TRL's logs of the steps with `seconds/<part>`. `on_step` comes after each step."""
        import torch
        from transformers import PrinterCallback, TrainerCallback, set_seed
        from trl import GRPOConfig

        from phases import Phases

        set_seed(config.seed)
        for module in self.model.modules():
            if hasattr(module, "reset_lora_parameters"):
                module.reset_lora_parameters("default", init_lora_weights=True)
        phases, history, parts = Phases(self.gpu is not None, self.say), [], {}

        class Clock(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                phases.begin_step()

            def on_pre_optimizer_step(self, args, state, control, **kwargs):
                phases.enter("optimizer")

            def on_optimizer_step(self, args, state, control, **kwargs):
                phases.leave()

            def on_log(self, args, state, control, logs=None, **kwargs):
                if "loss" in logs:
                    history.append({**logs, "step": state.global_step, **{f"seconds/{k}": v for k, v in parts.items()}})

            def on_step_end(self, args, state, control, **kwargs):
                parts.update(phases.end_step())
                on_step(state.global_step, sum(parts.values()))

        problems = build_dataset(self.task, config, train.PRESETS[config.preset], config.train_problems, "train")
        checks.check_rewards(self.task, config.task, problems)
        problems = drop_long_prompts(problems, self.tokenizer, config, "training", config.prompts_per_rollout, self)
        with tempfile.TemporaryDirectory() as folder:
            arguments = grpo_arguments(config, Path(folder), on_gpu=self.gpu is not None)
            trainer = trainer_class(config, self.gpu)(
                model=self.model,
                processing_class=self.tokenizer,
                reward_funcs=[checks.strict(reward) for reward in self.task.REWARDS],
                args=GRPOConfig(**{**arguments, "save_strategy": "no", "log_completions": False}),
                train_dataset=in_order(problems, config),
                callbacks=[Clock()],
            )
            trainer.remove_callback(PrinterCallback)
            make_ready(config, trainer, self.gpu, parallel.World())
            phases.attach(trainer)
            trainer.train()
        del trainer
        if self.gpu:
            torch.cuda.empty_cache()
        return history

    def accuracy(self, config, problems) -> float:
        """The share of held-out problems that the adapter solves as it stands, by the task's first reward, greedily."""
        import adapter
        import held_out

        name = self.task.REWARDS[0].__name__
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "adapter"
            if config.fast_inference:
                adapter.save(self.model, saved)
            place = saved if config.fast_inference else None
            scores, _ = held_out.evaluate(config, self.task, self.model, self.tokenizer, problems, place)
        return scores[name]


POINTS = [  # one factor at a time: G (answers to a problem), C (tokens of an answer), R (groups in a rollout)
    *({"G": size, "C": 768, "R": 8} for size in (4, 8, 16, 32)),
    *({"G": 8, "C": length, "R": 8} for length in (256, 512, 1024, 2048)),
    *({"G": 8, "C": 768, "R": groups} for groups in (1, 2, 4, 16)),
]


def scale(options, gpu) -> None:
    """Seconds of a step of one group at each of POINTS, and the least that the card's bandwidth and rate allow."""
    if gpu is None:
        raise checks.Refused("scale: there is no GPU, and so no roofline to compare with; learn and compare work on a CPU")
    points = [POINTS[i] for i in options.only]
    base = command_line.parse(train.Config, train.PRESETS, options.flags, gpu)

    def at(point):
        return dataclasses.replace(base, num_generations=point["G"], per_device_train_batch_size=point["G"],
                                   gradient_accumulation_steps=1, max_completion_length=point["C"],
                                   steps_per_generation=point["R"], max_steps=point["R"] + 2, train_problems=512)  # fmt: skip

    configs = [at(point) for point in points]
    for config in configs:
        look_at(config, gpu)
    longest = max(configs, key=lambda c: c.max_completion_length)
    most = max(c.rollout_batch for c in configs)
    seats = dataclasses.replace(base, max_completion_length=longest.max_completion_length, num_generations=8,
                                per_device_train_batch_size=8, steps_per_generation=math.ceil(most / 8))  # fmt: skip
    look_at(seats, gpu)
    out, rows = open_out(options), []
    card = cards.Card(gpu.name, gpu.total_gib, gpu.bandwidth_gbps, 989 if "H200" in gpu.name else None)
    with Console(out / "benchmark.log") as console:
        try:
            console.say(f"loading {base.model}; the libraries talk to {out / 'benchmark.log'}")
            lab = Lab(seats, gpu, console.say)
            options.stop.raise_if_asked()
            for point, config in zip(points, configs):
                rows.append({**point, **seconds_at(point, config, lab, card)})
                console.say(str({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}))
                keep(options, gpu, out, {"rows": rows}, console.say)
        finally:
            if rows:
                columns = ["G", "C", "R", "seconds", "generation", "log_probs", "forward_backward", "rest", "tokens_per_second",
                           "roofline_decoding", "roofline_training"]  # fmt: skip
                console.say(table(columns, [[shown(row[name]) for name in columns] for row in rows]))
                draw(pictures.scale({"rows": rows}), out / "scale.png", console.say)
                console.say(f"figures: {out / 'scale.json'}, {out / 'scale.png'}")


def seconds_at(point: dict, config, lab: Lab, card) -> dict[str, float]:
    """One point's seconds of a step by part, the mean length of its answers, and its floor."""
    logs = lab.run(config)
    rollouts, later = [logs[0], logs[point["R"]]], logs[1:]
    parts = {
        "generation": min(log["seconds/generation"] + log["seconds/rewards"] for log in rollouts) / point["R"],
        "log_probs": rollouts[-1]["seconds/log_probs"] / point["R"],
        "forward_backward": statistics.median(log["seconds/forward_backward"] for log in later),
        "rest": statistics.median(log["seconds/optimizer"] + log["seconds/rest"] for log in later),
    }
    decoding, training = roofline.step_floor(config, lab.shape, card, 10**9)
    seconds, length = sum(parts.values()), statistics.mean(log["completions/mean_length"] for log in rollouts)
    return {**parts, "seconds": seconds, "length": length, "roofline_decoding": decoding, "roofline_training": training,
            "tokens_per_second": point["G"] * length / seconds}  # fmt: skip


def learn(options, gpu) -> None:
    """Held-out accuracy with one group a rollout and with more, after the same completions, over paired seeds."""
    base = command_line.parse(train.Config, train.PRESETS, options.flags, gpu)
    kinds = sorted({1, *options.rollout})
    seeds = range(base.seed, base.seed + options.seeds)

    def of(groups, **others):
        return dataclasses.replace(base, steps_per_generation=groups * base.gradient_accumulation_steps, **others)

    for seed in seeds:
        look_at(of(kinds[-1], seed=seed), gpu)
    if base.effective_batch != base.num_generations:
        raise checks.Refused(
            f"learn compares rollouts of whole groups, for steps of one: --per-device-train-batch-size {base.num_generations} "
            f"--gradient-accumulation-steps 1, not {base.effective_batch} completions a step"
        )
    if not base.eval_problems:
        raise checks.Refused("--eval-problems 0: learn counts right answers to held-out problems; at least 1")
    between = math.lcm(*(of(groups).steps_per_rollout for groups in kinds)) * options.points
    if base.max_steps % between:
        whole, near = " and of ".join(map(str, kinds[1:])), max(round(base.max_steps / between), 1) * between
        raise checks.Refused(
            f"--max-steps {base.max_steps}: --points {options.points} evaluations come after whole rollouts of {whole} groups "
            f"(--rollout); nearest: {near}"
        )
    out, longest, curves = open_out(options), of(kinds[-1]), []
    with Console(out / "benchmark.log") as console:
        console.say(f"loading {base.model}; the libraries talk to {out / 'benchmark.log'}")
        lab = Lab(longest, gpu, console.say)
        options.stop.raise_if_asked()
        same = dataclasses.replace(base, seed=0)  # problems for all seeds
        problems = build_dataset(lab.task, same, train.PRESETS[base.preset], base.eval_problems, "held-out")
        before = lab.accuracy(base, problems)  # B is 0 until the first run
        console.say(f"held-out, before: {before:.3f} of {len(problems)} problems; now a rollout that is not counted")
        lab.run(dataclasses.replace(longest, max_steps=longest.steps_per_rollout))  # what warms up belongs to no curve
        evaluated = {base.max_steps * i // options.points for i in range(1, options.points + 1)}
        try:
            for seed in seeds:
                for groups in kinds if seed % 2 == 0 else kinds[::-1]:
                    console.say(f"seed {seed}, {groups} a rollout: {base.max_steps} steps")
                    curves.append({"groups": groups, **curve(lab, of(groups, seed=seed), problems, evaluated, before)})
                    keep(options, gpu, out, {"curves": curves}, console.say)
        finally:
            if curves:
                console.say("\n".join(learned(curves)))
                draw(pictures.learning({"curves": curves}), out / "learn.png", console.say)
                console.say(f"figures: {out / 'learn.json'}, {out / 'learn.png'}")


def learned(curves: list[dict]) -> list[str]:
    """A table of where each curve ends, and for each rollout the mean difference to one group over the seeds that have both."""
    last = {(c["seed"], c["groups"]): c["points"][-1][3] for c in curves}
    difference = {key: last[key] - last[key[0], 1] for key in last if (key[0], 1) in last}
    rows = [[*key, f"{last[key]:.3f}", f"{difference[key]:+.3f}" if key in difference else "", f"{c['points'][-1][2]:.0f}",
             *("" if c[name] is None else f"{c[name]:.4f}" for name in ("clipped", "kl"))]
            for key, c in sorted({(c["seed"], c["groups"]): c for c in curves}.items())]  # fmt: skip
    lines = [table(["seed", "groups a rollout", "accuracy", "against 1", "training, s", "clipped", "KL"], rows)]
    for groups in sorted({groups for _, groups in last} - {1}):
        differences = [value for (_, of), value in difference.items() if of == groups]
        if len(differences) > 1:
            mean, count = statistics.mean(differences), len(differences)
            half = T_95[count] * statistics.stdev(differences) / math.sqrt(count)
            lines.append(
                f"{groups} against 1: {mean:+.3f}, 95 % interval over {count} seeds {mean - half:+.3f} to {mean + half:+.3f}"
            )
    return lines


def curve(lab: Lab, config, problems, evaluated: set[int], before: float) -> dict:
    """One run's points (step, completions, seconds of training, accuracy) at the steps in `evaluated`, and its means."""
    points, trained = [[0, 0, 0.0, before]], 0.0

    def on_step(step, seconds):
        nonlocal trained
        trained += seconds
        if step in evaluated:
            points.append([step, step * config.effective_batch, trained, lab.accuracy(config, problems)])
            lab.say(f"seed {config.seed}, {config.prompts_per_rollout} a rollout, step {step}: {points[-1][3]:.3f} after "
                    f"{trained:.0f} s")  # fmt: skip

    logs = lab.run(config, on_step)
    means = {}
    for name, key in (("clipped", "clip_ratio/region_mean"), ("kl", "kl")):
        values = [log[key] for log in logs if key in log]
        means[name] = statistics.mean(values) if values else None
    return {"seed": config.seed, "points": points, **means}


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except checks.Refused as refusal:
        print(f"benchmark.py: {refusal}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(f"benchmark.py: stopped by {stopped}", file=sys.stderr)
        sys.exit(128 + stopped.signum)
