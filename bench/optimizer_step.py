"""Times one optimizer step on GPT-2 Small's block matrices: Group Muon beside torch.optim.Muon and a
Python loop over heads. All take turns in one run; the best of the repeats counts, as a ratio.

    ./run bench [--layers 12] [--repeats 5] [--threads 2] [--json FILE]
"""

import argparse
import json
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

import group_muon

WIDTH, HEADS, HEAD_DIM = 768, 12, 64
BASELINE = "torch.optim.Muon, packed"


@dataclass
class Contender:
    name: str
    step: Callable[[], None]
    flops: float  # of the standard iteration on its blocks
    seconds: list[float] = field(default_factory=list)


def flops(blocks: int, rows: int, cols: int, steps: int = 5) -> float:
    """Multiply-adds of the standard Newton–Schulz iteration, twice each."""
    short, long = sorted((rows, cols))
    return blocks * steps * (4 * short * short * long + 2 * short**3)


def matrices(layers: int, qkv_rows: list[int]) -> list[nn.Parameter]:
    """The blocks' weights, QKV cut into parts of these rows, with gradients."""
    shapes = [(rows, WIDTH) for rows in qkv_rows] + [
        (WIDTH, WIDTH),
        (4 * WIDTH, WIDTH),
        (WIDTH, 4 * WIDTH),
    ]
    params = [nn.Parameter(torch.randn(shape) * 0.02) for _ in range(layers) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def shared_flops(layers: int) -> float:
    """Output projection and MLP, which all contenders treat alike."""
    return layers * (flops(1, WIDTH, WIDTH) + flops(2, WIDTH, 4 * WIDTH))


def torch_muon(layers: int, name: str, qkv_rows: list[int]) -> Contender:
    optimizer = torch.optim.Muon(matrices(layers, qkv_rows), lr=1e-3, weight_decay=0.0)
    qkv = layers * sum(flops(1, rows, WIDTH) for rows in qkv_rows)
    return Contender(name, optimizer.step, qkv + shared_flops(layers))


def python_loop(layers: int) -> Contender:
    """Head-wise Muon as one would write it: momentum a matrix, Newton–Schulz head by head."""
    params = matrices(layers, [3 * WIDTH])
    buffers = [torch.zeros_like(p) for p in params]

    def newton_schulz(g: torch.Tensor) -> torch.Tensor:
        x = g.bfloat16()
        x = x.T if g.size(0) > g.size(1) else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            a = x @ x.T
            b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.addmm(x, b, x, beta=3.4445)
        return x.T if g.size(0) > g.size(1) else x

    @torch.no_grad()
    def step() -> None:
        for p, buffer in zip(params, buffers):
            buffer.lerp_(p.grad, 0.05)
            update = p.grad.lerp(buffer, 0.95)
            parts = update.split(HEAD_DIM) if p.size(0) == 3 * WIDTH else [update]
            p.add_(torch.cat([newton_schulz(part) for part in parts]), alpha=-1e-3)

    return Contender(
        "Python loop over heads",
        step,
        layers * flops(3 * HEADS, HEAD_DIM, WIDTH) + shared_flops(layers),
    )


def ours(layers: int, name: str, layout: str, blocks: list[tuple[int, int]]) -> Contender:
    """blocks: (number, rows) of the parts into which QKV is cut."""
    params = matrices(layers, [3 * WIDTH])
    optimizer = group_muon.GroupMuon([{"params": params[0::4], "layout": layout}] + [
        {"params": [p for i, p in enumerate(params) if i % 4]}
    ])  # fmt: skip
    qkv = layers * sum(flops(count, rows, WIDTH) for count, rows in blocks)
    return Contender(name, optimizer.step, qkv + shared_flops(layers))


def contenders(layers: int) -> list[Contender]:
    def packed(**groupings: str) -> str:
        return group_muon.packed_qkv(HEADS, HEAD_DIM, **groupings)

    rows = [WIDTH] * 3
    result = [
        torch_muon(layers, BASELINE, [3 * WIDTH]),
        torch_muon(layers, "torch.optim.Muon, three-way", rows),
        python_loop(layers),
        ours(layers, "Group Muon, packed", group_muon.plain(), [(1, 3 * WIDTH)]),
        ours(layers, "Group Muon, three-way", packed(), [(3, WIDTH)]),
        ours(layers, "Group Muon, head-wise", packed(q="1", k="1", v="1"), [(3 * HEADS, HEAD_DIM)]),
    ]
    for g in (1, 2, 3, 4, 6):
        layout = packed(q=f"{g}:random", k=f"{g}:random")
        blocks = [(2 * HEADS // g, g * HEAD_DIM), (1, WIDTH)]
        result.append(ours(layers, f"Group Muon, QK g = {g} random", layout, blocks))
    return result


def timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def gemm_peak(size: int = 2048) -> float:
    """bf16 flops a second of a square product."""
    a = torch.randn(size, size).bfloat16()
    return 2 * size**3 / min(timed(lambda: a @ a) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="of GPT-2 Small's twelve")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)

    runners = contenders(arguments.layers)
    for runner in runners:
        runner.step()  # warm-up
    peak = 0.0
    for repeat in range(arguments.repeats):
        peak = max(peak, gemm_peak())
        for runner in runners:
            runner.seconds.append(timed(runner.step))
        print(f"repeat {repeat + 1} of {arguments.repeats}", end="\r", file=sys.stderr, flush=True)

    baseline = min(runners[0].seconds)
    print(
        f"GPT-2 Small, {4 * arguments.layers} block matrices, {arguments.threads} threads, torch {torch.__version__}"
    )
    print(f"bf16 GEMM peak in this run: {peak / 1e9:.0f} GF/s\n")
    print(
        "| optimizer step | ms | times faster than torch.optim.Muon, packed | GFLOP | of GEMM peak |"
    )
    print("|---|---:|---:|---:|---:|")
    rows = []
    for runner in runners:
        best = min(runner.seconds)
        rows.append(
            dict(name=runner.name, seconds=best, speedup=baseline / best, flops=runner.flops,
                 fraction_of_peak=runner.flops / best / peak)
        )  # fmt: skip
        print(
            f"| {runner.name} | {best * 1e3:.0f} | {baseline / best:.2f} | {runner.flops / 1e9:.0f} "
            f"| {100 * rows[-1]['fraction_of_peak']:.0f}% |"
        )
    if arguments.json:
        facts = dict(
            machine=platform.processor() or platform.machine(), torch=torch.__version__, peak=peak
        )
        arguments.json.write_text(
            json.dumps(facts | vars(arguments) | {"rows": rows}, indent=1, default=str)
        )


main()
