"""Times the diagnostics of one QKV matrix, exact and estimated, and the optimizer's step on it for comparison.

./run bench diagnostics [--repeats 5] [--threads 2] [--json FILE]
"""

import torch
from measure import Contender, arguments_of, load, machine, pin, print_table, rounds, write_json

import group_muon
from group_muon import diagnostics

SHAPES = {"demo, 576×192": (12, 16), "GPT-2 Small, 2304×768": (12, 64)}
CUTS = {"packed": None, "three-way": "all", "g = 6": "6:random", "g = 1": "1"}


def contenders(heads: int, head_dim: int) -> list[Contender]:
    width = heads * head_dim
    momentum, gradient = torch.randn(2, 3 * width, width)
    weight = torch.nn.Parameter(torch.randn(3 * width, width))
    weight.grad = gradient
    three_way = group_muon.packed_qkv(heads, head_dim)
    optimizer = group_muon.GroupMuon([weight], layout=three_way)
    result = [Contender("step", optimizer.step)]
    for name, grouping in CUTS.items():
        layout = group_muon.plain()
        if grouping is not None:
            layout = group_muon.with_grouping(three_way, grouping)
        result += [
            Contender(
                f"{name}, {'exact' if exact else 'estimate'}",
                lambda layout=layout, exact=exact: diagnostics.measure(
                    momentum, gradient, layout, three_way, exact=exact
                ),
            )
            for exact in (True, False)
        ]
    return result


def main() -> None:
    arguments = arguments_of(__doc__).parse_args()
    pin(arguments.threads)
    torch.manual_seed(0)
    facts = machine(arguments.threads)
    print("{cpu}, {cores} cores used, torch {torch}.\n".format(**facts))
    rows, figures = [], []
    for shape, sizes in SHAPES.items():
        group = contenders(*sizes)
        for _ in rounds(group, arguments.repeats):
            pass
        best = {c.name: c.best for c in group}
        figures.append(dict(shape=shape, seconds=best))
        rows.append([shape, "the optimizer's step", f"{1e3 * best['step']:.1f}", "", ""])
        for name in CUTS:
            exact, estimate = best[f"{name}, exact"], best[f"{name}, estimate"]
            cells = [f"{1e3 * exact:.1f}", f"{1e3 * estimate:.1f}", f"{exact / estimate:.1f}"]
            rows.append([shape, f"measure, {name}", *cells])
    print_table(["matrix", "", "ms, exact", "estimate", "times faster"], rows, texts=2)
    print(f"\nOther processes used {100 * load.share():.0f}% of the machine in the meantime.")
    write_json(arguments.json, facts | dict(rows=figures))


main()
