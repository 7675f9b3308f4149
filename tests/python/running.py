"""Helpers to run the program in tests: small data, small models, and reading what runs leave behind."""

import json
import os
import pathlib
import subprocess

import numpy

PROGRAM = os.environ["GROUP_MUON"]
ROOT = pathlib.Path(__file__).parents[2]
TINY = {
    "layers": 2,
    "heads": 4,
    "width": 32,
    "context": 16,
    "batch": 8,
    "steps": 12,
    "warmdown": 4,
    "validation-interval": 4,
    "validation-tokens": 512,
    "checkpoint-interval": 4,
    "qk-group": "2:random",
    "muon-lr": 1e-3,
    "threads": 1,
}


def write_shard(path, tokens):
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + numpy.asarray(tokens, dtype=numpy.uint16).tobytes())


def random_walk(count, vocabulary=64, seed=0):
    steps = numpy.random.default_rng(seed).integers(0, 3, count)
    return numpy.cumsum(steps) % vocabulary


def arguments(data, out, **options):
    options = {"data": data, "out": out, "vocabulary": 64, **TINY, **options}
    return [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def program(*words, check=True, **options):
    done = subprocess.run(
        [PROGRAM, *map(str, words)], capture_output=True, text=True, errors="replace", check=False,
        **options,
    )  # fmt: skip
    if check:
        assert done.returncode == 0, done.stderr
    return done


def train(data, out, check=True, **options):
    return program("train", *arguments(data, out, **options), check=check)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values(run, name):
    return [line[name] for line in metrics(run) if name in line]


def curve(run):
    """The run's metrics without times."""
    clock = ("seconds", "tokens_per_second", "optimizer_seconds")
    return [{k: v for k, v in line.items() if k not in clock} for line in metrics(run)]


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def last_weights(run):
    newest = run / "checkpoints" / checkpoints(run)[-1]
    return [(newest / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def as_of_an_older_version(run):
    """Removes what older versions did not write: checksums of the config and of state.json."""
    config = run / "config.toml"
    first, rest = config.read_text().split("\n", 1)
    assert first.startswith("# A run of group-muon, format 4, checksum ")
    config.write_text(rest)
    for path in run.glob("checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        assert state.pop("config") and state.pop("crc32c")
        path.write_text(json.dumps({**state, "version": 1}))
