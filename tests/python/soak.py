"""Trains a tiny model for thousands of steps with 1,000 checkpoints, and watches what must not grow.

soak.py [STEPS [FOLDER]]   default: 10000 steps in a temporary folder

The run is stopped and resumed several times. Memory, open files, threads, time per step and disk use must be flat in
each part, and the last weights must equal those of a run that nobody stopped.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from conftest import make_data
from running import PROGRAM, arguments, curve, last_weights, program

CHECKPOINTS = 1000
PARTS = 5
MODEL = {
    "layers": 2,
    "heads": 4,
    "width": 32,
    "context": 16,
    "batch": 4,
    "warmdown": 0,
    "validation-tokens": 256,
    "diagnose-every": 50,
    "threads": 2,
    "keep": 3,
}


@dataclasses.dataclass
class Sample:
    """What a process holds at one moment."""

    step: int
    memory: float  # MB
    files: int
    threads: int


def last_step(run):
    """The step of the last complete line of the metrics."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else 0


def look(process, run):
    """A sample, or None if the process has ended."""
    place = pathlib.Path(f"/proc/{process.pid}")
    try:
        status = (place / "status").read_text()
        values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        files = len(os.listdir(place / "fd"))
        return Sample(
            last_step(run), int(values["VmRSS"].split()[0]) / 1024, files, int(values["Threads"])
        )
    except (OSError, KeyError):
        return None


def watch(command, run, stop_at):
    """Runs a part. Sends SIGTERM after step `stop_at`. Returns samples; a checkpoint may be open in some."""
    process = subprocess.Popen(
        [PROGRAM, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    samples, told = [], False
    while process.poll() is None:
        sample = look(process, run)
        if sample is not None and sample.step > 0:
            samples.append(sample)
            if stop_at and sample.step >= stop_at and not told:
                process.send_signal(signal.SIGTERM)
                told = True
        time.sleep(0.1)
    errors = process.stderr.read().decode()
    expected = 128 + signal.SIGTERM if told else 0
    assert process.returncode in (0, expected), f"exit code {process.returncode}: {errors}"
    return samples


def check(name, early, late, limit, unit=""):
    """Fails if `late` exceeds `early` by more than `limit`."""
    line = f"{name}: {early:.2f} → {late:.2f}{unit}"
    assert late - early <= limit, f"{line}, which is more than {limit:.2f} above"
    print(line, flush=True)


def check_part(number, samples):
    """The second quarter of a part against its last: caches are full by then."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    assert quarter >= 3, f"part {number} has only {len(samples)} samples; give more steps"
    print(f"part {number}: steps {samples[0].step} to {samples[-1].step}, {len(samples)} samples")
    middle = lambda of, some: statistics.median(getattr(s, of) for s in some)  # noqa: E731
    check("  memory", middle("memory", early), middle("memory", late), 4, " MB")
    check("  open files", middle("files", early), middle("files", late), 0)
    check("  most open files", max(s.files for s in early), max(s.files for s in late), 4)
    check("  threads", middle("threads", early), middle("threads", late), 0)


def disk_use(run):
    """Bytes of everything but the records, which grow by a line a step."""
    records = ("metrics.jsonl", "diagnostics.jsonl", "machine.jsonl")
    return sum(
        path.stat().st_size
        for path in run.rglob("*")
        if path.is_file() and path.name not in records and not path.name.startswith("events.")
    )


def soak(steps, folder):
    data, run, straight = make_data(folder / "data"), folder / "run", folder / "straight"
    interval = max(1, steps // CHECKPOINTS)
    options = {**MODEL, "steps": steps, "validation-interval": 10 * interval}
    command = ["train", *arguments(data, run, **{**options, "checkpoint-interval": interval})]
    start, sizes = time.monotonic(), []
    for part in range(1, PARTS + 1):
        stop_at = steps * part // PARTS if part < PARTS else None
        samples = watch(command, run, stop_at)
        check_part(part, samples)
        names = sorted(path.name for path in (run / "checkpoints").iterdir())
        strays = [name for name in names if not name.startswith("step-")]
        assert not strays and len(names) <= MODEL["keep"] + 1, f"checkpoints left: {names}"
        sizes.append(disk_use(run))
        command = ["train", "--resume", run]
    check("disk use without records", sizes[0] / 1e6, sizes[-1] / 1e6, 0.2 * sizes[0] / 1e6, " MB")
    lines = [line for line in map(json.loads, (run / "metrics.jsonl").open()) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    pace = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(lines)]
    fifth = len(pace) // 5
    early, late = statistics.median(pace[fifth : 2 * fifth]), statistics.median(pace[-fifth:])
    check("time per step", 1000 * early, 1000 * late, 1000 * early, " ms")
    program("train", *arguments(data, straight, **{**options, "checkpoint-interval": 0}))
    assert last_weights(run) == last_weights(straight), (
        "the weights differ from those of a run that nobody stopped"
    )
    assert curve(run) == curve(straight), (
        "the metrics differ from those of a run that nobody stopped"
    )
    print(
        f"{steps} steps, {steps // interval} checkpoints, {PARTS - 1} stops in {(time.monotonic() - start) / 60:.1f} "
        "minutes: all flat; weights and metrics equal those of a run that nobody stopped"
    )


def main(words):
    steps = int(words[0]) if words else 10_000
    if steps < CHECKPOINTS:
        sys.exit(f"soak.py: give at least {CHECKPOINTS} steps, not {steps}")
    try:
        if len(words) > 1:
            folder = pathlib.Path(words[1])
            folder.mkdir(parents=True)
            soak(steps, folder)
        else:
            with tempfile.TemporaryDirectory(prefix="soak-") as place:
                soak(steps, pathlib.Path(place))
    except AssertionError as error:
        sys.exit(f"soak.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
