"""The benchmark's own arithmetic, its command line, and what it makes of a run that fails; no model is loaded."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmark
import checks
from checks import Refused
from conftest import ROOT
from stopping import Stopped
from task import make_dataset
from train import PRESETS


def step(generation=0.0, forward_backward=1.0, overall=None, **more):
    """The metrics of one step, as record.jsonl has them."""
    found = {"seconds/generation": generation, "seconds/forward_backward": forward_backward, "seconds/rest": 0.5, **more}
    return found | ({"tokens_per_second/overall": overall} if overall else {})


# two rollouts of two steps that count, after one that compiles: 11.5 + 1.5, then 7.5 + 1.5 seconds
METRICS = {
    0: {"start_seconds/imports": 20.0, "start_seconds/to_first_step": 90.0},
    1: step(100.0, 30.0, 1.0, **{"clip_ratio/region_mean": 0.9, "kl": 0.9}),
    2: step(0.0, 1.0, 2.0, **{"clip_ratio/region_mean": 0.9, "kl": 0.9}),
    3: step(10.0, 1.0, 999.0, **{"clip_ratio/region_mean": 0.0, "kl": 0.01}),
    4: step(0.0, 1.0, 100.0, **{"clip_ratio/region_mean": 0.02, "kl": 0.03}),
    5: step(6.0, 1.0, 999.0, **{"clip_ratio/region_mean": 0.0, "kl": 0.01}),
    6: step(0.0, 1.0, 300.0, **{"clip_ratio/region_mean": 0.02, "kl": 0.03, "vram_peak_gib": 7.0}),
    7: {"vram/total_gib": 9.0},
}


def test_figures_by_hand():
    assert benchmark.figures_of(METRICS, steps=6, skipped=2, each=2) == pytest.approx({
        "seconds a step": 22 / 4,
        # of whole rollouts, as their last step has it: as many tokens in each at 100 and at 300 a second are 150 a second
        "generated tokens/s, over whole steps": 150.0,
        "of the step: generation, s": 4.0,
        "of the step: forward_backward, s": 1.0,
        "of the step: rest, s": 0.5,
        "imports, s": 20.0,
        "end of imports to the end of step 1, s": 90.0,
        "peak on the card, GiB": 9.0,
        "peak of torch's tensors, GiB": 7.0,
        "clipped share of tokens": 0.01,
        "KL": 0.02,
    })  # fmt: skip
    lean = {n: {k: v for k, v in values.items() if "seconds/" in k or "overall" in k} for n, values in METRICS.items()}
    assert set(benchmark.figures_of(lean, 6, 2, 2)) >= {"seconds a step", "imports, s"}
    assert not {"KL", "peak on the card, GiB"} & set(benchmark.figures_of(lean, 6, 2, 2))


def test_a_table_as_the_readme_has_them():
    assert benchmark.table(["", "`a`"], [["s", "1.5"], ["GiB", 3]]) == "|  | `a` |\n| --- | --- |\n| s | 1.5 |\n| GiB | 3 |"
    assert [benchmark.shown(value) for value in (None, 0.01234, 9.876, 1234.5)] == ["", "0.0123", "9.88", "1,234"]
    first, last = {"s": 10.0, "KL": 0.2, "gone": 1.0}, {"s": 4.0, "KL": 0.1}
    assert [benchmark.ratio(first, last, name) for name in first] == ["2.50", "", ""]


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Runs of train.py that are none: each leaves METRICS in its folder and ends with `code`; their commands are kept."""
    starts = SimpleNamespace(commands=[], environments=[], code=0, stops=None)

    def run(command, env):
        starts.commands.append(command)
        if len(starts.commands) == starts.stops:
            signal.raise_signal(signal.SIGTERM)
        starts.environments.append(env)
        folder = command[command.index("--output-dir") + 1]
        (run_dir := Path(folder) / "run").mkdir()
        steps = int(command[command.index("--max-steps") + 1])
        values = {n: METRICS[n] if n < 7 else METRICS[4] for n in range(steps + 1)}
        items = [{"kind": "params", "values": {}}, *({"kind": "metrics", "step": n, "values": v} for n, v in values.items())]
        (run_dir / "record.jsonl").write_text("\n".join(map(json.dumps, items)) + "\n")
        return SimpleNamespace(returncode=starts.code)

    monkeypatch.setattr(benchmark, "git_commit", lambda project: "abc")
    monkeypatch.setattr(benchmark, "store_in", lambda folder, experiment: f"sqlite:///{folder}/mlflow.db")
    monkeypatch.setattr(benchmark.subprocess, "run", run)
    monkeypatch.setattr(benchmark, "find_gpu", lambda: (None, ""))
    monkeypatch.chdir(tmp_path)
    return starts


def test_compare_starts_each_set_of_flags_as_often_as_asked(starts, capsys, tmp_path):
    benchmark.main(["compare", "--seed 1", "--seed 2 --steps-per-generation 4", "--starts", "2", "--out", "there",
                    "--", "--beta", "0.1"])  # fmt: skip
    words = [command[2 : command.index("--max-steps")] for command in starts.commands]
    one, four = ["--beta", "0.1", "--seed", "1"], ["--beta", "0.1", "--seed", "2", "--steps-per-generation", "4"]
    assert words == [one, one, four, four]
    # three steps that do not count, and at least five that do, in whole rollouts: 3 of 1 step are too few, 3 of 4 are not
    steps = [command[command.index("--max-steps") + 1] for command in starts.commands]
    assert steps == [str(3 + 5)] * 2 + [str(4 + 12)] * 2
    folders = [command[command.index("--output-dir") + 1] for command in starts.commands]
    assert len(set(folders)) == 4 and not any(Path(folder).exists() for folder in folders)
    assert [env["MLFLOW_TRACKING_URI"] for env in starts.environments] == [f"sqlite:///{f}/mlflow.db" for f in folders]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("$ uv run python benchmark.py compare '--seed 1' ") and "no GPU" in said[1]
    assert "|  | `--seed 1` | `--seed 2 --steps-per-generation 4` | first / last |" in said
    found = json.loads((tmp_path / "there" / "compare.json").read_text())
    assert found["commit"] == "abc" and "no GPU" in found["machine"]
    assert [start["run"] for start in found["starts"]] == ["--seed 1"] * 2 + ["--seed 2 --steps-per-generation 4"] * 2


def test_a_run_that_fails_ends_the_comparison(starts, capsys):
    starts.code = 1
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["compare", "--seed 1", "--seed 2"])
    assert stop.value.code == 1 and len(starts.commands) == 1
    assert capsys.readouterr().err == "benchmark.py: train.py --seed 1: exit code 1; its last words are above\n"


def test_a_comparison_that_is_cut_off_shows_what_it_has(starts, capsys, tmp_path):
    starts.stops = 4
    with pytest.raises(Stopped):
        benchmark.main(["compare", "--seed 1", "--seed 1", "--starts", "2", "--out", "there"])
    said = capsys.readouterr().out
    assert "|  | `--seed 1` | `--seed 1`, start 1 of 2 | first / last |" in said and "figures: there/compare.json" in said
    (row,) = [line for line in said.splitlines() if line.startswith("| seconds a step ")]
    assert row.endswith("|  |")  # no ratio of a second start to a first
    assert len(json.loads((tmp_path / "there" / "compare.json").read_text())["starts"]) == 3


def test_what_a_start_records_goes_away_with_its_folder(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a folder"
    folder.mkdir()
    store = benchmark.store_in(str(folder), "p7-grpo")
    assert MlflowClient(store).get_experiment_by_name("p7-grpo").artifact_location == (folder / "artifacts").as_uri()
    assert [path.name for path in tmp_path.iterdir()] == ["a folder"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare", "--num-generations 5"], "nearest batch sizes: 5 or 10"),
        (["compare", "--preset 'smollm2"], "No closing quotation"),
        (["compare", "--seed 1", "--starts", "0"], "--starts 0: must be at least 1"),
        (["compare", "--seed 1", "--out", "file"], "--out file: File exists"),
        (["compare", "--seed 1 --max-steps=3"], "--max-steps=3: compare sets it itself; compare --help"),
        (["learn", "--seeds", "11"], "--seeds 11: at most 10"),
        (["learn", "--max-steps", "30"], "whole rollouts of 8 groups (--rollout); nearest: 32"),
        (["learn", "--rollout", "8", "1", "--max-steps", "32"], "--rollout 1: must be at least 2"),
        (["learn", "--max-steps", "96", "--rollout", "8", "16"], "of 8 and of 16 groups (--rollout); nearest: 128"),
        (["compare", "--no-such-flag 1"], "--no-such-flag"),
        (["compare", "--seed 1", "--", "--output_dir", "x"], "--output_dir: compare sets it itself"),
        (["compare", "--preset smollm2", "--preset qwen3-4b"], "needs a CUDA GPU"),  # the second, before the first starts
        (["compare", "--seed 1", "--eval-steps 2 "], "--eval-steps"),
        (["learn", "--steps-per-generation", "4"], "--steps-per-generation: learn sets it itself"),
        (["learn", "--max-steps", "32", "--eval-problems", "0"], "--eval-problems 0: learn counts right answers"),
        (["learn", "--max-steps", "33"], "nearest: 32"),
        (["learn", "--max-steps", "32", "--num-iterations", "2"], "nearest: 64"),
        (["learn", "--max-steps", "32", "--per-device-train-batch-size", "16"], "--per-device-train-batch-size 8"),
        (["learn", "--max-steps", "32", "--seed", str(2**32 - 1)], "--seed 4294967296"),
        (["learn", "--max-steps", "32", "--out", "held"], "--out held: holds the learn.json of an earlier run"),
        (["compare", "--no-lean-decode", "--seed 1"], "compare --no-lean-decode: a run's flags are one argument with a space"),
        (["learn", "--preset", "smollm2", "--max-steps", "32", "--num-generations", "5"], "batch sizes: 5 or 10"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(words, says, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "learn.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "find_gpu", lambda: (None, ""))
    with pytest.raises(Refused) as refusal:
        benchmark.main(words)
    assert len(str(refusal.value).splitlines()) == 1 and says in str(refusal.value)


def test_a_refusal_is_one_line_and_code_2(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark.py"), "learn", "--seeds", "1"]
    environment = {**benchmark.os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (2, "benchmark.py: --seeds 1: must be at least 2\n")


def test_points_differ_from_the_middle_in_one_factor():
    middle = {"G": 8, "C": 768, "R": 8}
    assert benchmark.POINTS.count(middle) == 1 and len({str(point) for point in benchmark.POINTS}) == len(benchmark.POINTS)
    assert all(sum(point[name] != middle[name] for name in middle) <= 1 for point in benchmark.POINTS)


@pytest.fixture
def lab(monkeypatch, tmp_path):
    """A Lab that trains nothing: what was asked of it, and accuracies by seed and groups a rollout; `fails` ends a run."""
    seen = SimpleNamespace(runs=[], problems=[], fails=None)
    accuracies = {(3, 1): 0.5, (3, 2): 0.5, (3, 4): 0.7, (4, 1): 0.25, (4, 2): 0.5, (4, 4): 0.5}

    class Lab:
        def __init__(self, config, gpu, say):
            self.task, self.say = checks.load_task(config.task), say
            seen.made_for = config.prompts_per_rollout

        def run(self, config, on_step=lambda step, seconds: None):
            seen.runs.append((config.seed, config.prompts_per_rollout, config.max_steps))
            if seen.runs[-1] == seen.fails:
                raise RuntimeError("no luck")
            for step in range(1, config.max_steps + 1):
                on_step(step, 0.5)
            return [{"clip_ratio/region_mean": 0.01, "kl": 0.1}, {"clip_ratio/region_mean": 0.03, "kl": 0.3}]

        def accuracy(self, config, problems):
            seen.problems.append(problems["prompt"][:])
            return accuracies[config.seed, config.prompts_per_rollout] if seen.runs else 0.125

    monkeypatch.setattr(benchmark, "Lab", Lab)
    monkeypatch.setattr(benchmark, "find_gpu", lambda: (None, ""))
    monkeypatch.chdir(tmp_path)
    return seen


LEARN = ["learn", "--rollout", "4", "2", "--seeds", "2", "--points", "2", "--seed", "3", "--max-steps", "8",
         "--eval-problems", "8", "--out", "there"]  # fmt: skip


def test_learn_pairs_the_seeds_after_a_run_that_warms_up(lab, capsys, tmp_path):
    benchmark.main(LEARN)
    orders = {3: (4, 2, 1), 4: (1, 2, 4)}  # in turn, so that no rollout has the better place
    assert lab.runs == [(3, 4, 4), *((seed, groups, 8) for seed in (3, 4) for groups in orders[seed])] and lab.made_for == 4
    wanted = make_dataset(8, 0, "held-out", max_operand=20, worked_examples=1, system=PRESETS["smollm2"].system)
    assert lab.problems == [wanted["prompt"][:]] * 13  # whatever --seed is
    said = capsys.readouterr().out
    assert "held-out, before: 0.125 of 8 problems" in said
    for row in ("| 3 | 1 | 0.500 | +0.000 | 4 | 0.0200 | 0.2000 |", "| 4 | 2 | 0.500 | +0.250 | 4 | 0.0200 | 0.2000 |"):
        assert row in said.splitlines()
    # differences 0 and 0.25: mean 0.125, standard error 0.125, and Student's t of one degree of freedom
    assert "2 against 1: +0.125, 95 % interval over 2 seeds -1.464 to +1.714" in said
    assert "4 against 1: +0.225, 95 % interval over 2 seeds -0.093 to +0.543" in said
    found = json.loads((tmp_path / "there" / "learn.json").read_text())
    assert found["command"] == f"uv run python benchmark.py {' '.join(LEARN)}" and len(found["curves"]) == 6
    assert found["curves"][0]["points"] == [[0, 0, 0.0, 0.125], [4, 32, 2.0, 0.7], [8, 64, 4.0, 0.7]]


def test_learn_keeps_the_curves_that_it_has_when_it_is_cut_off(lab, capsys, tmp_path):
    lab.fails = (4, 1, 8)
    with pytest.raises(RuntimeError, match="no luck"):
        benchmark.main(LEARN)
    curves = json.loads((tmp_path / "there" / "learn.json").read_text())["curves"]
    assert [(c["seed"], c["groups"]) for c in curves] == [(3, 4), (3, 2), (3, 1)]
    said = capsys.readouterr().out
    assert "| 3 | 2 | 0.500 | +0.000 | 4 | 0.0200 | 0.2000 |" in said and "interval" not in said
    assert (tmp_path / "there" / "learn.png").stat().st_size > 5000


def test_a_full_disk_costs_no_figures(capsys, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    benchmark.keep(SimpleNamespace(command="learn", line="x"), None, tmp_path, {"curves": []})
    assert capsys.readouterr().out == f"{tmp_path / 'learn.json'} not written: No space left on device\n"
