"""Compares layouts with a model's own forward pass.

A head of Q, K or V is changed in the rows that the layout gives it. Then the input of the output projection has to
change in the columns that its layout gives this head (or the heads that share the KV head), and nowhere else.
"""

import re

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
COPIES = (aten.clone, aten._to_copy)


class Operands(TorchDispatchMode):
    """Keeps what a weight is first multiplied with, however the model does it."""

    def __init__(self, weight):
        super().__init__()
        self.storages = {weight.untyped_storage().data_ptr()}
        self.found = None

    def is_weight(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in COPIES and self.is_weight(args[0]):
            self.storages.add(result.untyped_storage().data_ptr())
        if function.overloadpacket in PRODUCTS and self.found is None:
            left, right = args[-2:]
            if self.is_weight(right):
                self.found = left.clone(), right.clone()
            elif self.is_weight(left):
                self.found = right.transpose(-1, -2).clone(), left.transpose(-1, -2).clone()
        return result


def output_input(run, weight, layout):
    """The input of the output projection, tokens × columns, in the order of the weight's columns."""
    torch.manual_seed(0)  # for models that draw numbers
    with torch.no_grad(), Operands(weight) as operands:
        run()
    assert operands.found, "the forward pass never multiplies with the output projection"
    inputs, seen = (tensor.flatten(0, -2) for tensor in operands.found)
    order = torch.cdist(lines(weight, layout), seen).argmin(
        1
    )  # einsum may multiply in another order
    return inputs[:, order]


def heads_of(layout, segment):
    """The rows (or columns) of each head, read from the layout's text."""
    match = re.search(rf" {segment}=(\d+)x(\d+)@(\d+)([+,][^/]*)?/", layout)
    count, size, first, rest = int(match[1]), int(match[2]), match[3], match[4] or ""
    if rest.startswith("+"):
        starts = [int(first) + i * int(rest[1:]) for i in range(count)]
    else:
        starts = [int(start) for start in (first + rest).split(",")]
    return [[start + i for i in range(size)] for start in starts]


def segments_of(layout):
    return re.findall(r" (\w+)=\d", layout)


def lines(weight, layout):
    """A view of the weight in which heads lie along the rows."""
    view = weight.data
    if " flatten" in layout:
        view = view.view(view.shape[0], -1)
    return view.transpose(-1, -2) if layout.startswith("columns") else view


def changed_columns(run, weight, layout, rows, target):
    before, saved = output_input(run, *target), weight.detach().clone()
    view = lines(weight, layout)
    generator = torch.Generator().manual_seed(len(rows))
    view[..., rows, :] += torch.randn(view[..., rows, :].shape, generator=generator)
    after = output_input(run, *target)
    weight.data.copy_(saved)
    return set((after - before).abs().amax(0).gt(1e-5).nonzero().flatten().tolist())


def partner(name, names):
    """The name with the longest common beginning."""

    def common(other):
        equal = [a == b for a, b in zip(name.split("."), other.split("."))]
        return (*equal, False).index(False)

    return max(names, key=common)


def check_heads(run, groups):
    """Checks the attention weights of param_groups' result; returns their segments, such as {"q", "k", "v"}."""
    weights = {
        name: (p, group["layout"])
        for group in groups
        if group["role"] == "attention"
        for name, p in group["params"]
    }
    outputs = [name for name, (_, layout) in weights.items() if segments_of(layout) == ["o"]]
    assert outputs, "no output projection"
    seen = set()
    for name, (weight, layout) in weights.items():
        target = weights[partner(name, outputs)]
        for segment in set(segments_of(layout)) - {"o"}:
            seen.add(segment)
            check_segment(run, (name, weight, layout, segment), target)
    return seen


def check_segment(run, which, target):
    name, weight, layout, segment = which
    heads, columns = heads_of(layout, segment), heads_of(target[1], "o")
    share = len(columns) // len(heads)  # query heads of a KV head
    for head in {0, len(heads) // 2, len(heads) - 1}:
        mine = {c for part in columns[head * share : (head + 1) * share] for c in part}
        changed = changed_columns(run, weight, layout, heads[head], target)
        assert changed == mine, f"{name}, {segment} head {head}: {changed ^ mine}"
        if segment in (
            "q",
            "k",
        ):  # a single row changes a whole map, so that the head is not smaller
            for row in (heads[head][0], heads[head][-1]):
                changed = changed_columns(run, weight, layout, [row], target)
                assert changed == mine, f"{name}, {segment} head {head}, row {row}"
