"""Draws figures from the files of runs. OUT may end in .png or .svg; without an extension both are written.

plot.py curves OUT RUN[=LABEL] …    validation loss by step, and the difference to the first run
plot.py ranks OUT RUN               rank of Q and K by step, for gradients and momentum, whole and in groups
plot.py norms OUT RUN [LAYER …]     ‖O‖² of Q and K by step, whole and head by head; default: two middle layers
plot.py gain OUT RUN                gain and cost of every grouping by step, against the whole matrix
plot.py numbers RUN                 the same as a Markdown table: means over Q and K of all layers, for the first ten
                                    measurements and then every tenth
plot.py study FOLDER                all figures of a study from its report.json, into FOLDER/figures: figure1,
                                    figure2, differences, effects, steps, variants and gain, where there are data

ranks, norms, gain and numbers need a run trained with --diagnose-every.
"""

import colorsys
import json
import pathlib
import re
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy

plt.rcParams["svg.hashsalt"] = "group-muon"  # the same data give the same file
plt.rcParams["text.parse_math"] = False  # names may contain $

COLORS = ["#555555", "#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a"]


def records(run: str, name: str) -> list[dict]:
    path = pathlib.Path(run) / name
    if not path.exists():
        more = "; train with --diagnose-every" if name == "diagnostics.jsonl" else ""
        sys.exit(f"plot.py: '{run}' has no {name}{more}")
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be incomplete


def save(figure, out: str) -> None:
    suffix = pathlib.Path(out).suffix
    if suffix in (".pdf", ".jpg", ".jpeg", ".eps"):
        sys.exit(f"plot.py: writes .png and .svg, not {suffix}")
    pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
    for target in [out] if suffix in (".png", ".svg") else [f"{out}.png", f"{out}.svg"]:
        dated = {"metadata": {"Date": None}} if target.endswith(".svg") else {}
        # Written aside and renamed: a figure is whole or not there.
        unfinished = pathlib.Path(f"{target}.tmp")
        try:
            figure.savefig(unfinished, dpi=130, format=pathlib.Path(target).suffix[1:], **dated)
            unfinished.replace(target)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            sys.exit(f"plot.py: '{target}' cannot be written: {error.strerror}")
        print(f"wrote {target}")


def draw(axes, steps: list[int], values: list[float], label: str, color: str) -> None:
    marker = "o" if len(steps) <= 40 else ""
    axes.plot(steps, values, label=label, color=color, marker=marker, markersize=2.5, linewidth=1.4)


def tidy(all_axes) -> None:
    for axes in all_axes:
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def validation_losses(run: str) -> dict[int, float]:
    entries = records(run, "metrics.jsonl")
    return {e["step"]: e["validation_loss"] for e in entries if "validation_loss" in e}


def curves(out: str, runs: list[str]) -> None:
    named = [
        (run, label or pathlib.Path(run).name) for run, _, label in (r.partition("=") for r in runs)
    ]
    all_losses = [(label, validation_losses(run)) for run, label in named]
    baseline, base = all_losses[0]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, (label, losses) in enumerate(all_losses):
        color = COLORS[number % len(COLORS)]
        steps = list(losses)
        last = losses[steps[-1]]
        draw(left, steps, list(losses.values()), f"{label}  {last:.4f}", color)
        shared = [step for step in steps if step in base]
        draw(right, shared, [losses[step] - base[step] for step in shared], label, color)
    left.set(ylabel="validation loss", title="Validation loss (last value in the legend)")
    right.set(ylabel="difference", title=f"Difference to {baseline}: lower is better")
    left.legend(frameon=False)
    tidy((left, right))
    save(figure, out)


def layer_of(line: dict) -> int:
    return int(line["weight"].split(".h.")[1].split(".")[0])


def label_of(grouping: str) -> str:
    if grouping == "three-way":
        return "whole"
    parts = []
    for text in grouping.split("/"):
        g, _, rule = text.partition(":")
        parts.append(f"g = {g}" if g in ("1", "all") else f"g = {g}, {rule or 'adjacent'}")
    return " / V ".join(parts)


def mean_by_step(lines: list[dict], value) -> tuple[list[int], list[float]]:
    by_step = defaultdict(list)
    for line in lines:
        by_step[line["step"]].append(value(line))
    steps = sorted(by_step)
    return steps, [sum(by_step[step]) / len(by_step[step]) for step in steps]


def groupings_of(lines: list[dict]) -> list[str]:
    """The whole matrix first, then the groupings in the order they were given."""
    return [name for name in dict.fromkeys(line["grouping"] for line in lines) if name != "packed"]


def ranks(out: str, run: str) -> None:
    lines = [line for line in records(run, "diagnostics.jsonl") if line["part"] in ("q", "k")]
    tolerances = {1: "σ > 0.01 σ₁", 3: "σ above machine precision"}
    figure, grid = plt.subplots(
        2, 2, figsize=(11, 7), layout="constrained", sharex=True, sharey=True
    )
    for row, (index, tolerance) in zip(grid, tolerances.items()):
        for axes, of in zip(row, ("gradient", "momentum")):
            for number, grouping in enumerate(groupings_of(lines)):
                chosen = [li for li in lines if (li["of"], li["grouping"]) == (of, grouping)]
                steps, ratio = mean_by_step(chosen, lambda li, i=index: li["ranks"][i] / li["rows"])
                color = COLORS[number % len(COLORS)]
                draw(axes, steps, ratio, label_of(grouping), color)
            axes.set_title(f"{of}, {tolerance}")
            axes.set_ylim(0, 1.03)
    for row in grid:
        row[0].set_ylabel("sum of the blocks' ranks / rows")
    grid[0][0].legend(frameon=False, ncols=2)
    tidy(grid.flat)
    figure.suptitle("Rank of Q and K, mean over layers: 1 is full row rank")
    save(figure, out)


def norms(out: str, run: str, layers: list[int]) -> None:
    lines = [line for line in records(run, "diagnostics.jsonl") if line["of"] == "momentum"]
    if not any(line["grouping"] == "1" for line in lines):
        sys.exit("plot.py: this figure needs grouping 1; train with 1 among --diagnose-groups")
    known = sorted({layer_of(line) for line in lines})
    layers = layers or known[(len(known) - 1) // 2 :][:2]
    if unknown := [layer for layer in layers if layer not in known]:
        sys.exit(f"plot.py: '{run}' has no layer {unknown[0]}, only {known[0]} to {known[-1]}")
    figure, grid = plt.subplots(
        len(layers), 2, figsize=(11, 3.3 * len(layers)), layout="constrained", sharex=True,
        sharey=True, squeeze=False,
    )  # fmt: skip
    for row, layer in zip(grid, layers):
        for axes, part in zip(row, ("q", "k")):
            for color, grouping, label in (
                ("#555555", "three-way", "whole"),
                ("#d95f02", "1", "head by head"),
            ):
                chosen = [
                    line
                    for line in lines
                    if (layer_of(line), line["part"], line["grouping"]) == (layer, part, grouping)
                ]
                steps, squares = mean_by_step(chosen, lambda line: line["squared_norm"])
                draw(axes, steps, squares, label, color)
                ideal = min(chosen[0]["rows"], chosen[0]["cols"])
            axes.axhline(ideal, color="black", linestyle=":", linewidth=1, label=f"ideal, {ideal}")
            axes.set_title(f"layer {layer}, {part.upper()}")
        row[0].set_ylabel("‖O‖²")
    grid[0][0].legend(frameon=False)
    tidy(grid.flat)
    figure.suptitle("Squared norm of the whitened update (of the momentum)")
    save(figure, out)


def gain(out: str, run: str) -> None:
    lines = [line for line in records(run, "diagnostics.jsonl") if line["part"] in ("q", "k")]
    names = [name for name in groupings_of(lines) if name != "three-way"]
    if not names:
        sys.exit(f"plot.py: '{run}' has no measured groupings yet")
    whole = {
        (li["step"], li["weight"], li["part"], li["of"]): li for li in lines if li["grouping"] == "three-way"
    }  # fmt: skip

    def share(line: dict, key: str, of: str) -> float:
        """The value relative to the whole matrix's, so that layers can be averaged."""
        own = whole[line["step"], line["weight"], line["part"], line["of"]][of]
        return line["against three-way"][key] / own if own else 0.0

    pictures = [
        ("gradient", "gain", "nuclear_norm", "gain Σ‖Gᵢ‖* − ‖G‖*, relative to ‖G‖*"),
        ("momentum", "first_order_gain", "first_order", "gain in ⟨G, sO⟩, relative to the whole"),
        ("momentum", "norm_cost", "squared_norm", "cost Σ‖Oᵢ‖² − ‖O‖², relative to ‖O‖²"),
    ]
    figure, row = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for axes, (of, key, base, title) in zip(row, pictures):
        for number, name in enumerate(names):
            chosen = [li for li in lines if (li["of"], li["grouping"]) == (of, name)]
            steps, means = mean_by_step(chosen, lambda li, k=key, b=base: share(li, k, b))
            color = COLORS[1 + number % (len(COLORS) - 1)]
            draw(axes, steps, means, label_of(name), color)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_title(f"{title}\n(of the {of})", fontsize=10)
    row[0].legend(frameon=False)
    tidy(row)
    figure.suptitle("Grouping Q and K against the whole matrices, mean over layers")
    save(figure, out)


def numbers(run: str) -> None:
    lines = [line for line in records(run, "diagnostics.jsonl") if line["part"] in ("q", "k")]
    names = groupings_of(lines)
    columns = [f"rank of {of}s" for of in ("gradient", "momentum")]
    columns += ["‖O‖²", "gain / ‖G‖*", "heads larger"]
    print("Ranks at 0.01 σ₁ / rows, in the order " + ", ".join(map(label_of, names)) + ".\n")
    print("| step | " + " | ".join(columns) + " |")
    print("|---:|" + "---|" * len(columns))
    steps = sorted({line["step"] for line in lines})
    for step in dict.fromkeys([*steps[:10], *steps[10::10], steps[-1]]):
        here = [line for line in lines if line["step"] == step]

        def means(of: str, value, chosen=here) -> list[float]:
            picked = ([li for li in chosen if (li["of"], li["grouping"]) == (of, n)] for n in names)
            return [sum(map(value, group)) / len(group) for group in picked]

        cells = [
            " ".join(f"{v:.2f}" for v in means(of, lambda li: li["ranks"][1] / li["rows"]))
            for of in ("gradient", "momentum")
        ]
        cells.append(" ".join(f"{v:.1f}" for v in means("momentum", lambda li: li["squared_norm"])))
        nuclear = means("gradient", lambda li: li["nuclear_norm"])
        cells.append(" ".join(f"{v / nuclear[0] - 1:.3f}" for v in nuclear[1:]))
        heads = [li for li in here if (li["of"], li["grouping"]) == ("momentum", "1")]
        larger = sum(li["against three-way"]["norm_cost"] > 0 for li in heads)
        cells.append(f"{larger} of {len(heads)}" if heads else "")
        print(f"| {step} | " + " | ".join(cells) + " |")


# Colors of a study's settings: whole matrices in grey, the others by what is grouped and by group size.
BASELINES = ("packed", "three-way")
PLAIN = {"packed": "#111111", "three-way": "#7d8288", "head-wise": "#c4203a"}
SIZES = (1, 2, 3, 4, 6)
SHADES = {
    "qk": ("#d07a00", "#b8478c", "#7d52c7", "#3270d8", "#05898b"),
    "v": ("#868e1c", "#6c9a2d", "#3f8f3f", "#1f7a55", "#0f5c4d"),
    "fixed-qk-v": ("#cb7350", "#bf6c49", "#a4532f", "#83401f", "#5f2d13"),
}
LINES = {"adjacent": (0, (5, 2)), "interval": (0, (1, 1.5))}


def own_settings(report: dict) -> list[str]:
    """Names of the settings that the study file itself defines."""
    return [one["name"] for one in report["settings"] if one["own"]]


def style_of(name: str, own: list[str] = ()) -> dict:
    if name in own:
        hue = (280 + 75 * own.index(name)) % 360 / 360
        return {"color": colorsys.hls_to_rgb(hue, 0.45, 0.55), "linestyle": (0, (8, 2, 2, 2))}
    parts = re.fullmatch(r"(fixed-qk-v|qk|v)-(\d+)(?:-(\w+))?", name)
    if parts and int(parts[2]) in SIZES:
        color = SHADES[parts[1]][SIZES.index(int(parts[2]))]
        return {"color": color, "linestyle": LINES.get(parts[3], "-")}
    line = (0, (6, 2)) if name == "three-way" else "-"
    return {"color": PLAIN.get(name, "#5f646a"), "linestyle": line}


def array(values: list) -> numpy.ndarray:
    """An array with missing values as NaN, which are not drawn."""
    return numpy.array(values, dtype=float)


def draw_band(axes, curve: dict, label: str, style: dict, first: float = 0, last=None) -> None:
    """A mean and its interval, from one step to another. Intervals of two seeds are not drawn: they would cover
    everything else."""
    steps = array(curve["steps"])
    last = steps[-1] if last is None else min(last, steps[-1])
    if first > last:
        return
    ends = [max(first, steps[0]), last]
    shown = numpy.unique([*ends, *(step for step in steps if ends[0] <= step <= last)])
    mean, low, high = (numpy.interp(shown, steps, array(curve[k])) for k in ("mean", "low", "high"))
    if curve["count"] < 3 and "(n = " not in label:
        label = f"{label} (n = {curve['count']}, no band)"
    axes.plot(shown, mean, label=label, linewidth=1.5, **style)
    measured = (steps >= ends[0]) & (steps <= last)
    if measured.sum() <= 40:
        axes.plot(steps[measured], array(curve["mean"])[measured], "o", ms=3, color=style["color"])
    if curve["count"] > 2:
        axes.fill_between(shown, low, high, color=style["color"], alpha=0.13, linewidth=0)


def draw_zero(axes) -> None:
    axes.axhline(0, color="#555555", linewidth=0.8)


def noise_of(report: dict, count: int) -> float:
    """Two standard errors that A/A noise alone gives a mean over `count` pairs."""
    noise = report["noise"]
    return 2 * noise["deviation"] / count**0.5 if noise and noise["deviation"] else 0.0


def titles_of(report: dict) -> dict[str, str]:
    return {setting["name"]: setting["title"] for setting in report["settings"]}


def present(names, curves: dict) -> list[str]:
    return [name for name in names if curves.get(name, {}).get("steps")]


def legend_below(figure, *all_axes) -> None:
    """One legend for all axes, with every label once."""
    handles = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    labels = [label if len(label) < 45 else f"{label[:42]}…" for label in handles]
    # About eleven letters per inch, plus the line and the gaps.
    width = max(map(len, labels), default=0) / 11 + 0.8
    columns = max(1, min(4, int(figure.get_figwidth() / width)))
    figure.legend(
        handles.values(), labels, loc="outside lower center", ncols=columns, frameon=False
    )


def study_figure1(report: dict):
    titles, curves = titles_of(report), report["curves"]
    names = present(("packed", "three-way", "head-wise"), curves)
    if not names:
        return None
    against = present_baselines(report, "head-wise")
    width = 2 if against else 1
    figure, row = plt.subplots(
        1, width, figsize=(5.5 * width, 4.4), layout="constrained", squeeze=False
    )
    left = row[0][0]
    for name in names:
        trained = [step for step in curves[name]["steps"] if step > 0]
        draw_band(left, curves[name], titles[name], style_of(name), first=min(trained, default=0))
    left.set(ylabel="validation loss", title="Validation loss, without step 0")
    for axes in row[0][1:]:
        draw_zero(axes)
        for name in against:
            curve = report["differences"][name]["head-wise"]
            draw_band(axes, curve, f"head-wise minus {name}", style_of(name))
        axes.set(ylabel="difference", title="Head-wise minus full: below zero, head-wise is better")
    for axes in row[0]:
        axes.legend(frameon=False)
    tidy(row[0])
    return figure


def present_baselines(report: dict, setting: str) -> list[str]:
    differences = report["differences"]
    return [name for name in BASELINES if present([setting], differences.get(name, {}))]


def study_figure2(report: dict):
    """Thirds of the training: losses above, differences to packed below, on the seeds that all have."""
    sizes = report["group_sizes"]
    titles = titles_of(sizes)
    names = list(titles)
    kinds = [("validation loss", sizes["curves"])]
    kinds.append(("loss minus packed", sizes["differences"].get("packed", {})))
    kinds = [(label, curves) for label, curves in kinds if present(names, curves)]
    if not kinds:
        return None
    figure, grid = plt.subplots(
        len(kinds), 3, figsize=(12, 0.8 + 3.3 * len(kinds)), layout="constrained", squeeze=False
    )
    third = report["steps"] / 3
    for row, (label, curves) in zip(grid, kinds):
        for part, (axes, title) in enumerate(zip(row, ("early", "middle", "late"))):
            for name in present(names, curves):
                steps = [step for step in curves[name]["steps"] if step > 0 or "minus" in label]
                first = max(part * third, min(steps, default=0))
                style, counted = style_of(name), f"{titles[name]} (n = {curves[name]['count']})"
                draw_band(axes, curves[name], counted, style, first, (part + 1) * third)
            if not axes.lines:  # no validation here
                axes.set_axis_off()
                continue
            if "minus" in label:
                draw_zero(axes)
            axes.set_title(f"{title}: {label}")
    tidy(grid.flat)
    legend_below(figure, *grid.flat)
    return figure


def names_of_curves(report: dict) -> list[str]:
    """All settings of a small study, else the headline settings and the study's own."""
    names = [one["name"] for one in report["settings"]]
    if len(names) <= 10:
        return names
    return ["packed", "three-way", "head-wise", "qk-1", "qk-6-random", *own_settings(report)]


def study_differences(report: dict):
    titles, differences = titles_of(report), report["differences"]
    names = names_of_curves(report)
    bases = [base for base in BASELINES if present(names, differences.get(base, {}))]
    if not bases:
        return None
    figure, row = plt.subplots(
        1, len(bases), figsize=(5.5 * len(bases), 4.8), layout="constrained", squeeze=False
    )
    for axes, base in zip(row.flat, bases):
        draw_zero(axes)
        shown = present(names, differences[base])
        width = noise_of(
            report, max((differences[base][name]["count"] for name in shown), default=1)
        )
        axes.axhspan(-width, width, color="#888888", alpha=0.2, linewidth=0)
        for name in shown:
            style = style_of(name, own_settings(report))
            draw_band(axes, differences[base][name], titles[name], style)
        axes.set(ylabel="difference", title=f"Validation loss minus {base}: lower is better")
    tidy(row.flat)
    legend_below(figure, *row.flat)
    return figure


def effects_range(pairs: list[dict]) -> tuple[float, float]:
    """All means, and the intervals of more than two seeds. Other intervals may extend beyond the range."""
    values = [0.0, *(pair["mean"] for pair in pairs)]
    for pair in pairs:
        if pair["count"] > 2 and pair["low"] is not None:
            values += [pair["low"], pair["high"]]
    air = 0.12 * (max(values) - min(values)) or 0.01
    return min(values) - air, max(values) + air


def study_effects(report: dict):
    def pair_of(setting: dict, base: str) -> dict | None:
        pair = setting["against"].get(base)
        return pair if pair and pair["mean"] is not None else None

    bases = [b for b in BASELINES if any(pair_of(one, b) for one in report["settings"])]
    if not bases:
        return None
    shown = [one for one in report["settings"] if any(pair_of(one, base) for base in bases)]
    figure, row = plt.subplots(
        1, len(bases), figsize=(3 + 4.5 * len(bases), 1.3 + 0.23 * len(shown)),
        layout="constrained", sharey=True, squeeze=False,
    )  # fmt: skip
    for axes, base in zip(row.flat, bases):
        pairs = [(setting, pair) for setting in shown if (pair := pair_of(setting, base))]
        left, right = axes.set_xlim(*effects_range([pair for _, pair in pairs]))
        axes.axvline(0, color="#555555", linewidth=0.8)
        for setting, pair in pairs:
            place = shown.index(setting)
            color = style_of(setting["name"], own_settings(report))["color"]
            width = noise_of(report, pair["count"])
            axes.barh(place, 2 * width, left=-width, height=0.9, color="#888888", alpha=0.2)
            if pair["low"] is not None:
                axes.plot([pair["low"], pair["high"]], [place, place], color=color, linewidth=1.5)
                if pair["low"] < left:
                    axes.plot(left, place, "<", color=color, clip_on=False, markersize=6)
                if pair["high"] > right:
                    axes.plot(right, place, ">", color=color, clip_on=False, markersize=6)
            face = "white" if pair["exploratory"] else color
            axes.plot(pair["mean"], place, "o", color=color, markerfacecolor=face, markersize=5)
        axes.set_title(f"Final loss minus {base}, 95% intervals")
    counts = [[pair["count"] for base in bases if (pair := pair_of(one, base))] for one in shown]
    labels = [
        f"{s['title']}  (n = {'/'.join(map(str, sorted(set(n))))})" for s, n in zip(shown, counts)
    ]
    row[0][0].set_yticks(range(len(shown)), labels)
    row[0][0].set_ylim(len(shown) - 0.4, -0.6)
    tidy(row.flat)
    for axes in row.flat:
        axes.set_xlabel("difference: left is better")
    grey = "; grey: noise" if noise_of(report, 1) else ""
    figure.supxlabel(
        "hollow: exploratory; arrows: the interval extends beyond the axis; rows with different n "
        f"use different seeds{grey}", fontsize=9,
    )  # fmt: skip
    return figure


def study_steps(report: dict):
    """Steps to each baseline's final loss. Where some seeds never get there, a cross is at the median, or right of 1 if
    there is none."""

    def steps_of(setting: dict, base: str) -> dict | None:
        pair = setting["against"].get(base)
        return pair["steps"] if pair and pair["steps"]["seeds"] else None

    bases = [b for b in BASELINES if any(steps_of(one, b) for one in report["settings"])]
    if not bases:
        return None
    shown = [one for one in report["settings"] if any(steps_of(one, base) for base in bases)]
    figure, row = plt.subplots(
        1, len(bases), figsize=(3 + 4.5 * len(bases), 1.3 + 0.23 * len(shown)),
        layout="constrained", sharey=True, squeeze=False,
    )  # fmt: skip
    for axes, base in zip(row.flat, bases):
        axes.axvline(1, color="#555555", linewidth=0.8)
        for place, setting in enumerate(shown):
            steps = steps_of(setting, base)
            if steps is None:
                continue
            color = style_of(setting["name"], own_settings(report))["color"]
            if steps.get("mean") is None:
                middle = steps["median"] if steps["median"] is not None else 1.02
                axes.plot(middle, place, "x", color=color, markersize=5)
                continue
            if steps["low"] is not None and steps["seeds"] > 2:
                axes.plot([steps["low"], steps["high"]], [place, place], color=color, linewidth=1.5)
            face = "white" if setting["against"][base]["exploratory"] else color
            axes.plot(steps["mean"], place, "o", color=color, markerfacecolor=face, markersize=5)
        axes.set(title=f"Steps to {base}'s final loss, of its steps", xlim=(None, 1.04))
    row[0][0].set_yticks(range(len(shown)), [one["title"] for one in shown])
    row[0][0].set_ylim(len(shown) - 0.4, -0.6)
    tidy(row.flat)
    for axes in row.flat:
        axes.set_xlabel("fraction: left is better")
    figure.supxlabel(
        "95% intervals; hollow: exploratory; cross: some seeds never get there (at the median, or right of 1 "
        "without one)", fontsize=9,
    )  # fmt: skip
    return figure


def study_variants(report: dict):
    drawn = [v for v in report["variants"] if any(map(bool, v["differences"].values()))]
    bases = [base for base in BASELINES if any(v["differences"].get(base) for v in drawn)]
    if not bases:
        return None
    figure, grid = plt.subplots(
        len(drawn), len(bases), figsize=(5.5 * len(bases), 0.8 + 3.3 * len(drawn)),
        layout="constrained", sharex="row", squeeze=False,
    )  # fmt: skip
    for row, variant in zip(grid, drawn):
        titles = titles_of(variant)
        for axes, base in zip(row, bases):
            curves = variant["differences"].get(base, {})
            draw_zero(axes)
            for name in present(titles, curves):
                style = style_of(name, own_settings(report))
                draw_band(axes, curves[name], titles[name], style)
            axes.set_title(f"{variant['name']}: loss minus {base}")
        row[0].set_ylabel("difference")
    tidy(grid.flat)
    legend_below(figure, *grid.flat)
    return figure


def study_gain(report: dict):
    """Six panels for every run with diagnostics."""
    pictures = [
        ("gradient", "rank_ratio", "rank / rows, σ > 0.01 σ₁"),
        ("momentum", "rank_ratio", "rank / rows, σ > 0.01 σ₁"),
        ("momentum", "squared_norm_ratio", "‖O‖² / full rank"),
        ("gradient", "gain", "gain Σ‖Gᵢ‖* − ‖G‖*, relative to ‖G‖*"),
        ("momentum", "first_order_gain", "gain in ⟨G, sO⟩, relative to the whole"),
        ("momentum", "norm_cost", "cost Σ‖Oᵢ‖² − ‖O‖², relative to ‖O‖²"),
    ]
    runs = [run for run in report["diagnostics"] if run["series"]]
    if not runs:
        return None
    figure, grid = plt.subplots(
        2 * len(runs), 3, figsize=(12, 0.6 + 6 * len(runs)), layout="constrained", squeeze=False
    )
    for number, run in enumerate(runs):
        for axes, (of, key, title) in zip(grid[2 * number : 2 * number + 2].flat, pictures):
            for line in run["series"]:
                against_itself = line["grouping"] == "three-way" and key.endswith(("gain", "cost"))
                if line["of"] != of or against_itself:
                    continue
                size, _, rule = line["grouping"].partition(":")
                name = f"qk-{size}-{rule}".rstrip("-") if size.isdigit() else size
                style = style_of(name)
                label = label_of(line["grouping"])
                axes.plot(line["steps"], array(line[key]), label=label, linewidth=1.5, **style)
            if key.endswith(("gain", "cost")):
                draw_zero(axes)
            axes.set_title(f"{title} (of the {of})\n{run['run']}", fontsize=9)
    tidy(grid.flat)
    legend_below(figure, *grid.flat)
    return figure


def study(folder: str) -> None:
    path = pathlib.Path(folder) / "report.json"
    if not path.exists():
        sys.exit(f"plot.py: '{folder}' has no report.json; write it with group-muon report")
    report = json.loads(path.read_text())
    pictures = {
        "figure1": study_figure1,
        "figure2": study_figure2,
        "differences": study_differences,
        "effects": study_effects,
        "steps": study_steps,
        "variants": study_variants,
        "gain": study_gain,
    }
    for name, make in pictures.items():
        place = path.parent / "figures" / name
        for suffix in (".png", ".svg"):  # remove outdated figures
            place.with_suffix(suffix).unlink(missing_ok=True)
        if figure := make(report):
            save(figure, str(place))
            plt.close(figure)


def main() -> None:
    match sys.argv[1:]:
        case ["curves", out, *runs] if runs:
            curves(out, runs)
        case ["ranks", out, run]:
            ranks(out, run)
        case ["norms", out, run, *layers] if all(layer.isdigit() for layer in layers):
            norms(out, run, [int(layer) for layer in layers])
        case ["gain", out, run]:
            gain(out, run)
        case ["numbers", run]:
            numbers(run)
        case ["study", folder]:
            study(folder)
        case ["--help" | "-h"]:
            print(__doc__)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.exit(f"plot.py: '{problem.filename}' cannot be used: {problem.strerror}")
