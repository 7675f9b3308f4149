"""The options of a step, as the operators take them: one text made from the library's list of options."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch

__all__ = ["OPTIONS", "Option", "StepOptions", "as_text", "shared"]


class Option(NamedTuple):
    """An entry of the library's list (group_muon/options.h)."""

    name: str
    type: str  # float, int, bool, str; with [] for lists
    default: str
    part: str  # orthogonalize, step, weight: where it matters
    help: str


OPTIONS = {row[0]: Option(*row) for row in torch.ops.group_muon.options()}
_TYPES = {option.name: option.type for option in OPTIONS.values()}


class StepOptions(TypedDict, total=False):
    """Options that weights must share to be stepped in one call."""

    # options: begin (./run generate)
    momentum: float
    nesterov: bool
    average: bool
    seed: int
    method: str
    coefficients: str | Sequence[Sequence[float]]
    steps: int
    tail_steps: int
    restarts: Sequence[int]
    precision: str | torch.dtype
    engine: str
    eps: float
    relative_eps: bool
    rank_tolerance: float
    base_scale: str
    transfer: str
    reference: str
    match_spectral: bool
    row_balance: bool
    # options: end


def shared(group: Mapping[str, Any]) -> StepOptions:
    """The options of a group that its weights share with others of the same call."""
    return {key: group[key] for key in StepOptions.__annotations__}  # type: ignore[return-value]


def as_text(options: Mapping[str, Any]) -> str:
    """momentum=0.95 nesterov=true …: numbers survive it exactly."""
    words = []
    for name, value in options.items():
        if name == "coefficients" and not isinstance(value, str):
            name, value = "custom_coefficients", _flat(value)
        words.append(f"{name}={_value(name, _TYPES[name], value)}")
    return " ".join(words)


def _flat(coefficients: Any) -> list[float]:
    if not (coefficients and all(isinstance(triple, Sequence) for triple in coefficients)):
        raise ValueError(
            "group_muon: coefficients should be a name or a list of at least one (a, b, c)"
        )
    return [float(value) for triple in coefficients for value in triple]


def _value(name: str, kind: str, value: Any) -> str:
    if kind.endswith("[]"):
        return ",".join([_value(name, kind[:-2], entry) for entry in value])
    if kind == "str":
        word = str(value).removeprefix("torch.")  # a dtype is a word, too
        if " " in word:
            raise ValueError(f"group_muon: {name} should be one word, not {word!r}")
        return word
    if isinstance(value, str):
        raise TypeError(f"group_muon: {name} should be {_KINDS[kind]}, not {value!r}")
    if kind == "bool":
        return "true" if value else "false"
    return str(int(value)) if kind == "int" else str(float(value))


_KINDS = {"float": "a number", "int": "a whole number", "bool": "True or False"}
