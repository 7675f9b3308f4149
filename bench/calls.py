"""Counts the operator calls of an optimizer's step on GPT shapes, as a GPU would see them. No GPU is needed.

calls.py [--layers 12 48]
"""

import argparse
import importlib.util
import io

import torch
from pretend import Calls, weight

import group_muon

WIDTH, HEADS, VOCABULARY, CONTEXT = 768, 12, 50257, 1024  # GPT-2 Small


def matrices(layers: int, device: str = "meta") -> dict[str, list[torch.Tensor]]:
    shapes = {
        "qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "fc": (4 * WIDTH, WIDTH), "proj": (WIDTH, 4 * WIDTH),
    }  # fmt: skip
    return {name: [weight(*s, device=device) for _ in range(layers)] for name, s in shapes.items()}


def vectors(layers: int, device: str = "meta") -> list[torch.Tensor]:
    """Embeddings, gains and biases."""
    tables = [weight(VOCABULARY, WIDTH, device=device), weight(CONTEXT, WIDTH, device=device)]
    return tables + [weight(WIDTH, device=device) for _ in range(8 * layers + 2)]


def group_muon_step(layers, layout, adamw=False, **options):
    weights = matrices(layers)
    qkv = weights.pop("qkv")
    others = [w for some in weights.values() for w in some]
    groups = [{"params": qkv, "layout": layout}, {"params": others}]
    if adamw:
        groups.append({"params": vectors(layers), "algorithm": "adamw"})
    options = {"engine": "portable", "precision": "bfloat16", **options}
    return group_muon.GroupMuon(groups, **options)


def torch_step(layers, *_):
    return torch.optim.Muon([w for some in matrices(layers).values() for w in some])


def dion_step(layers):
    from dion import Muon

    with Calls("meta"):  # it puts its options on the device
        return Muon([w for some in matrices(layers).values() for w in some])


def packed(**groupings):
    return group_muon.packed_qkv(HEADS, WIDTH // HEADS, **groupings)


CONTENDERS = {
    "torch.optim.Muon, packed": torch_step,
    **({"dion's Muon, packed": dion_step} if importlib.util.find_spec("dion") else {}),
    "GroupMuon, packed": lambda n: group_muon_step(n, "rows"),
    "GroupMuon, three-way": lambda n: group_muon_step(n, packed()),
    "GroupMuon, QK g = 6 adjacent": lambda n: group_muon_step(n, packed(q=6, k=6)),
    "GroupMuon, QK g = 6 random": lambda n: group_muon_step(n, packed(q="6:random", k="6:random")),
    "GroupMuon, head-wise": lambda n: group_muon_step(n, packed(q=1, k=1, v=1)),
    "GroupMuon, QK g = 6 random, and AdamW for the rest": lambda n: group_muon_step(
        n, packed(q="6:random", k="6:random"), adamw=True
    ),
}


def count(make, layers: int) -> Calls:
    """The calls of the second step: the first also makes the state. Nothing is compiled."""
    with torch.compiler.set_stance("force_eager"):
        optimizer = make(layers)
        with Calls("meta"):
            optimizer.step()
        with Calls("meta") as calls:
            optimizer.step()
    return calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48])
    layers = parser.parse_args().layers
    print("A step on the matrices of GPT-2 Small: operator calls that launch work / all calls.")
    if importlib.util.find_spec("dion") is None:
        print("dion is not installed here: put its source folder into PYTHONPATH.")
    head = [f"{n} layers" for n in layers]
    words = ["optimizer", *head, "copies from the host", "waits for the device"]
    table = io.StringIO()
    print(f"| {' | '.join(words)} |", file=table)
    print("|---|" + "---:|" * (len(layers) + 2), file=table)
    for name, make in CONTENDERS.items():
        counts = [count(make, n) for n in layers]
        cells = [f"{c.launches} / {c.total}" for c in counts]
        copies, waits = (
            " / ".join(str(getattr(c, k)) for c in counts) for k in ("copies", "waits")
        )
        print(f"| {name} | {' | '.join(cells)} | {copies} | {waits} |", file=table)
    print("\n" + table.getvalue())


if __name__ == "__main__":
    main()
