"""Compares forward and backward of the GPT (no optimizer) with the same model in PyTorch, eager and
compiled, all with products of one precision. Contenders take turns, step by step. The best step of
each counts.

training_step.py PROGRAM [--models gpt2-small 6x384 4x192] [--precision bf16] [--engines auto]
                 [--attention sdpa plain] [--threads 2] [--two-processes] [--default-malloc]
                 [--repeats 10] [--warmup 3] [--patience 0] [--json FILE]

PROGRAM is the executable of training_step.cpp. It and PyTorch have the same weights and tokens; a
difference in losses or gradients beyond rounding is an error. PyTorch computes attention in two
ways: with scaled_dot_product_attention, and with plain products, which are faster for small heads.
Ratios are relative to the faster one. With --two-processes every contender is two single-threaded
processes that step at the same time.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

# OpenMP's threads spin for about 10 ms after a step before they sleep, and would take a core from
# the next contender. Children that wait for a command are blocked and use no core.
PAUSE = 0.1
# What the program sets with mallopt. Otherwise PyTorch's large tensors are fresh pages at every step.
KEEP_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483647"
GEMM_SIZE = 2048
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclasses.dataclass
class Shape:
    layers: int
    heads: int
    width: int
    vocabulary: int
    batch: int
    context: int

    def tokens(self) -> int:
        return self.batch * self.context

    def flops(self) -> float:
        """FLOPs of a step: gpt::training_flops_per_token for every token."""
        weights = self.width * (3 * self.width + self.width + 8 * self.width)
        attention = self.width * self.context  # QKᵀ and PV, half each
        forward = 2 * (self.layers * (weights + attention) + self.width * self.vocabulary)
        return 3 * forward * self.tokens()


MODELS = {
    "gpt2-small": Shape(12, 12, 768, 50257, batch=1, context=1024),
    "6x384": Shape(6, 6, 384, 8192, batch=8, context=256),
    "4x192": Shape(4, 12, 192, 4096, batch=32, context=128),
}


# The PyTorch model: the formulas of gpt::Model, in the calls that are fastest in PyTorch.


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain_attention(context: int, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    mask = torch.full((context, context), -math.inf, dtype=dtype).triu(1)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scale = 1 / math.sqrt(q.size(-1))
        return torch.add(mask, q @ k.transpose(-1, -2), alpha=scale).softmax(-1) @ v

    return attention


class Block(nn.Module):
    def __init__(self, shape: Shape, attention: Callable[..., torch.Tensor]):
        super().__init__()
        width = shape.width
        self.attention = attention
        self.heads, self.scale = shape.heads, 1 / math.sqrt(2 * shape.layers)
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.mlp_c_fc = nn.Linear(width, 4 * width, bias=False)
        self.mlp_c_proj = nn.Linear(4 * width, width, bias=False)

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        heads = self.c_attn(x).view(batch, tokens, 3 * self.heads, -1)
        qk, v = heads.split([2 * self.heads, self.heads], 2)
        left, right = qk.chunk(2, -1)  # Q and K are rotated together; cos and sin are fp32
        qk = torch.cat([left * cos + right * sin, right * cos - left * sin], -1).to(v.dtype)
        q, k = qk.transpose(1, 2).chunk(2, 1)
        y = self.attention(q, k, v.transpose(1, 2))
        return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(rms_norm(x), cos, sin) * self.scale
        return x + self.mlp_c_proj(F.gelu(self.mlp_c_fc(rms_norm(x))))


class Gpt(nn.Module):
    def __init__(self, shape: Shape, attention: Callable[..., torch.Tensor]):
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attention) for _ in range(shape.layers))
        size = shape.width // shape.heads
        frequencies = 10000 ** -(torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(shape.context).float(), frequencies)[:, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        # Same order, generator and distribution as gpt::Model, so the same weights bit for bit.
        generator = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            bound = 1 / math.sqrt(weight.size(1))
            nn.init.uniform_(weight, -bound, bound, generator)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = F.linear(rms_norm(x), self.wte.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# The child process, with the protocol of training_step.cpp.


def resident_bytes(key: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{key}:")[1].split()[0])


def serve(kind: str, attention: str, shape: Shape, dtype: torch.dtype) -> None:
    """Answers commands until the input ends."""
    attend = sdpa if attention == "sdpa" else plain_attention(shape.context, dtype)
    model = nn.Module() if kind == "gemm" else Gpt(shape, attend)
    forward = torch.compile(model, fullgraph=True) if kind == "compile" else model
    if kind == "compile":
        torch.compile(torch.sin)(torch.ones(1))  # so that the compiler's own memory is not counted
    square = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    size, generator = (shape.batch, shape.context + 1), torch.Generator().manual_seed(1)
    rows = torch.randint(shape.vocabulary, size, generator=generator)
    base = resident_bytes("VmRSS")

    def step() -> float:
        if kind == "gemm":
            return (square @ square)[0, 0].item()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = forward(rows[:, :-1], rows[:, 1:])
        loss.backward()
        return loss.item()

    for command in map(str.strip, sys.stdin):
        if command == "step":
            start = time.perf_counter()
            loss = step()
            answer = dict(seconds=time.perf_counter() - start, loss=loss)
        elif command == "norm":
            answer = dict(norm=math.hypot(*(p.grad.norm().item() for p in model.parameters())))
        else:
            answer = dict(base_bytes=base, peak_bytes=resident_bytes("VmHWM"))
        print(json.dumps(answer), flush=True)


def child() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", choices=["eager", "compile", "gemm"])
    parser.add_argument("--attention", choices=["sdpa", "plain"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--precision", choices=DTYPES)
    names = [field.name for field in dataclasses.fields(Shape)]
    for name in names:
        parser.add_argument(f"--{name}", type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = Shape(*(getattr(arguments, name) for name in names))
    serve(arguments.child, arguments.attention, shape, DTYPES[arguments.precision])


# The driver.


class Contender:
    """One or two child processes that step at the same time."""

    def __init__(self, name: str, command: list[str], processes: int, keep_memory: bool):
        self.name = name
        self.loss = self.norm = 0.0
        self.seconds: list[float] = []
        cache = os.path.join(tempfile.gettempdir(), "group_muon_bench")
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        if keep_memory:
            environment["GLIBC_TUNABLES"] = KEEP_MEMORY
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.children = [
            subprocess.Popen(command, env=environment, **pipes) for _ in range(processes)
        ]

    def ask(self, command: str) -> list[dict]:
        with contextlib.suppress(BrokenPipeError):  # detected below as a missing answer
            for process in self.children:
                print(command, file=process.stdin, flush=True)
        answers = [process.stdout.readline() for process in self.children]
        if not all(answers):
            sys.exit(f"{self.name} ended before it answered '{command}'")
        return [json.loads(answer) for answer in answers]

    def step(self) -> float:
        start = time.perf_counter()
        answers = self.ask("step")
        wall = time.perf_counter() - start
        self.loss = answers[0]["loss"]
        return wall if len(answers) > 1 else answers[0]["seconds"]

    def memory(self) -> int:
        """Peak memory of all processes, in bytes beyond the model alone."""
        return sum(answer["peak_bytes"] - answer["base_bytes"] for answer in self.ask("memory"))

    def end(self) -> None:
        for process in self.children:
            process.stdin.close()
            process.wait()


def busy_seconds() -> float:
    """Busy seconds of all cores since boot, by any process."""
    ticks = pathlib.Path("/proc/stat").read_text().split()[1:4]  # user, nice, system
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def check_agreement(contenders: list[Contender]) -> None:
    first = contenders[0]
    for other in contenders[1:]:
        if not (
            math.isclose(first.loss, other.loss, rel_tol=1e-3)
            and math.isclose(first.norm, other.norm, rel_tol=1e-2)
        ):
            sys.exit(
                f"{other.name}: loss {other.loss:.4f}, norm of gradients {other.norm:.4f}, "
                f"but {first.name}: {first.loss:.4f}, {first.norm:.4f}"
            )


def commands(shape: Shape, threads: int, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Command lines of all contenders, by name. The large product comes last."""
    flags = [f"--{name}={value}" for name, value in dataclasses.asdict(shape).items()]
    flags += [f"--threads={threads}", f"--precision={arguments.precision}"]
    result = {
        f"Group Muon, {engine}": [arguments.program, *flags, f"--engine={engine}"]
        for engine in arguments.engines
    }
    own = [sys.executable, __file__, *flags, "--child"]
    for kind in "eager", "compile":
        for attention in arguments.attention:
            result[f"PyTorch {kind}, {attention}"] = [*own, kind, f"--attention={attention}"]
    return result | {"gemm": [*own, "gemm"]}


def pause(deadline: float) -> float:
    """Waits for idle threads, and until the deadline also for other programs. Returns busy cores."""
    while True:
        time.sleep(PAUSE)
        before = busy_seconds()
        time.sleep(PAUSE)
        cores = (busy_seconds() - before) / PAUSE
        if cores < 0.2 or time.monotonic() >= deadline:
            return cores


def take_turns(contenders: list[Contender], arguments: argparse.Namespace) -> float:
    """Times all contenders in turns. Returns how many cores other programs kept busy in between."""
    busy = []
    deadline = time.monotonic() + arguments.patience
    for repeat in range(-arguments.warmup, arguments.repeats):
        for contender in contenders:
            cores = pause(deadline)
            seconds = contender.step()
            if repeat >= 0:
                busy.append(cores)
                contender.seconds.append(seconds)
        if sys.stderr.isatty():
            print(f"step {repeat + 1} of {arguments.repeats} ", end="\r", file=sys.stderr)
    return statistics.mean(busy)


def measure(model: str, arguments: argparse.Namespace) -> dict:
    shape = MODELS[model]
    processes, threads = (2, 1) if arguments.two_processes else (1, arguments.threads)
    contenders = [
        Contender(name, command, processes, keep_memory=not arguments.default_malloc)
        for name, command in commands(shape, threads, arguments).items()
    ]
    busy = take_turns(contenders, arguments)
    *models, gemm = contenders
    for contender in models:
        contender.norm = contender.ask("norm")[0]["norm"]
    check_agreement(models)
    best = {contender.name: min(contender.seconds) for contender in models}
    eager = min(seconds for name, seconds in best.items() if "eager" in name)
    compiled = min(seconds for name, seconds in best.items() if "compile" in name)
    peak = processes * 2 * GEMM_SIZE**3 / min(gemm.seconds)
    rows = []
    for contender in models:
        seconds = best[contender.name]
        speed = processes * shape.flops() / seconds
        rows.append(
            dict(
                name=contender.name,
                tokens_per_second=processes * shape.tokens() / seconds,
                flops_per_second=speed,
                fraction_of_peak=speed / peak,
                times_eager=eager / seconds,
                times_compiled=compiled / seconds,
                bytes_above_base=contender.memory(),
                loss=contender.loss,
                gradient_norm=contender.norm,
                seconds=contender.seconds,
            )
        )
    for contender in contenders:
        contender.end()
    return dict(model=model, shape=dataclasses.asdict(shape), gemm_peak=peak, busy=busy, rows=rows)


def show(result: dict) -> None:
    for row in result["rows"]:
        print(
            f"| {result['model']} | {row['name']} | {row['tokens_per_second']:.0f} "
            f"| {row['flops_per_second'] / 1e9:.0f} | {100 * row['fraction_of_peak']:.0f}% "
            f"| {row['times_eager']:.2f} | {row['times_compiled']:.2f} "
            f"| {row['bytes_above_base'] / 1e6:.0f} |",
            flush=True,
        )


def machine() -> str:
    names = re.findall(r"^model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    name = names[0] if names else "unknown processor"
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("program", help="executable of training_step.cpp")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="precision of products")
    parser.add_argument("--engines", nargs="+", default=["auto"], help="Group Muon's engines")
    ways = ["sdpa", "plain"]
    parser.add_argument(
        "--attention", nargs="+", choices=ways, default=ways, help="PyTorch's attention"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--two-processes", action="store_true", help="two processes, one thread each"
    )
    parser.add_argument(
        "--default-malloc", action="store_true", help="let PyTorch return freed memory"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument(
        "--patience",
        type=float,
        default=0,
        help="maximum seconds per model to wait for other programs",
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    way = "two processes of 1 thread" if arguments.two_processes else f"{arguments.threads} threads"
    print(
        f"Forward and backward, {arguments.precision} products, {way}, best of {arguments.repeats}; {machine()}\n"
    )
    print("| model | | tokens/s | GF/s | of GEMM peak | × eager | × compiled | MB above base |")
    print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    results = []
    for model in arguments.models:
        results.append(measure(model, arguments))
        show(results[-1])
    print()
    for result in results:
        print(
            f"{result['model']}: GEMM peak {result['gemm_peak'] / 1e9:.0f} GF/s; "
            f"other programs kept {result['busy']:.2f} cores busy"
        )
    if arguments.json:
        facts = dict(machine=machine(), **vars(arguments), results=results)
        arguments.json.write_text(json.dumps(facts, indent=1, default=str))


if __name__ == "__main__":
    child() if "--child" in sys.argv else main()
