"""The momentum of a torch.optim.Muon, for the same weights in GroupMuon."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_Theirs = tuple[Tensor | None, float]  # momentum buffer (None before the first step), coefficient μ


def momentum_of(
    muon: "torch.optim.Muon | dict[str, Any]", ours: Sequence[tuple[Tensor, str, bool]]
) -> list[tuple[Tensor, Tensor]]:
    """Returns (parameter, momentum) for each of our parameters that has momentum there. Checks all first.

    ours: (parameter, name, average) of each parameter.
    """
    groups = muon.param_groups if isinstance(muon, torch.optim.Optimizer) else muon["param_groups"]
    if not all("momentum" in group for group in groups):
        raise ValueError("group_muon: load_muon needs a torch.optim.Muon or its state_dict")
    if isinstance(muon, torch.optim.Optimizer):
        theirs = _of_optimizer(muon)
    else:
        theirs = _of_state(muon, [(parameter, name) for parameter, name, _ in ours])
    found = []
    for parameter, name, average in ours:
        if id(parameter) not in theirs:
            raise ValueError(f"group_muon: the other optimizer has no parameter '{name}'")
        buffer, momentum = theirs[id(parameter)]
        if buffer is None:
            continue
        if buffer.shape != parameter.shape:
            raise ValueError(
                f"group_muon: momentum of shape {tuple(buffer.shape)} does not fit parameter "
                f"'{name}' of shape {tuple(parameter.shape)}"
            )
        # torch.optim.Muon keeps the average (1-μ)·ΣμⁱG; ours may be the sum ΣμⁱG.
        found.append((parameter, buffer * (1.0 if average else 1.0 / (1.0 - momentum))))
    return found


def _of_optimizer(muon: torch.optim.Optimizer) -> dict[int, _Theirs]:
    return {
        id(p): (muon.state[p].get("momentum_buffer") if p in muon.state else None, g["momentum"])
        for g in muon.param_groups
        for p in g["params"]
    }


def _of_state(state: dict[str, Any], ours: Sequence[tuple[Tensor, str]]) -> dict[int, _Theirs]:
    """Matched by name if both have names, else by position."""
    theirs = [
        (name, (state["state"].get(index, {}).get("momentum_buffer"), group["momentum"]))
        for group in state["param_groups"]
        for index, name in zip(
            group["params"], group.get("param_names") or group["params"], strict=True
        )
    ]
    by_name = dict(theirs)
    if all(isinstance(name, str) for name in by_name):
        return {id(p): by_name[name] for p, name in ours if name in by_name}
    if len(theirs) != len(ours):
        raise ValueError(
            f"group_muon: the other optimizer has {len(theirs)} parameters, this one has {len(ours)} in Muon's groups; "
            "pass named parameters to both"
        )
    return {id(p): entry for (p, _), (_, entry) in zip(ours, theirs, strict=True)}
