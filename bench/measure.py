"""Shared by the benchmark tables: contenders that take turns, the machine's limits, printing."""

import argparse
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch


def nothing() -> None:
    pass


@dataclass
class Contender:
    name: str
    step: Callable[[], object]
    flops: float = 0.0  # FLOPs of the standard iteration on its blocks
    baseline: str = ""  # name of the contender to compare it with
    mode: str = ""  # Group Muon's mode
    before: Callable[[], None] = nothing  # untimed preparation: gradients as from a backward pass
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return min(self.seconds)


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@dataclass
class Load:
    """How much of the machine other processes used while contenders were timed. Threads that wait
    for each other slow down out of proportion, so ratios from a busy machine mean little."""

    others: float = 0.0  # core seconds
    all: float = 0.0

    @staticmethod
    def now() -> tuple[float, float, float]:
        """Core seconds: all busy ones, those of this process, and the total."""
        ticks = [int(word) for word in pathlib.Path("/proc/stat").read_text().split()[1:9]]
        user, nice, system, idle, iowait, *rest = (t / os.sysconf("SC_CLK_TCK") for t in ticks)
        busy = user + nice + system + sum(rest)
        return busy, time.process_time(), busy + idle + iowait

    def add(self, start: tuple[float, float, float]) -> None:
        busy, own, everything = (end - begin for begin, end in zip(start, self.now()))
        self.others += busy - own
        self.all += everything

    def share(self) -> float:
        return max(0.0, self.others / self.all) if self.all else 0.0


load = Load()


def rounds(contenders: list[Contender], repeats: int, budget: float = math.inf) -> Iterator[int]:
    """Lets all contenders take turns, so that changes of the machine's speed affect all of them. The
    first round warms up and does not count. No round starts after the budget of seconds is used up,
    but one always counts."""
    start = time.perf_counter()
    for number in range(repeats + 1):
        for contender in contenders:
            contender.before()
            elapsed = timed(contender.step)
            if number > 0:
                contender.seconds.append(elapsed)
            note(f"round {number} of {repeats}: {contender.name:<60.60}", end="\r")
        if number == 0:
            begun = Load.now()
        yield number
        if number > 0 and time.perf_counter() - start > budget:
            break
    load.add(begun)
    note(" " * 80, end="\r")


def gemm_peak(dtype: torch.dtype, size: int = 2048) -> float:
    """FLOP/s of a square product."""
    a = torch.randn(size, size).to(dtype)
    return 2 * size**3 / min(timed(lambda: a @ a) for _ in range(5))


def copy_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second, read and written, of a copy that fits in no cache."""
    source = torch.ones(megabytes * 2**18)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / min(timed(lambda: target.copy_(source)) for _ in range(5))


def pin(threads: int) -> None:
    """Restricts this process to as many cores as it has threads. XLA sizes its thread pools by the
    allowed cores, so this also limits JAX."""
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise SystemExit(f"--threads {threads} is more than the {len(allowed)} available cores")
    os.sched_setaffinity(0, allowed[:threads])
    torch.set_num_threads(threads)


def machine(threads: int) -> dict[str, object]:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return dict(cpu=models[0] if models else "unknown", cores=threads, torch=torch.__version__)


def arguments_of(doc: str | None) -> argparse.ArgumentParser:
    """The arguments that all tables have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    return parser


def note(text: str, end: str = "\n") -> None:
    """Prints to standard error, so that standard output is pure Markdown."""
    if end == "\n" or sys.stderr.isatty():
        print(text, end=end, file=sys.stderr, flush=True)


def print_table(columns: list[str], rows: list[list[str]], texts: int = 1) -> None:
    """Prints a Markdown table. The first `texts` columns are text, the rest numbers."""
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * texts + "---:|" * (len(columns) - texts))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def write_json(path: pathlib.Path | None, content: dict[str, object]) -> None:
    if path:
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
