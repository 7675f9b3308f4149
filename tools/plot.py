"""Pictures from the files of runs. OUT is without an ending or with one: .png, .svg; without, both are written.

plot.py curves OUT RUN[=LABEL] …    validation loss by step, and its difference to the first run's
plot.py ranks OUT RUN               rank of Q and K by step, gradients and momentum, whole and in groups
plot.py norms OUT RUN [LAYER …]     ‖O‖² of Q and K by step, whole and head by head; by default of two middle layers
plot.py gain OUT RUN                gain and cost of every group size by step, against the whole matrix
plot.py numbers RUN                 the same as a Markdown table: means over Q and K of all layers, at first each measurement,
                                    then every tenth

The last four need a run made with --diagnose-every.
"""

import json
import pathlib
import sys
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ["#555555", "#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a"]


def records(run: str, name: str) -> list[dict]:
    path = pathlib.Path(run) / name
    if not path.exists():
        more = ", train with --diagnose-every" if name == "diagnostics.jsonl" else ""
        sys.exit(f"plot.py: '{run}' has no {name}{more}")
    lines = path.read_text().splitlines(keepends=True)
    return [
        json.loads(line) for line in lines if line.endswith("\n")
    ]  # the last may be half written


def save(figure, out: str) -> None:
    suffix = pathlib.Path(out).suffix
    if suffix in (".pdf", ".jpg", ".jpeg", ".eps"):
        sys.exit(f"plot.py: writes .png and .svg, not {suffix}")
    pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
    for target in [out] if suffix in (".png", ".svg") else [f"{out}.png", f"{out}.svg"]:
        figure.savefig(target, dpi=130)
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
        sys.exit("plot.py: this picture needs grouping 1 among --diagnose-groups")
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
        sys.exit(f"plot.py: '{run}' has measured no grouping yet")
    whole = {
        (li["step"], li["weight"], li["part"], li["of"]): li for li in lines if li["grouping"] == "three-way"
    }  # fmt: skip

    def share(line: dict, key: str, of: str) -> float:
        """Part of the whole matrix' own, so that layers can be averaged."""
        own = whole[line["step"], line["weight"], line["part"], line["of"]][of]
        return line["against three-way"][key] / own if own else 0.0

    pictures = [
        ("gradient", "gain", "nuclear_norm", "gain Σ‖Gᵢ‖* − ‖G‖*, part of ‖G‖*"),
        ("momentum", "first_order_gain", "first_order", "⟨G, sO⟩ gained, part of the whole's"),
        ("momentum", "norm_cost", "squared_norm", "cost Σ‖Oᵢ‖² − ‖O‖², part of ‖O‖²"),
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
    print("Ranks at 0.01 σ₁ by rows, in the order " + ", ".join(map(label_of, names)) + ".\n")
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
        case ["--help" | "-h"]:
            print(__doc__)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
