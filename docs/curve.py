"""Draw the reward curve of recorded runs: uv run python docs/curve.py OUT.png RUN_ID [RUN_ID ...]

Reads MLFLOW_TRACKING_URI where it is set, else mlflow.db in the project folder.
"""

import os
import sys
from pathlib import Path

import matplotlib
from mlflow.tracking import MlflowClient

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402

REWARD = "rewards/correctness_reward/mean"
HELD_OUT = "held_out/correctness_reward"


def points(client, run_id, metric):
    """Steps and values of a metric, in order of steps."""
    return zip(*sorted((m.step, m.value) for m in client.get_metric_history(run_id, metric)))


def main(out, *run_ids):
    project = Path(__file__).resolve().parent.parent
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project / 'mlflow.db'}")
    figure, axes = plt.subplots(figsize=(8, 4), dpi=110, layout="constrained")
    curves = [dict(zip(*points(client, run_id, REWARD))) for run_id in run_ids]
    for i, (run_id, curve) in enumerate(zip(run_ids, curves)):
        seed = client.get_run(run_id).data.params["seed"]
        axes.plot(list(curve), list(curve.values()), ".", color=f"C{i}", alpha=0.35)
        steps, accuracy = points(client, run_id, HELD_OUT)
        axes.plot(steps, accuracy, "o--", color=f"C{i}", label=f"seed {seed}: held-out accuracy, before and after")
    steps = sorted(set.intersection(*map(set, curves)))
    # one step is one problem, hard or easy: only an average over steps and seeds shows the trend
    window = [[curve[s] for curve in curves for s in steps if abs(s - step) <= 3] for step in steps]
    axes.plot(steps, [sum(w) / len(w) for w in window], color="black", label="training: right answers, mean of 7 steps")
    axes.set(xlabel="optimizer step", ylabel="share of right answers", ylim=(-0.03, 1.03))
    axes.legend(loc="upper left", fontsize=8)
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
