"""The demo: from text to four trained models, a table, a picture and a sample.

demo.py PROGRAM FOLDER [FLAGS OF group-muon train]

Runs that are in the folder already are gone on with, so a demo that was stopped costs nothing twice.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import plot
import sotu

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs/demo.toml"
SETTINGS = {
    "packed": ("Full-QKV Muon, packed", ["--qkv", "packed"]),
    "three-way": ("Full-QKV Muon, three-way", ["--qk-group", "all"]),
    "head-wise": ("MuonSplit, head-wise", ["--qk-group", "1", "--v-group", "1"]),
    "group": ("Group Muon, QK g = 6 random", ["--qk-group", "6:random"]),
}


def say(text: str = "") -> None:
    print(text, flush=True)


def live(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[2K{text}", end="", file=sys.stderr, flush=True)


class Run:
    """One training process, watched through its metrics file."""

    def __init__(
        self, program: str, folder: pathlib.Path, data: pathlib.Path, name: str, flags: list[str]
    ):
        self.name, self.folder = name, folder / name
        self.process = None
        known = (self.folder / "config.toml").exists()
        where = ["--resume", str(self.folder)] if known else ["--out", str(self.folder)]
        self.command = [program, "train", str(CONFIG), *where, "--data", str(data)]
        self.command += ["--threads", "1", *SETTINGS[name][1], *flags]
        self.log = folder / f"{name}.log"

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT)

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def metrics(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def step_and_loss(self) -> tuple[int, float | None]:
        steps = [line for line in self.metrics() if "loss" in line]
        return (steps[-1]["step"], steps[-1]["loss"]) if steps else (0, None)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def steps_of(run: Run) -> int | None:
    """From the resolved config, which a run writes first."""
    path = run.folder / "config.toml"
    found = re.search(r"^steps = (\d+)", path.read_text(), re.M) if path.exists() else None
    return int(found[1]) if found else None


def show(runs: list[Run], start: float, already: int) -> None:
    steps = steps_of(runs[0])
    if steps is None:
        return
    states = [run.step_and_loss() for run in runs]
    done = sum(step for step, _ in states)
    part = done / (steps * len(runs))
    filled = int(30 * part)
    words = [
        f"{run.name} {loss:.3f}" if loss else f"{run.name} …"
        for run, (_, loss) in zip(runs, states)
        if run.process
    ]
    left = ""
    if done - already > len(runs):
        rest = (steps * len(runs) - done) / (done - already) * (time.time() - start)
        left = f"  {clock(rest)} left"
    live(f"[{'=' * filled:<30}] {100 * part:3.0f}%  loss: {', '.join(words)}{left}")


def train_all(runs: list[Run], at_once: int) -> None:
    """Trains `at_once` at a time, a core each: small models do not profit from more."""
    start, already = time.time(), sum(run.step_and_loss()[0] for run in runs)
    waiting, going = list(runs), []
    try:
        while waiting or going:
            while waiting and len(going) < at_once:
                going.append(waiting.pop(0))
                going[-1].start()
            for run in [run for run in going if run.ended()]:
                going.remove(run)
                if run.process.returncode != 0:
                    last = run.log.read_text().strip().splitlines()[-1:]
                    raise SystemExit(f"{run.name} failed: {' '.join(last)} (all of it: {run.log})")
                live("")
                say(
                    f"   {run.name} is trained, {clock(time.time() - start)} minutes after the start"
                )
            show(runs, start, already)
            time.sleep(0.5)
    except KeyboardInterrupt:
        live("")
        say("stopped; ./run demo goes on from here")
        raise SystemExit(130) from None
    finally:
        for run in going:
            run.process.terminate()  # it writes a checkpoint
            run.process.wait()
    live("")


def table(runs: list[Run]) -> str:
    lines = [f"{'':30} {'validation loss':>15} {'to packed':>10}"]
    last = {run.name: plot.validation_losses(run.folder).popitem()[1] for run in runs}
    for name, loss in last.items():
        lines.append(f"{SETTINGS[name][0]:30} {loss:15.4f} {loss - last['packed']:+10.4f}")
    return "\n".join(lines)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    program, folder, flags = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    data = folder / "data"
    speeches = pathlib.Path(sotu.__file__).parent / "data/speeches"
    if not (data / "vocabulary.tiktoken").exists():
        say("1. State of the Union addresses to tokens (12 MB, a vocabulary of 4096 is learnt)")
        words = [str(speeches), "--out", str(data), "--learn", "4096"]
        subprocess.run([program, "tokenize", *words, "--validation-fraction", "0.03"], check=True)
    at_once = max(1, min(len(SETTINGS), len(os.sched_getaffinity(0))))
    say(f"2. Training four optimizers on the same model and data, {at_once} at a time")
    runs = [Run(program, folder, data, name, flags) for name in SETTINGS]
    train_all(runs, at_once)
    say("\n" + table(runs))
    say("One seed and a few minutes: a taste, not evidence.\n")

    picture = folder / "curves.png"
    plot.curves(str(picture), [f"{run.folder}={SETTINGS[run.name][0]}" for run in runs])
    say("3. A sample of the last model")
    prompt = ["--prompt", "Our country", "--tokens", "80", "--seed", "1"]
    text = subprocess.run(
        [program, "sample", str(runs[-1].folder), *prompt], check=True, capture_output=True
    ).stdout.decode(errors="replace")
    say("   " + text.strip().replace("\n", "\n   "))
    say(f"\ndata       {data}\nmodels     {' '.join(str(run.folder) for run in runs)}")
    say(f"picture    {picture}\nmore       .venv/bin/tensorboard --logdir {folder}")
    say(f"all of it took {clock(time.time() - began)} minutes")


if __name__ == "__main__":
    main()
