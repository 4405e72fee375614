"""The figures: odd data is drawn without a warning, nothing lies outside the canvas, and the record has what was drawn."""

import itertools
import json
import math
import os
import shutil
import threading
from unittest import mock

import matplotlib.image
import pytest
from mlflow.tracking import MlflowClient

import pictures
from pictures import BARS, FIGURES
from record import upload

NAMES = ["correctness_reward", "format_reward", "a_function_that_pays_for_everything_at_once", "x", "penalty_reward"]


def curve(steps=30, held_out=(0, 30), rewards=NAMES[:2], best=(1.0, 0.2), value=None):
    """Data of a reward curve; `value` of a step and a function's place, else growing with both."""
    value = value or (lambda step, i: best[i] * min(1, (step + i) / 40))
    return {
        "steps": [{"step": n, **{name: value(n, i) for i, name in enumerate(rewards)}} for n in range(1, steps + 1)],
        "rewards": list(rewards),
        "best": dict(zip(rewards, best)),
        "held_out": [[n, {"seconds": 9.0} | {name: 0.5 for name in rewards} |
                         {f"{name}/mean": value(n, i) for i, name in enumerate(rewards)}] for n in held_out],
    }  # fmt: skip


def lines(limit, measured=True, total=9.0):
    names = ["base weights", "LoRA", "gradients of all that can be trained", "KV cache", "logits", "CUDA context", "graphs"]
    rows = [{"line": name, "predicted_gib": 0.05 * 2**i, "measured_gib": 0.06 * 2**i if measured else None,
             "kind": "estimated" if i > 3 else "computed"} for i, name in enumerate(names)]  # fmt: skip
    last = {"line": "total", "predicted_gib": total, "measured_gib": 1.1 * total if measured else None, "kind": "estimated"}
    return {"rows": [*rows, last], "limit_gib": limit}


def seconds(steps, first=25.0, generation_every=1):
    rows = [{"step": n, "generation": 5.0 if n > 2 else first / n, "rewards": 0.01, "log_probs": 0.8,
             "forward_backward": 1.9, "optimizer": 0.02, "rest": 0.1} for n in range(1, steps + 1)]  # fmt: skip
    return [{k: v for k, v in row.items() if k != "generation" or row["step"] % generation_every == 0} for row in rows]


FIVE = curve(rewards=NAMES, best=(1.0,) * 5)
ODD = {
    "usual": ("reward_curve", curve()),
    "one step": ("reward_curve", curve(steps=1, held_out=(0,))),
    "one step, no held-out": ("reward_curve", curve(steps=1, held_out=())),
    "no held-out": ("reward_curve", curve(held_out=())),
    "held-out alone": ("reward_curve", curve(steps=0, held_out=(0,))),
    "nothing": ("reward_curve", curve(steps=0, held_out=())),
    "one function": ("reward_curve", curve(rewards=["length_reward"], best=(1.0,))),
    "five functions": ("reward_curve", FIVE),
    "five that all end at the same height": ("reward_curve", {**FIVE, **curve(30, (0, 30), NAMES, (1.0,) * 5, lambda *_: 0.5)}),
    "no value": ("reward_curve", curve(value=lambda step, i: None)),
    "none and nan": ("reward_curve", curve(value=lambda step, i: [None, math.nan, 0.1][(step + i) % 3])),
    "missing": ("reward_curve", {**curve(), "steps": [{"step": 1}, {"step": 3, "format_reward": 0.1}], "held_out": []}),
    "negative, the best is 0": ("reward_curve", curve(best=(1.0, 0.0), value=lambda step, i: step / 30 - i)),
    "best unknown": ("reward_curve", {**curve(), "best": {}}),
    "better than the best": ("reward_curve", curve(value=lambda step, i: step * 10.0)),
    "huge": ("reward_curve", curve(value=lambda step, i: 3e38)),
    "long": ("reward_curve", curve(steps=3000, held_out=range(0, 3001, 100))),
    "memory": ("memory", lines(15.0)),
    "memory, nothing measured, no limit": ("memory", lines(None, measured=False)),
    "memory, a limit far out": ("memory", lines(139.8)),
    "memory, more than the limit": ("memory", lines(8.0)),
    "memory, nothing": ("memory", {"rows": lines(None, total=0)["rows"][-1:], "limit_gib": None}),
    "time": ("step_time", seconds(30)),
    "time, one step": ("step_time", seconds(1)),
    "time, two steps": ("step_time", seconds(2)),
    "time, no slow step": ("step_time", seconds(30, first=5.0)),
    "time, completions used again": ("step_time", seconds(40, generation_every=4)),
    "time, none generates": ("step_time", seconds(5, generation_every=9)),
    "time, more steps than bars": ("step_time", seconds(1001)),
    "time, nothing": ("step_time", []),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", ODD)
def test_odd_data_is_drawn_within_the_canvas(case, tmp_path):
    name, data = ODD[case]
    figure = FIGURES[name](json.loads(json.dumps(data)))
    figure.savefig(tmp_path / "figure.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "figure.png").shape
    assert width == 880 and 495 <= height <= 800
    drawn = figure.get_tightbbox()  # inches
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width / figure.dpi and drawn.y1 <= height / figure.dpi
    (axes,) = figure.axes
    assert axes.bbox.width > 0.4 * width and axes.bbox.height > 0.5 * height
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def texts(figure):
    legends = [text.get_text() for legend in figure.legends for text in [legend.get_title(), *legend.get_texts()]]
    (axes,) = figure.axes
    labels = [axes.get_xlabel(), axes.get_ylabel(), axes.get_title(loc="left")]
    return " | ".join([*labels, *legends, *(text.get_text() for text in axes.texts)])


def test_rewards_of_different_scales_are_shares_where_their_best_is_known():
    figure = FIGURES["reward_curve"](curve())
    assert "share of the largest reward" in texts(figure) and "held-out: share that earns more than 0" in texts(figure)
    assert "correctness (of 1)\nheld-out 0.50 → 0.50" in texts(figure) and "format (of 0.2)" in texts(figure)
    dots, mean = figure.axes[0].lines[3:5]  # of format_reward
    assert dots.get_ydata()[9] == pytest.approx(11 / 40)
    assert mean.get_ydata()[9] == pytest.approx(11 / 40) and mean.get_ydata()[0] == pytest.approx(3.5 / 40)
    better = FIGURES["reward_curve"](curve(value=lambda step, i: step * 10.0))
    assert "of 0.2" not in texts(better) and better.axes[0].get_ylabel() == "reward"
    assert "held-out 0 → 300" in texts(better)  # means, as the curve


def test_memory_says_its_values_and_its_limit():
    said = texts(FIGURES["memory"](lines(15.0)))
    assert "| 9.90" in said and "≈ 9.00" in said and "limit 15.0" in said and "0.06" in said
    assert "of 139.8 that may be used" in texts(FIGURES["memory"](lines(139.8)))
    assert "not measured" in texts(FIGURES["memory"](lines(15.0, measured=False)))


def test_slow_first_steps_squash_no_others_and_count_in_no_share():
    figure = FIGURES["step_time"](seconds(30))
    assert figure.axes[0].get_ylim()[1] < 10
    assert "higher than shown: step 1: 28 s, step 2: 15 s" in texts(figure)
    assert "share, step 3 to 30" in texts(figure) and "generation 64 %" in texts(figure) and "rewards < 1 %" in texts(figure)
    assert "higher" not in texts(FIGURES["step_time"](seconds(30, first=5.0)))
    assert len(FIGURES["step_time"](seconds(1001)).axes[0].patches) <= 6 * BARS


def points(seconds=10.0):
    """What benchmark.py measures: one factor at a time, around a middle that all three share."""
    at = [(8, 768, 8), (4, 768, 8), (32, 768, 8), (8, 256, 8), (8, 2048, 8), (8, 768, 1), (8, 768, 16)]
    rest = {"generation": 0.8 * seconds, "log_probs": 0.05 * seconds, "forward_backward": 0.1 * seconds, "rest": 0.01,
            "roofline_decoding": 0.2 * seconds, "roofline_training": 0.04 * seconds}  # fmt: skip
    return {"rows": [{"G": g, "C": c, "R": r, "seconds": seconds * g * c / r / 768, **rest} for g, c, r in at]}


def curves(groups=(1, 8), seeds=3, evaluations=4):
    """Held-out accuracy, the larger the later, and by a hundredth with each seed; a rollout of many is half as slow."""

    def at(i, n, seed):
        return [10 * i, 80 * i, 30.0 * i / (1 + (n > 1)), 0.3 + 0.1 * i + seed / 100]

    return {"curves": [{"groups": n, "seed": seed, "points": [at(i, n, seed) for i in range(evaluations + 1)]}
                       for seed in range(seeds) for n in groups]}  # fmt: skip


COMPARED = {
    "scale": ("scale", points()),
    "scale, one point": ("scale", {"rows": points()["rows"][:1]}),
    "scale, thousandths of a second": ("scale", points(0.002)),
    "learning": ("learning", curves()),
    "learning, one seed": ("learning", curves(seeds=1)),
    "learning, one of both": ("learning", curves(groups=(4,))),
    "learning, before the first step": ("learning", curves(evaluations=0)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", COMPARED)
def test_comparisons_are_drawn_within_the_canvas(case, tmp_path):
    name, data = COMPARED[case]
    figure = getattr(pictures, name)(json.loads(json.dumps(data)))
    figure.savefig(tmp_path / "figure.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "figure.png").shape
    assert (width, height) == (1210, 440)
    drawn = figure.get_tightbbox()  # inches
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width / figure.dpi and drawn.y1 <= height / figure.dpi
    assert all(axes.bbox.width > 0.2 * width and axes.bbox.height > 0.5 * height for axes in figure.axes)


def test_each_panel_of_scale_varies_one_factor():
    figure = pictures.scale(points())
    lines = [axes.get_lines()[0] for axes in figure.axes]  # seconds a step, in growing order of the factor
    assert [list(line.get_xdata()) for line in lines] == [[4, 8, 32], [256, 768, 2048], [1, 8, 16]]
    assert list(lines[0].get_ydata()) == [5, 10, 40] and list(lines[2].get_ydata()) == [80, 10, 5]
    generation, training, least = figure.axes[0].get_lines()[1:]
    assert list(generation.get_ydata()) == [8.0] * 3 and list(training.get_ydata()) == pytest.approx([1.5] * 3)
    assert list(least.get_ydata()) == pytest.approx([2.4] * 3)  # decoding and training together
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "a step", "generation", "log-probs and training pass", "roofline of a step"]  # fmt: skip


def test_learning_shows_each_seed_and_the_mean_of_all():
    figure = pictures.learning(curves())
    by_completions, by_seconds = figure.axes
    for axes, last in ((by_completions, 320), (by_seconds, 120)):
        lines = axes.get_lines()
        assert len(lines) == 2 * (3 + 1)
        assert [round(y, 2) for y in lines[2].get_ydata()] == [0.32, 0.42, 0.52, 0.62, 0.72]  # the third seed
        assert lines[3].get_ydata() == pytest.approx([0.31, 0.41, 0.51, 0.61, 0.71]) and max(lines[3].get_xdata()) == last
    assert max(by_seconds.get_lines()[-1].get_xdata()) == 60
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 a rollout", "8 a rollout"]


def test_two_threads_draw_the_same(tmp_path):
    """The journal's thread may draw one figure while the main thread draws the next."""

    def draw(thread):
        for i, (name, data) in enumerate([ODD["usual"], ODD["memory"], ODD["time"]] * 2):
            FIGURES[name](data).savefig(tmp_path / f"{thread}-{i}.png")

    threads = [threading.Thread(target=draw, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(6):
        assert (tmp_path / f"0-{i}.png").read_bytes() == (tmp_path / f"1-{i % 3}.png").read_bytes()


def test_the_reward_curve_lies_in_the_folder_and_in_the_record_and_is_sent_anew(small_run, tmp_path, monkeypatch):
    file = small_run.run_dir / "reward_curve.png"
    items = [json.loads(line) for line in open(small_run.run_dir / "record.jsonl")]
    drawn = {item["name"]: item["data"] for item in items if item.get("kind") == "figure"}
    assert list(drawn) == ["reward_curve", "step_time"]  # there is no memory of a card to draw
    data = drawn["reward_curve"]
    assert [row["step"] for row in data["steps"]] == [1, 2] and [step for step, _ in data["held_out"]] == [0, 2]
    assert data["best"] == {"correctness_reward": 1.0, "format_reward": 0.2}

    def artifact(store):
        client = MlflowClient(store)
        (run,) = client.search_runs([client.get_experiment_by_name("p7-grpo").experiment_id])
        return open(client.download_artifacts(run.info.run_id, "reward_curve.png", tmp_path), "rb").read()

    assert artifact(small_run.store) == file.read_bytes() and matplotlib.image.imread(file).shape == (495, 880, 4)
    shutil.copytree(small_run.run_dir, tmp_path / "run")  # without the original's journal noting another store
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path / 'other.db'}"):
        assert "reward_curve.png" in upload(tmp_path / "run", tmp_path)
    assert artifact(f"sqlite:///{tmp_path / 'other.db'}") == file.read_bytes()
