"""What a parameter group may hold, and what to use instead of options that other optimizers have."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

ALGORITHMS = ("muon", "adamw")

# Keys that torch, schedulers and trainers put into a group.
_ADDED_BY_OTHERS = (
    "params", "param_names", "role", "name", "initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr",
    "lr_scale", "base_momentum", "max_momentum",
)  # fmt: skip

# Options of other optimizers: the values that change nothing here, and what to say about any other.
_OTHER_OPTIONS: dict[str, tuple[tuple[object, ...], str]] = {
    "foreach": ((None, True), "all weights are stepped together; remove foreach"),
    "fused": ((None, True), "AdamW groups use torch's fused kernel where there is one; remove fused"),
    "capturable": (
        (None, False),
        "a CUDA graph would repeat the head groups and the learning rate of the step it captured; "
        "call step() outside the graph",
    ),
    "differentiable": (
        (None, False),
        "a step cannot be differentiated; use an optimizer of torch.optim for that",
    ),
    "amsgrad": ((None, False), "AdamW groups have no amsgrad; use torch.optim.AdamW for it"),
    "ns_steps": ((), "use steps"),
    "ns_coefficients": ((), "use coefficients=[(a, b, c)] * 5, one triple per step"),
    "adjust_lr_fn": (
        (),
        'use base_scale: "keller_jordan" for "original", "moonlight" for "match_rms_adamw", "mup" for '
        '"spectral_unclamped"',
    ),
}  # fmt: skip


def refusal(name: str, value: object, known: Collection[str], place: str) -> str:
    """What is wrong with an option that GroupMuon does not have; "" if this value changes nothing."""
    if name in _OTHER_OPTIONS:
        harmless, instead = _OTHER_OPTIONS[name]
        if any(value is accepted for accepted in harmless):
            return ""
        return f"group_muon: {name}={value!r} {place} is not supported: {instead}"
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"group_muon: unknown option '{name}' {place}{hint}"


def check_keys(group: dict[str, Any], known: Collection[str]) -> None:
    """Rejects unknown keys of a group and removes those that change nothing."""
    for key in [key for key in group if key not in known and key not in _ADDED_BY_OTHERS]:
        if words := refusal(key, group[key], known, "of a parameter group"):
            raise ValueError(words)
        del group[key]


def unknown_keys(group: Mapping[str, Any], known: Collection[str]) -> list[str]:
    return [k for k in group if not (k in known or k in _ADDED_BY_OTHERS or k in _OTHER_OPTIONS)]


def check_lr(lr: float | Tensor, name: str = "lr") -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"group_muon: {name}: Tensor lr must be 1-element, not {lr.numel()}")
    if isinstance(lr, (int, float)) and not lr >= 0:  # a tensor is read only by the step
        raise ValueError(f"group_muon: {name} should be 0 or more, not {lr}")
