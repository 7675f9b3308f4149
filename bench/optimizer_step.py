"""Times the optimizer's step against other implementations of Muon, and measures its accuracy. All
contenders take turns in one run. The best of the repeats counts, as a ratio. Tables:

    step      GPT-2 Small's block matrices: torch.optim.Muon, its peers, Group Muon
    heads     QKV matrices alone, head by head: Python code against Group Muon
    blocks    one QKV matrix of many sizes: Python code against Group Muon
    accuracy  error of the orthogonalization against fp64
    bytes     memory traffic of a step without its iteration
"""

import argparse
import pathlib
import re
from collections.abc import Iterator

import torch
from contenders import (
    Cut,
    Matrices,
    available_modes,
    head_wise,
    newton_schulz,
    newton_schulz_loop,
    ours,
    packed,
    peers,
    python_muon,
    qk_random,
    three_way,
    torch_muon,
)
from measure import (
    Contender,
    arguments_of,
    copy_bandwidth,
    gemm_peak,
    load,
    machine,
    pin,
    print_table,
    rounds,
    write_json,
)
from torch import Tensor

import group_muon

HEADS, HEAD_DIM = 12, 64  # GPT-2 Small's
WIDTH = HEADS * HEAD_DIM


def measured(contenders: list[Contender], arguments: argparse.Namespace) -> float:
    """Lets the contenders take turns. Returns the GEMM peak, measured between rounds."""
    dtype = group_muon.orthogonalize(torch.eye(2)).dtype  # what "auto" selects here
    peak = max(gemm_peak(dtype) for _ in rounds(contenders, arguments.repeats))
    print(f"GEMM peak in this run, {dtype}: {peak / 1e9:.0f} GF/s\n")
    return peak


def step_table(arguments: argparse.Namespace) -> dict[str, object]:
    """The block matrices of GPT-2 Small: QKV, output projection, MLP."""
    shapes = [(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)]
    matrices = Matrices(arguments.layers, shapes)
    cuts = [cut(HEADS, HEAD_DIM) for cut in (packed, three_way, head_wise)]
    cuts += [qk_random(HEADS, HEAD_DIM, g) for g in (6, 1, 2, 3, 4)]
    others = [*peers(matrices, cuts[0], arguments.only), *ours(matrices, cuts, available_modes())]
    contenders = []
    for baseline in (torch_muon(matrices, cut) for cut in cuts):
        # Adjacent, so that both sides of a ratio are timed within seconds.
        compared = [c for c in others if c.baseline == baseline.name]
        compared = [c for c in compared if re.search(arguments.only, c.name)]
        if compared or re.search(arguments.only, baseline.name):
            contenders += [baseline, *compared]

    print(f"A step on {len(matrices.weights)} block matrices of GPT-2 Small.")
    peak = measured(contenders, arguments)
    best = {c.name: c.best for c in contenders}
    rows, facts = [], []
    for c in contenders:
        # The other modes do different arithmetic, so the standard FLOPs do not apply to them.
        fraction = c.flops / c.best / peak if c.mode in ("", "plain") else None
        speedup = best[c.baseline] / c.best
        facts.append(
            dict(name=c.name, seconds=c.best, baseline=c.baseline, speedup=speedup,
                 flops=c.flops, fraction_of_peak=fraction)
        )  # fmt: skip
        rows.append(
            [c.name, c.baseline, f"{c.best * 1e3:.0f}", f"{speedup:.2f}", f"{c.flops / 1e9:.0f}",
             f"{100 * fraction:.0f}%" if fraction else "–"]
        )  # fmt: skip
    columns = ["optimizer step", "baseline", "ms", "times faster", "GFLOP", "of GEMM peak"]
    print_table(columns, rows, texts=2)
    return dict(peak=peak, rows=facts)


def heads_table(arguments: argparse.Namespace) -> dict[str, object]:
    """QKV matrices alone, with every head as a block."""
    matrices = Matrices(arguments.layers, [(3 * WIDTH, WIDTH)])
    cut = head_wise(HEADS, HEAD_DIM)
    contenders = [
        python_muon("Python, a loop over heads", matrices, cut, newton_schulz_loop),
        python_muon("Python, heads as a batch", matrices, cut, newton_schulz),
        *ours(matrices, [cut], available_modes()),
    ]
    print(f"A step on {arguments.layers} QKV matrices of {3 * WIDTH}×{WIDTH}, head-wise.")
    peak = measured(contenders, arguments)
    loop, batch = contenders[0].best, contenders[1].best
    facts = [
        dict(name=c.name, seconds=c.best, to_loop=loop / c.best, to_batch=batch / c.best,
             flops=c.flops)
        for c in contenders
    ]  # fmt: skip
    print_table(
        ["optimizer step", "ms", "times faster than the loop", "than the batch", "GFLOP"],
        [
            [
                f["name"],
                f"{f['seconds'] * 1e3:.1f}",
                f"{f['to_loop']:.2f}",
                f"{f['to_batch']:.2f}",
                f"{f['flops'] / 1e9:.0f}",
            ]
            for f in facts
        ],
    )
    return dict(peak=peak, rows=facts)


def block_cell(cut: Cut, width: int, repeats: int, budget: float) -> dict[str, float]:
    """Seconds of one step on one QKV matrix."""
    matrices = Matrices(1, [(3 * width, width)])
    fast = {name: mode for name, mode in available_modes().items() if name == "fast"}
    contenders = [
        python_muon("batch", matrices, cut, newton_schulz),
        python_muon("loop", matrices, cut, newton_schulz_loop),
        *ours(matrices, [cut], fast),
    ]
    for _ in rounds(contenders, repeats, budget):
        pass
    batch, loop, mine = (c.best for c in contenders)
    return dict(batch=batch, loop=loop, fast=mine)


def blocks_table(arguments: argparse.Namespace) -> dict[str, object]:
    """One QKV matrix by width, head size, grouping and threads. Small ones are repeated more often.
    The whole table takes minutes."""
    widths, sizes = (256, 512, 1024, 2048), (16, 32, 64, 128)
    print(
        "A step on one QKV matrix of 3·width × width. How many times faster Group Muon (fast) is than "
        "Python code with the blocks as a batch / in a loop.\n"
    )
    kinds = [("packed", sizes[-1:]), ("head-wise", sizes), ("QK, half the heads, random", sizes)]
    facts, rows = [], []
    for threads in sorted({1, arguments.threads}):
        torch.set_num_threads(threads)
        for kind, head_dims in kinds:
            for head_dim in head_dims:
                row = [str(threads), kind, "any" if kind == "packed" else str(head_dim)]
                for width in widths:
                    heads = width // head_dim
                    cut = {
                        "packed": packed(heads, head_dim),
                        "head-wise": head_wise(heads, head_dim),
                    }.get(kind) or qk_random(heads, head_dim, heads // 2)
                    cell = block_cell(cut, width, arguments.repeats, arguments.budget)
                    key = dict(threads=threads, cut=kind, head_dim=head_dim, width=width)
                    facts.append(key | cell)
                    speedups = cell["batch"] / cell["fast"], cell["loop"] / cell["fast"]
                    row.append("{:.2f} / {:.2f}".format(*speedups))
                rows.append(row)
    print_table(["threads", "blocks", "head size", *(f"width {w}" for w in widths)], rows, texts=2)
    return dict(rows=facts)


def with_condition(count: int, rows: int, cols: int, condition: float) -> Tensor:
    """Random singular vectors, and singular values from 1 to 1 / condition, evenly spaced on a
    logarithmic scale: [count, rows, cols]."""
    short = min(rows, cols)
    u = torch.linalg.qr(torch.randn(count, rows, short, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(count, cols, short, dtype=torch.float64)).Q
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), short).double()
    return (u * values @ v.mT).float()


def with_direction(count: int, rows: int, cols: int, share: float) -> Tensor:
    """Gaussian plus one direction that has this share of the norm, as in momentum:
    [count, rows, cols]."""
    noise = torch.randn(count, rows, cols)
    line = torch.randn(count, rows, 1) * torch.randn(count, 1, cols)
    unit = [x / x.norm(dim=(-2, -1), keepdim=True) for x in (noise, line)]
    return unit[0] * (1 - share**2) ** 0.5 + unit[1] * share


def synthetic_blocks() -> Iterator[tuple[str, Tensor]]:
    for rows, cols in [(64, 768), (384, 768), (384, 1536), (768, 768), (768, 3072)]:
        yield "Gaussian", torch.randn(2, rows, cols)
        yield "condition 1e3", with_condition(2, rows, cols, 1e3)
        yield "condition 1e6", with_condition(2, rows, cols, 1e6)
        yield "one direction with most of the norm", with_direction(8, rows, cols, 0.95)


def momentum_blocks(checkpoint: pathlib.Path, heads: int) -> Iterator[tuple[str, Tensor]]:
    """Momentum buffers of a run, stacked over layers. QKV whole, in three, in half the heads, by head."""
    from safetensors.torch import load_file

    file = checkpoint / "optimizer.safetensors" if checkpoint.is_dir() else checkpoint
    kinds: dict[str, list[Tensor]] = {}
    for name, tensor in load_file(file).items():
        if match := re.fullmatch(r"muon\.momentum\.transformer\.h\.\d+\.(.*)\.weight", name):
            kinds.setdefault(match[1], []).append(tensor)
    if not kinds:
        raise SystemExit(f"'{file}' has no momentum of Group Muon")
    for kind, tensors in kinds.items():
        stack = torch.stack(tensors)  # [layers, rows, cols]
        yield f"momentum, {kind}", stack
        if kind == "attn.c_attn":
            rows, cols = stack.shape[1:]
            for name, block in [("Q, K, V", rows // 3), ("half the heads of Q, K, V", rows // 6),
                                ("heads", rows // 3 // heads)]:  # fmt: skip
                yield f"momentum, {kind}, {name}", stack.reshape(-1, block, cols)


def accuracy_table(arguments: argparse.Namespace) -> dict[str, object]:
    """Against the same polynomial (quintic, five steps) in fp64."""
    modes = available_modes()
    samples = list(synthetic_blocks())
    if arguments.checkpoint:
        samples += momentum_blocks(arguments.checkpoint, arguments.heads)
    print(
        "Relative Frobenius error of orthogonalized blocks against the same polynomial in fp64: "
        "median / largest over the blocks.\nThe first column rounds only the input to bf16.\n"
    )
    facts, rows = [], []
    for kind, blocks in samples:
        exact = newton_schulz(blocks, torch.float64)
        norm = exact.norm(dim=(-2, -1))
        results = {"bf16 input alone": newton_schulz(blocks.bfloat16(), torch.float64)}
        results |= {
            mode: group_muon.orthogonalize(blocks, **options) for mode, options in modes.items()
        }
        errors = {
            name: (result.double() - exact).norm(dim=(-2, -1)) / norm  # [blocks]
            for name, result in results.items()
        }
        shape = "×".join(map(str, blocks.shape[1:]))
        listed = {name: error.tolist() for name, error in errors.items()}
        facts.append(dict(kind=kind, shape=shape, blocks=len(blocks), errors=listed))
        cells = [f"{error.median():.1e} / {error.max():.1e}" for error in errors.values()]
        rows.append([kind, shape, str(len(blocks)), *cells])
    print_table(["blocks", "shape", "number", *errors], rows, texts=2)
    return dict(rows=facts)


def without_iteration(matrices: Matrices, layout: str, mode: str) -> list[Contender]:
    """A step with 0 iterations if the library allows it. Otherwise 1 and 2 iterations, to extrapolate
    to 0: each costs the same, in the Gram modes with a restart after each."""
    params, before = matrices.parameters()

    def contender(steps: int) -> Contender:
        options = dict(available_modes()[mode], steps=steps)
        if mode != "plain":
            options["restarts"] = range(1, steps)
        optimizer = group_muon.GroupMuon(params, layout=layout, **options)
        return Contender(f"{mode}, {steps} steps", optimizer.step, before=before)

    try:
        return [contender(0)]
    except ValueError:
        return [contender(1), contender(2)]


def bytes_table(arguments: argparse.Namespace) -> dict[str, object]:
    """Momentum, gathering, normalizing and applying, in bytes that a copy moves in the same time."""
    minimum = 20
    rows, cols, head_dim = 8192, 4096, 16  # 134 MB each of weight, gradient and momentum
    matrices = Matrices(1, [(rows, cols)])
    params, before = matrices.parameters()
    optimizer = torch.optim.Muon(params, lr=1e-3, weight_decay=0.0, ns_steps=0)
    lists = {"torch.optim.Muon": [Contender("torch.optim.Muon", optimizer.step, before=before)]}
    for grouping in ("2", "2:random"):
        layout = group_muon.separate(rows // head_dim, head_dim, grouping)
        for mode in available_modes():
            order = "random" if "random" in grouping else "adjacent"
            name = f"Group Muon, {order} heads, {mode}"
            lists[name] = without_iteration(matrices, layout, mode)

    everyone = [c for contenders in lists.values() for c in contenders]
    bandwidth = max(copy_bandwidth() for _ in rounds(everyone, arguments.repeats))
    print(
        f"A step without its iteration on a {rows}×{cols} matrix, blocks of {2 * head_dim}×{cols}."
    )
    print(f"A copy moves {bandwidth / 1e9:.1f} GB/s in this run.\n")
    table, facts = [], []
    table.append(["minimum: gradient 4, momentum 8, weight 8; blocks stay in cache", "", "",
                  f"{minimum}", "1.00"])  # fmt: skip
    for name, contenders in lists.items():
        first, *second = (c.best for c in contenders)
        seconds = 2 * first - second[0] if second else first
        how = "extrapolated from 1 and 2 steps" if second else "0 steps"
        moved = seconds * bandwidth / (rows * cols)
        facts.append(dict(name=name, how=how, seconds=seconds, bytes=moved))
        table.append([name, how, f"{seconds * 1e3:.1f}", f"{moved:.1f}", f"{moved / minimum:.2f}"])
    print_table(
        ["elementwise work", "iteration", "ms", "bandwidth-equivalent bytes per parameter",
         "times the minimum"],
        table, texts=2,
    )  # fmt: skip
    return dict(bandwidth=bandwidth, minimum=minimum, rows=facts)


TABLES = dict(
    step=step_table, heads=heads_table, blocks=blocks_table, accuracy=accuracy_table,
    bytes=bytes_table,
)  # fmt: skip


def main() -> None:
    parser = arguments_of(__doc__)
    parser.add_argument("table", nargs="?", choices=TABLES, default="step")
    parser.add_argument("--layers", type=int, default=12, help="number of GPT-2 Small's layers")
    parser.add_argument(
        "--only", default="", help="step: only rows that match, and their baselines"
    )
    parser.add_argument(
        "--budget", type=float, default=0.5, help="blocks: about this many seconds per cell"
    )
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        help="accuracy: also measure momentum from this checkpoint",
    )
    parser.add_argument(
        "--heads", type=int, default=HEADS, help="accuracy: heads of the checkpoint's model"
    )
    arguments = parser.parse_args()
    pin(arguments.threads)
    torch.manual_seed(0)

    facts = machine(arguments.threads)
    print("{cpu}, {cores} cores used, torch {torch}.".format(**facts))
    result = TABLES[arguments.table](arguments)
    if load.all:
        facts["others"] = load.share()
        warning = " That is too much: run it again on a quiet machine." * (load.share() > 0.05)
        print(f"\nOther processes used {100 * load.share():.0f}% of the machine.{warning}")
    write_json(arguments.json, facts | vars(arguments) | result)


main()
