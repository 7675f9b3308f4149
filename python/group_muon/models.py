"""param_groups: chooses algorithm, role and layout for each weight of a model, and says why."""

import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import torch
from torch import nn

from group_muon.attention import attention_choices
from group_muon.choices import GUESSED, UNRESOLVED, Choice, Wanted, bare, ends_with
from group_muon.roles import Place, adapted_choices, choose, places, tied_choices

_ROLES = ("attention", "matrix", "embedding", "head", "gain", "bias", "other")

_Row = tuple[str, tuple[int, ...], Choice]  # name, shape, choice


def param_groups(
    model: nn.Module,
    group_size: int | str | dict[str, int | str] | None = None,
    rule: str = "random",
    *,
    segments: Sequence[str] = ("q", "k"),
    share_qk: bool = False,
    gate_up: str = "two",
    layouts: dict[str, str] | None = None,
    adamw: Sequence[str] = (),
    verbose: bool = True,
    file: TextIO | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups for GroupMuon, and prints a table of all choices.

    Attention and other matrices go to Muon. Embeddings, output heads, gains, biases and whatever else
    is not a matrix go to AdamW, in a group for each role. docs/python.md lists the attention modules
    that are known. Head counts are read from the module, then from its config, never guessed from a
    shape. The table says what is known and why, marks guesses, and marks attention that is not
    understood as UNRESOLVED: it stays on plain Muon.

    Args:
        group_size: heads per group, for the `segments`; all KV heads if a layer has fewer. Or a
            grouping such as "1@0,6@2000". Or a dict with a size or a grouping for any of "q", "k",
            "v" and "o" (the output projection, by columns), such as
            {"q": 6, "k": "2:interval", "v": "1@0,4@2000"}. None: no groups.
        rule: "adjacent", "interval" or "random", for sizes and groupings without a rule.
        segments: segments that `group_size` applies to, unless it is a dict. The others are
            orthogonalized whole.
        share_qk: Q and K of a layer draw the same random partition.
        gate_up: gate and up-projection in one weight are "two" blocks, or "one".
        layouts: layouts for unknown weights by the end of their names, such as
            {"attn.qkv.weight": group_muon.packed_qkv(12, 64, q="6:random")}.
        adamw: additional weights for AdamW by the end of their names, such as ["fusion.weight"].
        verbose: print the table to `file`, by default standard output.

    Example:
        optimizer = GroupMuon(group_muon.param_groups(model, group_size=6), lr=3.6e-4)
    """
    if isinstance(adamw, str):
        raise TypeError(f"group_muon: adamw should be a list of names, such as ['{adamw}']")
    _refuse_flat_weights(model)
    wanted = Wanted(group_size, rule, segments, share_qk, gate_up)
    chosen = _choose(model, wanted)
    _override(chosen, dict.fromkeys(adamw, "") | (layouts or {}))
    for place, choice in chosen:
        if choice.layout:
            torch.ops.group_muon.check_layout(place.parameter, choice.layout, place.name)
    if verbose:
        rows = [(place.name, tuple(place.parameter.shape), choice) for place, choice in chosen]
        print(_table(rows) + _notes(rows, wanted), file=file or sys.stdout)
    return _groups(chosen)


def _refuse_flat_weights(model: nn.Module) -> None:
    """Rejects FSDP1, which puts the weights of a module into one vector and gives each process a piece."""
    for name, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if type(module).__name__ != "FullyShardedDataParallel" or handle is None:
            continue
        if not handle._use_orig_params or handle.uses_sharded_strategy:
            raise TypeError(
                f"group_muon: FullyShardedDataParallel (FSDP1) keeps the weights of "
                f"'{bare(name) or type(module.module).__name__}' as one flat vector, so there are no "
                "matrices to orthogonalize. Use DistributedDataParallel, or FSDP1 with "
                "use_orig_params=True and sharding_strategy=ShardingStrategy.NO_SHARD."
            )


def _choose(model: nn.Module, wanted: Wanted) -> list[tuple[Place, Choice]]:
    """The trainable weights, tied ones only once, and the choice for each."""
    # Later ones win: a weight tied to an embedding or a head always goes to AdamW.
    found = adapted_choices(model, wanted)
    found |= attention_choices(model, wanted)
    found |= tied_choices(model)
    trainable = [place for place in places(model) if place.parameter.requires_grad]
    return [(place, found.get(id(place.parameter)) or choose(place, wanted)) for place in trainable]


def _override(chosen: list[tuple[Place, Choice]], named: dict[str, str]) -> None:
    """Replaces choices by those of the caller: a layout, or "" for AdamW, by the end of a name."""
    unused = set(named)
    for index, (place, choice) in enumerate(chosen):
        for end in (end for end in named if ends_with(place.name, end)):
            unused.discard(end)
            muon = bool(named[end])
            fits = choice.role if bool(choice.layout) == muon else ("matrix" if muon else "other")
            chosen[index] = place, Choice(fits, "set by the caller", named[end])
    if unused:
        raise ValueError(f"group_muon: no weight's name ends with '{unused.pop()}'")


def _groups(chosen: list[tuple[Place, Choice]]) -> list[dict[str, Any]]:
    """One group per role; for attention and matrices, one per layout."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for place, choice in sorted(chosen, key=lambda item: _ROLES.index(item[1].role)):
        key = choice.role, choice.layout
        if key not in groups:
            groups[key] = {"params": [], "algorithm": choice.algorithm, "role": choice.role}
            if choice.layout:
                groups[key] |= {"layout": choice.layout, "partitions": []}
            groups[key]["model_weights"] = len(chosen)
        groups[key]["params"].append((place.name, place.parameter))
        if choice.layout:
            groups[key]["partitions"].append(choice.partition or bare(place.name))
    return list(groups.values())


# What is printed.


def _table(rows: list[_Row]) -> str:
    """One line for all weights that differ only in the layer number."""
    merged: dict[tuple[str, ...], int] = {}
    for name, shape, choice in rows:
        shape_text = "×".join(map(str, shape)) or "-"
        groups = _groups_text(choice.layout)
        key = (_pattern(name), shape_text, choice.algorithm, choice.role, groups, choice.text())
        merged[key] = merged.get(key, 0) + 1
    header = ("weight", "count", "shape", "algorithm", "role", "groups", "why")
    lines = [header] + [(name, str(count), *rest) for (name, *rest), count in merged.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _groups_text(layout: str) -> str:
    """'rows q=12x64@0+64/6:random~1 …' → 'q 12/6:random …'."""
    found = re.findall(r"(\S+)=(\d+)x[^/]*/([^~\s]+)", layout)
    return " ".join(f"{name} {heads}/{grouping}" for name, heads, grouping in found) or "-"


def _notes(rows: list[_Row], wanted: Wanted) -> str:
    """Segments that no weight has, layouts to paste, and how much is known."""
    states = [choice.state for _, _, choice in rows]
    lost = wanted.missing([choice.layout for _, _, choice in rows])
    lines = [f"note: no weight has the segment '{segment}'" for segment in lost]
    if UNRESOLVED in states:
        lines += ["UNRESOLVED weights stay on plain Muon. Correct these lines and pass them:"]
        lines += ["layouts={", *_paste(rows), "}"]
    guessed, unresolved = states.count(GUESSED), states.count(UNRESOLVED)
    known = len(rows) - guessed - unresolved
    lines += [f"{len(rows)} weights: {known} known, {guessed} guessed, {unresolved} unresolved"]
    return "".join("\n" + line for line in lines)


def _paste(rows: list[_Row]) -> list[str]:
    """Lines of code for unresolved weights. Layers that agree share one line, by the end of the name."""
    found = [(name, c.suggestion) for name, _, c in rows if c.state == UNRESOLVED]
    by_end: dict[str, set[str]] = {}
    for name, code in found:
        by_end.setdefault(_end(name), set()).add(code)
    lines = [
        f'    "{_end(name) if len(by_end[_end(name)]) == 1 else name}": {code},'
        for name, code in found
    ]
    return list(dict.fromkeys(lines))


def _end(name: str) -> str:
    return _pattern(name).split("*.")[-1]
