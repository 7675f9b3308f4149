"""Pictures from the files of runs.

plot.py curves OUT.png RUN[=LABEL] …    validation loss by step, and its difference to the first run's
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ["#555555", "#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a"]


def validation_losses(run: str) -> dict[int, float]:
    path = pathlib.Path(run) / "metrics.jsonl"
    if not path.exists():
        sys.exit(f"plot.py: '{run}' has no metrics.jsonl")
    lines = path.read_text().splitlines()
    entries = [json.loads(line) for line in lines]
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
        style = {"color": color, "marker": "o", "markersize": 3, "linewidth": 1.5}
        left.plot(steps, list(losses.values()), label=f"{label}  {last:.4f}", **style)
        shared = [step for step in steps if step in base]
        right.plot(shared, [losses[step] - base[step] for step in shared], label=label, **style)
    left.set(
        xlabel="step", ylabel="validation loss", title="Validation loss (last value in the legend)"
    )
    right.set(
        xlabel="step", ylabel="difference", title=f"Difference to {baseline}: lower is better"
    )
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=130)


def main() -> None:
    match sys.argv[1:]:
        case ["curves", out, *runs] if runs:
            curves(out, runs)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
