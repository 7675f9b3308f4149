"""When and why grouping helps, measured; docs/theory.md goes through the formulas.

    full = diagnostics.measure(momentum, gradient, group_muon.separate(12, 64, "all"))[0]
    grouped = diagnostics.measure(momentum, gradient, group_muon.separate(12, 64, "1"))[0]
    print(diagnostics.compare(grouped, full, lr=3.6e-4))

or, between backward() and step(), for a weight of a GroupMuon:

    for name, parts in diagnostics.of_parameter(optimizer, weight, ["1", "6:random"]).items(): ...
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from group_muon.optimizer import _SHARED, GroupMuon, _operator_options

_ops = torch.ops.group_muon

RANK_TOLERANCES = (1e-1, 1e-2, 1e-3, None)
"""Relative to the largest singular value; the last is machine precision."""

_DEFAULTS = dict(
    momentum=0.95,
    nesterov=True,
    average=False,
    seed=0,
    base_scale="sqrt_max",
    transfer="same",
    reference="segment",
    method="auto",
    coefficients="quintic",
    steps=5,
    tail_steps=0,
    restarts=(),
    precision="bfloat16",
    eps=1e-7,
    relative_eps=True,
    rank_tolerance=0.0,
)
IDEAL = dict(method="exact", precision="float64", base_scale="naive", transfer="naive")
"""Options of measure() for the theory's Muon: exact polar factors, steps of lr itself."""


@dataclass(frozen=True)
class Whitening:
    """An update O = A(X) under a layout, on a whole weight (segment "") or on one segment of it; the step
    is lr·sO, s being each block's scale. Sums are over blocks; those of singular values are NaN where
    blocks reach beyond the segment."""

    segment: str
    rows: int
    cols: int
    blocks: int
    nuclear_norm: float  # Σ‖X_i‖_*
    ranks: tuple[float, ...]  # Σ rank(X_i), by RANK_TOLERANCES
    stable_rank: float  # Σ ‖X_i‖² / σ₁²
    effective_rank: float  # Σ exp(entropy of σ / Σσ); NaN if estimated
    first_order: float  # ⟨G, sO⟩
    squared_norm: float  # ‖O‖²
    step_squared_norm: float  # ‖sO‖²
    head_norms: tuple[float, ...]  # ‖X_h‖ of the segment's heads
    whitened_head_norms: tuple[float, ...]  # ‖O_h‖

    def guaranteed_decrease(self, lr: float, beta: float) -> float:
        """Of the loss, by β-smoothness: lr⟨G, sO⟩ - β/2·lr²‖sO‖²."""
        return lr * self.first_order - beta / 2 * lr**2 * self.step_squared_norm


@dataclass(frozen=True)
class Comparison:
    """Of a grouped update with a full one."""

    gain: float  # Σ‖X_i‖_* - ‖X‖_*, never negative
    ideal_cost: tuple[float, ...]  # Σ r_i - r, by RANK_TOLERANCES
    norm_cost: float  # Σ‖O_i‖² - ‖O‖²
    first_order_gain: float  # Σ⟨G_i, sO_i⟩ - ⟨G, sO⟩
    pays: str  # always, never, below or above
    break_even: float  # the β of "below" and "above"


def measure(
    direction: Tensor,
    gradient: Tensor,
    layout: str,
    heads: str | None = None,
    *,
    name: str = "",
    step: int = 0,
    exact: bool = True,
    **options,
) -> list[Whitening]:
    """Orthogonalizes direction (the momentum, or the gradient itself) as layout says and measures the result:
    first all of the weight, then every segment of heads (by default of layout). Options are those of
    GroupMuon, exact=False estimates without singular values."""
    unknown = options.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(f"group_muon: measure has no option '{min(unknown)}'")
    values, norms, segments = _ops.measure(
        direction, gradient, layout, layout if heads is None else heads, name, step, exact,
        **_operator_options(_DEFAULTS | options),
    )  # fmt: skip
    results = []
    for part, norm, segment in zip(values.tolist(), norms, segments):
        rows, cols, blocks, nuclear, *ranks, stable, effective, first, square, scaled = part
        before, after = (
            tuple(column[~column.isnan()].tolist()) for column in norm.unbind(-1)
        )  # fmt: skip
        results.append(
            Whitening(
                segment,
                int(rows),
                int(cols),
                int(blocks),
                nuclear,
                tuple(ranks),
                stable,
                effective,
                first,
                square,
                scaled,
                before,
                after,
            )  # fmt: skip
        )
    return results


def compare(grouped: Whitening, full: Whitening, lr: float) -> Comparison:
    """Both of the same rows of the same weight."""
    pays, break_even = _ops.break_even(
        grouped.first_order, grouped.step_squared_norm, full.first_order, full.step_squared_norm, lr
    )
    return Comparison(
        gain=grouped.nuclear_norm - full.nuclear_norm,
        ideal_cost=tuple(g - f for g, f in zip(grouped.ranks, full.ranks)),
        norm_cost=grouped.squared_norm - full.squared_norm,
        first_order_gain=grouped.first_order - full.first_order,
        pays=pays,
        break_even=break_even,
    )


def imbalance(norms: Sequence[float]) -> float:
    """Standard deviation over mean: 0 if all heads are alike."""
    if not norms or not any(norms):
        return 0.0
    mean = sum(norms) / len(norms)
    return math.sqrt(sum((norm - mean) ** 2 for norm in norms) / len(norms)) / mean


def look_ahead(optimizer: GroupMuon, parameter: Tensor) -> Tensor:
    """What the next step of the optimizer would orthogonalize for this parameter. Nothing is changed."""
    group, _ = _place_of(optimizer, parameter)
    buffer = (
        optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
    )
    return _ops.look_ahead(
        parameter.grad, torch.zeros_like(parameter.grad) if buffer is None else buffer,
        group["momentum"], group["nesterov"], group["average"],
    )  # fmt: skip


def of_parameter(
    optimizer: GroupMuon, parameter: Tensor, groupings: Sequence[str], *, exact: bool = True
) -> dict[str, list[Whitening]]:
    """A parameter with gradient as the optimizer's next step would have it: as one block ("packed"), with each
    segment whole ("three-way"), and under other groupings of all its segments."""
    group, name = _place_of(optimizer, parameter)
    layout = group["layout"]
    if not _ops.has_segment(layout, ""):
        raise ValueError(f"group_muon: the layout of parameter '{name}' has no heads to group")
    cuts = {"packed": _ops.plain(), "three-way": _ops.with_grouping(layout, "all", "")}
    cuts |= {text: _ops.with_grouping(layout, text, "") for text in map(str, groupings)}
    direction = look_ahead(optimizer, parameter)
    step = optimizer.state[parameter].get("step", 0) if parameter in optimizer.state else 0
    options = {key: group[key] for key in _SHARED}
    return {
        cut: measure(
            direction, parameter.grad, text, layout, name=name, step=step, exact=exact, **options
        )
        for cut, text in cuts.items()
    }


def _place_of(optimizer: GroupMuon, parameter: Tensor) -> tuple[dict, str]:
    for group, names in optimizer._named_groups():
        for other, name in zip(group["params"], names):
            if other is parameter:
                if parameter.grad is None:
                    raise ValueError(f"group_muon: parameter '{name}' has no gradient yet")
                return group, (group["partitions"] or names)[names.index(name)]
    raise ValueError("group_muon: the optimizer does not have this parameter")
