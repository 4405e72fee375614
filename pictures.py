"""Figures of a run, each from plain data that JSON can hold, so that they can be drawn again from the run's journal.

They are read at half size and without colours: every curve has a marker and a line style, every bar a hatch.
"""

import math
import statistics

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory

# Okabe and Ito's colours; yellow is only for areas with an edge
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, YELLOW = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#F0E442"
BLACK, GREY, LIGHT = "#000000", "#555555", "#BBBBBB"
DASHES = (0, (5, 4))  # of the held-out curves
CURVES = [
    (BLUE, "o", "-"),
    (VERMILLION, "s", "-."),
    (GREEN, "^", ":"),
    (PURPLE, "D", (0, (3, 1, 1, 1, 1, 1))),
    (BLACK, "v", "-"),
]
PARTS = {
    "generation": (BLUE, ""),
    "rewards": (YELLOW, "xx"),
    "log_probs": (ORANGE, "//"),
    "forward_backward": (GREEN, ".."),
    "optimizer": (VERMILLION, "\\\\"),
    "rest": (LIGHT, ""),
}
WINDOW = 7  # steps in the running mean of rewards
BARS = 60  # at most, in the figure of seconds
TEXT = 13  # points


def reward_curve(data: dict) -> Figure:
    """How rewards change: means of single steps as dots, their running mean, and the held-out problems.

    `steps` is a list of {"step": 1, "<reward>": mean}, with None or nothing where a function applied nowhere; `rewards` the
    functions' names; `best` the largest reward that each is known to give; `held_out` a list of [step, scores]. A function is
    drawn as a share of its best where that is above 0 and never exceeded, else as it is. Its held-out score is the share of
    problems that earn more than 0, or the mean where it is drawn as it is.
    """
    figure, axes = canvas()
    shares, labels, values = [], [], []
    for i, name in enumerate(data["rewards"]):
        colour, marker, style = CURVES[i % len(CURVES)]
        means = {row["step"]: row[name] for row in data["steps"] if is_number(row.get(name))}
        best = data["best"].get(name) or 0
        share = best > 0 and max(means.values(), default=0) <= best * (1 + 1e-6)
        means = {step: value / best if share else value for step, value in means.items()}
        scores = {step: scores.get(name if share else f"{name}/mean") for step, scores in data["held_out"]}
        scores = {step: score for step, score in scores.items() if is_number(score)}
        if not means and not scores:
            continue
        near = [[means[step + i] for i in range(-(WINDOW // 2), WINDOW // 2 + 1) if step + i in means] for step in means]
        running = [sum(window) / len(window) for window in near]
        axes.plot(list(means), list(means.values()), marker, color=colour, markersize=5, alpha=0.4, markeredgewidth=0)
        axes.plot(list(means), running, linestyle=style, color=colour, linewidth=2.5)
        axes.plot(list(scores), list(scores.values()), marker, linestyle=DASHES, linewidth=1.3, color=colour,
                  markersize=11, markeredgecolor="white", zorder=3)  # fmt: skip
        text = short(name) + (f" (of {best:g})" if share else "")
        if scores:
            first, *_, last = [*scores.values(), *scores.values()]
            form = ".2f" if share else ".3g"
            text += f"\nheld-out {first:{form}}" + (f" \N{RIGHTWARDS ARROW} {last:{form}}" if len(scores) > 1 else "")
        labels.append((running[-1] if means else last, text, colour, marker))
        shares.append(share)
        values += [*means.values(), *scores.values()]
    low, high = min(values, default=0), max(values, default=1)
    if all(shares):
        low, high = min(low, 0), max(high, 1)
    room = 0.04 * (high - low or abs(high) or 1)
    steps = [row["step"] for row in data["steps"]] + [step for step, _ in data["held_out"]]
    first, last = min(steps, default=0), max(steps, default=0)
    beside = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - beside, last + beside)
    axes.set_ylim(low - room, high + room)
    name_at_the_right(axes, labels)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("optimizer step", fontsize=TEXT)
    what = "share of the largest reward" if all(shares) else "share of the largest, or reward"
    axes.set_ylabel(what if any(shares) or not labels else "reward", fontsize=TEXT)
    axes.grid(color=LIGHT, alpha=0.4)
    key = [
        axes.plot([], [], "o", color=GREY, alpha=0.6, markersize=5, markeredgewidth=0, label="one step")[0],
        axes.plot([], [], color=GREY, linewidth=2.5, label=f"mean of {WINDOW} steps")[0],
    ]
    if data["held_out"]:
        what = "share that earns more than 0" if all(shares) else "share above 0, or mean"
        style = dict(color=GREY, linestyle=DASHES, linewidth=1.3, markersize=10, markeredgecolor="white")
        key += axes.plot([], [], "o", **style, label=f"held-out: {what}")
    legend_above(figure, key)
    return figure


def memory(data: dict) -> Figure:
    """GiB that were predicted and measured, for each of `rows` ({"line", "predicted_gib", "measured_gib", "kind"}).

    The last row is the total; `limit_gib` is what the card, or a limit, allows, or None.
    """
    rows, limit = data["rows"], data["limit_gib"]
    figure, axes = canvas(height=max(4.5, 1.4 + 0.46 * len(rows)))
    largest = max(value for row in rows for value in (row["predicted_gib"], row["measured_gib"]) if is_number(value)) or 1
    paper = dict(facecolor="white", edgecolor="none", pad=1)  # where the limit's line passes
    beside = dict(fontsize=TEXT - 1, va="center", xytext=(5, 0), textcoords="offset points", bbox=paper)
    for i, row in enumerate(rows):
        predicted, measured = row["predicted_gib"], row["measured_gib"]
        axes.barh(i - 0.2, predicted, 0.36, color="white", edgecolor=BLUE, hatch="///", linewidth=1.2)
        sign = "\N{ALMOST EQUAL TO} " if row["kind"] == "estimated" else ""
        axes.annotate(f"{sign}{predicted:.2f}", (predicted, i - 0.2), **beside)
        if is_number(measured):
            axes.barh(i + 0.2, measured, 0.36, color=ORANGE, edgecolor=BLACK, linewidth=0.8)
        axes.annotate(
            f"{measured:.2f}" if is_number(measured) else "not measured", (measured or 0, i + 0.2), **beside,
            color=BLACK if is_number(measured) else GREY,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [short(row["line"], 28) for row in rows], fontsize=TEXT)
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.axhline(len(rows) - 1.5, color=GREY, linewidth=0.8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * largest)
    axes.set_xlabel("GiB", fontsize=TEXT)
    if is_number(limit) and limit > 2 * largest:  # a line so far out would press the bars together
        axes.set_xlabel(f"GiB, of {limit:.1f} that may be used", fontsize=TEXT)
    elif is_number(limit):
        axes.set_xlim(0, 1.15 * max(largest, limit))
        axes.plot([limit, limit], [len(rows) - 1.5, len(rows) - 0.5], color=VERMILLION, linewidth=3)
        axes.annotate(f"limit {limit:.1f}", (limit, len(rows) - 1.5), fontsize=TEXT, ha="right", va="bottom",
                      xytext=(0, 4), textcoords="offset points")  # fmt: skip
    computed = "predicted" + (" (\N{ALMOST EQUAL TO} estimated)" if any(row["kind"] == "estimated" for row in rows) else "")
    key = [Patch(facecolor="white", edgecolor=BLUE, hatch="///", label=computed),
           Patch(facecolor=ORANGE, edgecolor=BLACK, label="measured")]  # fmt: skip
    legend_above(figure, key)
    return figure


def step_time(data: list[dict]) -> Figure:
    """Seconds of each step, {"step": 1, "generation": 5.1, "rest": 0.1, ...} with the names in PARTS, as a stacked bar.

    From six steps on, shares are of all but the first two, which compile and tune kernels; where those tower above the others,
    the axis is cut and their seconds are written down. A part that a step lacks took no time.
    """
    figure, axes = canvas()
    names = [name for name in PARTS if any(row.get(name) for row in data)]
    size = math.ceil(len(data) / BARS) or 1
    bins = [data[i : i + size] for i in range(0, len(data), size)]
    centres = [(rows[0]["step"] + rows[-1]["step"]) / 2 for rows in bins]
    heights = {name: [sum(row.get(name) or 0 for row in rows) / len(rows) for rows in bins] for name in names}
    bottoms = [0.0] * len(bins)
    for name in names:
        colour, hatch = PARTS[name]
        axes.bar(centres, heights[name], 0.85 * size, bottoms, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights[name])]
    # two bars may be cut, for the first two steps are slow: the third highest is what the others reach
    usual = sorted(bottoms, reverse=True)[min(2, len(bottoms) - 1)] if bottoms else 0
    high = max(bottoms, default=0)
    top = 1.1 * (usual if high > 1.5 * usual and len(data) >= 6 else high) or 1
    axes.set_ylim(0, top)
    cut = [i for i, total in enumerate(bottoms) if total > top]
    for i in cut:
        across = [centres[i] - size / 2, centres[i] + size / 2]
        axes.plot(across, [0.92 * top, 0.96 * top], color="white", linewidth=4, solid_capstyle="butt")
    if cut:
        taken = ", ".join(f"step {span(bins[i])}: {bottoms[i]:.0f} s" for i in cut)
        axes.set_title(f"higher than shown: {taken}", fontsize=TEXT, loc="left")
    steps = [row["step"] for row in data]
    axes.set_xlim(min(steps, default=0) - 0.6, max(steps, default=0) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("optimizer step" + (f" (a bar is the mean of {size})" if size > 1 else ""), fontsize=TEXT)
    axes.set_ylabel("seconds a step", fontsize=TEXT)
    counted = data[2:] if len(data) >= 6 else data
    sums = {name: sum(row.get(name) or 0 for row in counted) for name in names}
    whole = sum(sums.values()) or 1
    key = []
    for name in reversed(names):  # from the top down, as in the bars
        colour, hatch = PARTS[name]
        text = in_percent(name, sums[name] / whole)
        key.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0, label=text))
    if key:
        figure.legend(handles=key, loc="outside right center", fontsize=TEXT, frameon=False, handlelength=1.6, handleheight=1.6,
                      title=f"share, step {span(counted)}", title_fontsize=TEXT, alignment="left")  # fmt: skip
    return figure


def scale(data: dict) -> Figure:
    """Seconds of a step against group size G, answer length C and groups a rollout R, with the roofline's, from `rows`."""
    rows = data["rows"]
    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    titles = {"G": "answers to a problem (G)", "C": "tokens of an answer (C)", "R": "groups in a rollout (R)"}
    base = {key: statistics.mode(row[key] for row in rows) for key in titles}
    for axes, (key, title) in zip(panels, titles.items()):
        others = [name for name in titles if name != key]
        line = sorted((row for row in rows if all(row[name] == base[name] for name in others)), key=lambda row: row[key])
        at = [row[key] for row in line]
        whole = [row["roofline_decoding"] + row["roofline_training"] for row in line]
        for values, text, (colour, marker, style) in zip(
            ([row["seconds"] for row in line], [row["generation"] for row in line],
             [row["log_probs"] + row["forward_backward"] for row in line], whole),
            ("a step", "generation", "log-probs and training pass", "roofline of a step"),
            CURVES,
        ):  # fmt: skip
            axes.loglog(at, values, linestyle=style, marker=marker, color=colour, linewidth=2, markersize=7, label=text)
        axes.set_xticks(at, [str(value) for value in at])
        axes.minorticks_off()
        axes.set_xlabel(title, fontsize=TEXT)
        axes.tick_params(labelsize=TEXT - 1)
        axes.grid(color=LIGHT, alpha=0.4)
    panels[0].set_ylabel("seconds a step", fontsize=TEXT)
    panels[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panels[0].yaxis.set_major_formatter("{x:g}")
    legend_above(figure, panels[0].get_lines())
    return figure


def backends(data: dict) -> Figure:
    """Reward, KL, answer length and seconds over steps, a line for each back end: `data` has their series by name.

    A series has `step`, `reward`, `KL`, `completion length` and `seconds a step`, with None where nothing was logged.
    """
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, title in zip(panels, ("reward", "KL", "completion length", "seconds a step")):
        for i, (name, series) in enumerate(data.items()):
            colour, marker, style = CURVES[i % len(CURVES)]
            points = [(x, y) for x, y in zip(series["step"], series[title]) if is_number(y)]
            if points:
                axes.plot(*zip(*points), linestyle=style, marker=marker, color=colour, markersize=5, label=name)
        axes.set_title(title, fontsize=TEXT)
        axes.tick_params(labelsize=TEXT - 1)
        axes.grid(color=LIGHT, alpha=0.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    lines = max((panel.get_lines() for panel in figure.axes), key=len)
    legend_above(figure, lines)
    return figure


def learning(data: dict) -> Figure:
    """Held-out accuracy over trained completions and over seconds of training: `curves` of single seeds, and their means.

    A curve has `groups` (in a rollout) and `points`, each a list of step, completions, seconds and accuracy.
    """
    figure = Figure(figsize=(11, 4), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    kinds = sorted({curve["groups"] for curve in data["curves"]})
    for axes, column, title in zip(panels, (1, 2), ("trained completions", "seconds of training, evaluations left out")):
        for groups, (colour, marker, style) in zip(kinds, CURVES):
            lines = [curve["points"] for curve in data["curves"] if curve["groups"] == groups]
            for points in lines:
                axes.plot([p[column] for p in points], [p[3] for p in points], marker, color=colour, alpha=0.4, markersize=5)
            means = [[statistics.mean(p[i] for p in together) for i in (column, 3)] for together in zip(*lines)]
            axes.plot(*zip(*means), linestyle=style, marker=marker, color=colour, linewidth=2.5, label=f"{groups} a rollout")
        axes.set_xlabel(title, fontsize=TEXT)
        axes.tick_params(labelsize=TEXT - 1)
        axes.grid(color=LIGHT, alpha=0.4)
    panels[0].set_ylabel("held-out accuracy", fontsize=TEXT)
    legend_above(figure, panels[0].get_legend_handles_labels()[0])
    return figure


FIGURES = {"reward_curve": reward_curve, "memory": memory, "step_time": step_time}


def canvas(height: float = 4.5):
    """A figure 8 inches wide, which needs no display and no pyplot, and its axes."""
    figure = Figure(figsize=(8, height), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.tick_params(labelsize=TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def legend_above(figure, key) -> None:
    look = dict(fontsize=TEXT - 1, frameon=False, columnspacing=1.2, handlelength=2.5)
    figure.legend(handles=key, loc="outside upper center", ncols=len(key), **look)


def name_at_the_right(axes, labels) -> None:
    """Write each of `labels` (height in data, text, colour, marker) beside the axes, apart from each other."""
    low, high = axes.get_ylim()
    labels = sorted(labels, key=lambda label: label[0])
    gap = 1 / max(len(labels), 5.5)
    heights, least = [], 0.0
    for height, *_ in labels:
        heights.append(max((height - low) / (high - low), least))
        least = heights[-1] + gap
    most = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], most)
        most = heights[i] - gap
    place = blended_transform_factory(axes.transAxes, axes.transAxes)
    for height, (_, text, colour, marker) in zip(heights, labels):
        axes.plot(1.03, height, marker, color=colour, markersize=9, transform=place, clip_on=False)
        axes.text(1.06, height, text, fontsize=TEXT - 1, va="center", transform=place, linespacing=1.1)


def in_percent(name: str, part: float) -> str:
    """`generation 88 %`, with a word for what would be rounded to nothing."""
    return f"{name.replace('_', ' ')} {f'{100 * part:.0f}' if part >= 0.005 else '< 1'} %"


def span(rows: list[dict]) -> str:
    """The steps of some rows: `3 to 8`, or `3`."""
    first, last = rows[0]["step"], rows[-1]["step"]
    return f"{first} to {last}" if first < last else f"{first}"


def short(name: str, most: int = 20) -> str:
    """A name as the screen has it, without `_reward` and not longer than `most`."""
    name = name.removesuffix("_reward").replace("_", " ")
    return name if len(name) <= most else name[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
