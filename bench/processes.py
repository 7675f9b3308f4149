"""Steps of an optimizer that processes share, beside every process doing all of it, one process alone, and the numbers
that `group-muon plan` gives for each.

    ./run bench processes [--layers N] [--repeats N] [--processes 2 4] [--precision float32] [--json FILE]

Each process has one thread. They send over loopback by Gloo. All contenders take turns in one run; processes that have
no part in a step wait. The plan gets the speed of products, memory and network that as many processes reach at the
same time, measured in the same run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import Load, copy_bandwidth, gemm_peak, machine, note, print_table, timed, write_json

import group_muon

WIDTH, HEADS, VOCABULARY = 768, 12, 50257
PEAK_SIZE, COPY_MEGABYTES, SEND_ELEMENTS = 1024, 128, 1 << 23
# Way of the plan, and what it is called here.
SHARED = {"local": "shared, gradients local", "averaged": "all-reduce, then shared"}
REDUNDANT = "all-reduce, every process does all"


def weights_of(layers: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"wte": (VOCABULARY, WIDTH)}
    for i in range(layers):
        shapes[f"h.{i}.c_attn"] = (3 * WIDTH, WIDTH)
        shapes[f"h.{i}.c_proj"] = (WIDTH, WIDTH)
        shapes[f"h.{i}.mlp.c_fc"] = (4 * WIDTH, WIDTH)
        shapes[f"h.{i}.mlp.c_proj"] = (WIDTH, 4 * WIDTH)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.nn.Parameter(0.02 * torch.randn(shape))
        weights[name].grad = torch.randn(shape)
    return weights


def groups_of(weights: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    layout = group_muon.packed_qkv(HEADS, WIDTH // HEADS, q="6:random", k="6:random")
    own = list(weights.items())
    return [
        {"params": [one for one in own if one[0].endswith("c_attn")], "layout": layout},
        {"params": [one for one in own[1:] if not one[0].endswith("c_attn")]},
        {"params": own[:1], "algorithm": "adamw"},
    ]


def state_bytes(optimizer: group_muon.GroupMuon) -> int:
    states = optimizer.state
    values = [value for state in states.values() for value in state.values()]
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.numel() > 1)


class Contender:
    """One way to step the weights, on the first `processes` processes."""

    def __init__(
        self, name: str, way: str, processes: int, group: Any, threads: int, precision: str
    ) -> None:
        self.name, self.way, self.processes, self.group = name, way, processes, group
        self.threads, self.precision = threads, precision
        self.seconds: list[float] = []
        self.sent = 0.0

    def prepare(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        words: dict[str, Any] = {}
        if self.way in SHARED:
            words = {"process_group": self.group, "gradients": self.way}
        self.optimizer = group_muon.GroupMuon(groups_of(weights), precision=self.precision, **words)

    def _step(self) -> None:
        if self.way in ("averaged", "redundant"):
            # One call for each gradient, all on their way at once.
            grads = [weight.grad for weight in self.weights.values()]
            works = [dist.all_reduce(grad, group=self.group, async_op=True) for grad in grads]
            for work, grad in zip(works, grads, strict=True):
                work.wait()
                grad.div_(self.processes)
        self.optimizer.step()

    def time(self, count: bool) -> None:
        torch.set_num_threads(self.threads)
        before = self.optimizer.bytes_sent
        if self.processes > 1:
            dist.barrier(self.group)
        seconds = timed(self._step)
        torch.set_num_threads(1)
        if count:
            self.seconds.append(seconds)
            self.sent = self.optimizer.bytes_sent - before

    def result(self) -> dict[str, Any]:
        """The slowest process of each step, the best step; mean bytes; the largest state."""
        seconds = torch.tensor(self.seconds, dtype=torch.float64)
        state = torch.tensor(float(state_bytes(self.optimizer)), dtype=torch.float64)
        sent = torch.tensor(float(self.sent), dtype=torch.float64)
        if self.processes > 1:
            dist.all_reduce(seconds, dist.ReduceOp.MAX, self.group)
            dist.all_reduce(state, dist.ReduceOp.MAX, self.group)
            dist.all_reduce(sent, group=self.group)
        sent /= self.processes
        if self.way in ("averaged", "redundant"):
            elements = sum(weight.numel() for weight in self.weights.values())
            sent += 2 * (self.processes - 1) / self.processes * elements * 4
        return dict(
            name=self.name, way=self.way, processes=self.processes, seconds=seconds.min().item(),
            sent=sent.item(), state=state.item(),
        )  # fmt: skip


def speed(processes: int, group: Any, dtype: torch.dtype) -> dict[str, float]:
    """What a process reaches while the others of the group do the same: the least of any."""

    def together(measure: Callable[[], float]) -> float:
        if processes > 1:
            dist.barrier(group)
        value = torch.tensor(measure(), dtype=torch.float64)
        if processes > 1:
            dist.all_reduce(value, dist.ReduceOp.MIN, group)
        return value.item()

    def send() -> float:
        sent = torch.ones(SEND_ELEMENTS // processes * processes)
        received = torch.empty_like(sent)
        seconds = min(
            timed(lambda: dist.all_to_all_single(received, sent, group=group)) for _ in range(3)
        )
        return sent.nbytes * (processes - 1) / processes / seconds

    return dict(
        flops=together(lambda: gemm_peak(dtype, PEAK_SIZE)),
        memory=together(lambda: copy_bandwidth(COPY_MEGABYTES)),
        network=together(send) if processes > 1 else 1e9,
    )


def work(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = max(arguments.processes)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    groups = {n: dist.new_group(list(range(n))) for n in arguments.processes}
    precision = arguments.precision
    contenders = [
        Contender("1 process", "alone", 1, None, 1, precision),
        Contender("1 process, 2 threads", "alone", 1, None, 2, precision),
    ]
    for n in arguments.processes:
        ways = {**SHARED, "redundant": REDUNDANT}
        contenders += [
            Contender(f"{n} processes: {title}", way, n, groups[n], 1, precision)
            for way, title in ways.items()
        ]
    contenders = [one for one in contenders if rank < one.processes]
    weights = weights_of(arguments.layers)
    for contender in contenders:
        contender.prepare(weights)
    dist.barrier()
    dtype = getattr(torch, precision)
    speeds = {n: speed(n, groups.get(n), dtype) for n in (1, *arguments.processes) if rank < n}
    start = Load.now()
    for number in range(arguments.repeats + 1):  # the first round warms up
        for contender in contenders:
            contender.time(number > 0)
            if rank == 0:
                note(f"round {number} of {arguments.repeats}: {contender.name:<60.60}", end="\r")
        dist.barrier()
    busy, own, all_ = (end - begin for begin, end in zip(start, Load.now(), strict=True))
    used = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(used)
    results = [contender.result() for contender in contenders]
    if rank == 0:
        content = dict(results=results, speeds=speeds, others=max(0.0, (busy - used.item()) / all_))
        pathlib.Path(folder, "results.json").write_text(json.dumps(content))
    dist.destroy_process_group()


def planned(
    program: str, arguments: argparse.Namespace, n: int, speed: dict[str, float], way: str
) -> dict[str, float]:
    """The plan's numbers for a way of sharing."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "plan.json")
        words = [
            program, "plan", "--model", "gpt2-small", "--layers", arguments.layers, "--processes", n,
            "--qk-group", "6:random", "--precision", arguments.precision, "--json", path,
            "--flops", speed["flops"] / 1e12, "--memory-bandwidth", speed["memory"] / 1e9,
            "--bandwidth", speed["network"] / 1e9,
        ]  # fmt: skip
        subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
        plan = json.loads(path.read_text())
    rows = plan["optimizers"] if way == "alone" else plan["sharings"]
    (row,) = [one for one in rows if one["name"] in ("own", way)]
    shares = row["processes"]
    return dict(
        seconds=row["seconds"],
        sent=sum(share["sent"] for share in shares) / n + row["framework_sent"],
        state=max(share["state"] for share in shares),
    )


def megabytes(value: float) -> str:
    return f"{value / 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("program", help="path of group-muon")
    parser.add_argument("--layers", type=int, default=4, help="number of GPT-2 Small's layers")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if min(arguments.processes) < 2:
        raise SystemExit("--processes: give numbers of 2 or more; one process is always measured")

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, arguments), nprocs=max(arguments.processes))
        measured = json.loads(pathlib.Path(folder, "results.json").read_text())
    note(" " * 80, end="\r")
    note(f"measured in {time.perf_counter() - start:.0f} s")
    facts = machine(torch.get_num_threads())
    print("{cpu}, {cores} cores, torch {torch}.".format(**facts))
    print(
        f"A step on GPT-2 Small with {arguments.layers} layer(s) in {arguments.precision}, Q and K in "
        "random groups of 6. One thread a process, Gloo over loopback.\n"
    )
    results = measured["results"]
    alone = results[0]["seconds"]
    table, rows = [], []
    for result in results:
        n = result["processes"]
        speed_of = dict(measured["speeds"][str(n)])
        if "threads" in result["name"]:  # the plan knows no threads
            plan = {}
        else:
            plan = planned(arguments.program, arguments, n, speed_of, result["way"])
        rows.append(result | {"plan": plan, "speed": speed_of})
        ms = result["seconds"] * 1e3
        row = [result["name"], f"{ms:.1f}", f"{alone / result['seconds']:.2f}"]
        row += [megabytes(result["sent"]), megabytes(plan["sent"]) if plan else "–"]
        row += [megabytes(result["state"]), megabytes(plan["state"]) if plan else "–"]
        row += [f"{plan['seconds'] * 1e3:.1f}", f"{result['seconds'] / plan['seconds']:.2f}"] if plan else ["–", "–"]  # fmt: skip
        table.append(row)
    print_table(
        ["step", "ms", "times as fast as 1 process", "sent, MB", "plan", "state, MB", "plan",
         "plan, ms", "measured / plan"],
        table,
    )  # fmt: skip
    others = measured["others"]
    warning = " That is too much: run it again on a quiet machine." * (others > 0.05)
    print(f"\nOther processes used {100 * others:.0f}% of the machine.{warning}")
    for n, reached in measured["speeds"].items():
        network = f", {reached['network'] / 1e9:.2f} GB/s sent" if n != "1" else ""
        print(
            f"{n} at a time reach {reached['flops'] / 1e9:.0f} GF/s, {reached['memory'] / 1e9:.1f} GB/s of "
            f"memory{network} each."
        )
    write_json(arguments.json, facts | vars(arguments) | {"rows": rows, "others": others})


if __name__ == "__main__":
    sys.exit(main())
