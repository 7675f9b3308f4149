"""Measures when and why grouping helps; docs/theory.md explains the formulas.

    full = diagnostics.measure(momentum, gradient, group_muon.separate(12, 64, "all"))[0]
    grouped = diagnostics.measure(momentum, gradient, group_muon.separate(12, 64, "1"))[0]
    print(diagnostics.compare(grouped, full, lr=3.6e-4))

or, between backward() and step(), for a weight of a GroupMuon optimizer:

    for name, parts in diagnostics.of_parameter(optimizer, weight, ["1", "6:random"]).items(): ...
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from group_muon.optimizer import GroupMuon, lr_fraction
from group_muon.options import StepOptions, as_text, shared

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

_ops = torch.ops.group_muon

RANK_TOLERANCES = (1e-1, 1e-2, 1e-3, None)
"""Rank tolerances relative to the largest singular value; None is machine precision."""

IDEAL = StepOptions(method="exact", precision="float64", base_scale="naive", transfer="naive")
"""Options of measure() for the theory's ideal Muon: exact polar factors, unscaled lr."""


@dataclass(frozen=True)
class Spectra:
    """Statistics of the singular values of blocks, summed over the blocks."""

    nuclear_norm: float  # Σ‖X_i‖_*
    ranks: tuple[float, ...]  # Σ rank(X_i), by RANK_TOLERANCES
    stable_rank: float  # Σ ‖X_i‖² / σ₁²
    effective_rank: float  # Σ exp(entropy of σ / Σσ)
    spectrum: tuple[float, ...]  # σ / σ₁ at 0, 1/16 … 1 of the way down, averaged over blocks


def _spectra(fields: Sequence[float]) -> Spectra:
    return Spectra(fields[0], tuple(fields[1:5]), fields[5], fields[6], tuple(fields[7:]))


@dataclass(frozen=True)
class Whitening:
    """An update O = A(X) under a layout, for a whole weight (segment "") or one of its segments. The step is
    lr·sO, where s is the scale of each block."""

    segment: str
    rows: int
    cols: int
    blocks: int
    first_order: float  # ⟨G, sO⟩
    squared_norm: float  # ‖O‖²
    step_squared_norm: float  # ‖sO‖²
    of_blocks: Spectra  # of X; NaN if blocks extend beyond the segment
    head_norms: tuple[float, ...]  # ‖X_h‖ of each head of the segment
    whitened_head_norms: tuple[float, ...]  # ‖O_h‖

    def guaranteed_decrease(self, lr: float, beta: float) -> float:
        """The decrease of the loss that β-smoothness guarantees: lr⟨G, sO⟩ - β/2·lr²‖sO‖²."""
        return _ops.guaranteed_decrease(self.first_order, self.step_squared_norm, lr, beta)


@dataclass(frozen=True)
class Comparison:
    """A grouped update compared with a full one."""

    gain: float  # Σ‖X_i‖_* - ‖X‖_*; nonnegative for finer blocks
    ideal_cost: tuple[float, ...]  # Σ r_i - r, by RANK_TOLERANCES
    norm_cost: float  # Σ‖O_i‖² - ‖O‖²
    first_order_gain: float  # Σ⟨G_i, sO_i⟩ - ⟨G, sO⟩
    pays: str  # always, never, below, above, or unknown
    break_even: float  # the β for "below" and "above"


def measure(
    direction: Tensor,
    gradient: Tensor,
    layout: str,
    heads: str | None = None,
    *,
    name: str = "",
    step: int = 0,
    lr_fraction: float = 1.0,
    exact: bool = True,
    **options: "Unpack[StepOptions]",
) -> list[Whitening]:
    """Orthogonalizes direction (the momentum, or the gradient itself) under layout and measures the result:
    first for the whole weight, then for each segment of heads (default: layout). Options are those of
    GroupMuon. exact=False estimates the spectra without computing singular values."""
    parts = _ops.measure(
        direction, gradient, layout, layout if heads is None else heads, name, step, lr_fraction,
        exact, _text(options),
    )  # fmt: skip
    results = []
    for numbers, (before, after), segment in zip(*parts, strict=True):
        rows, cols, blocks, first, square, scaled, *fields = numbers.tolist()
        result = Whitening(
            segment, int(rows), int(cols), int(blocks), first, square, scaled, _spectra(fields),
            tuple(before.tolist()), tuple(after.tolist()),
        )  # fmt: skip
        results.append(result)
    return results


def scaled_update(
    direction: Tensor,
    layout: str,
    *,
    name: str = "",
    step: int = 0,
    lr_fraction: float = 1.0,
    **options: "Unpack[StepOptions]",
) -> Tensor:
    """The update sO itself: a step is W - lr·sO."""
    return _ops.scaled_update(direction, layout, name, step, lr_fraction, _text(options))


def spectra(blocks: Tensor, *, exact: bool = True) -> Spectra:
    """Spectra of blocks [count, rows, cols], summed over the blocks."""
    return _spectra(_ops.spectra(blocks, exact).tolist())


def _text(options: StepOptions) -> str:
    unknown = options.keys() - StepOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"group_muon: unknown option '{min(unknown)}'; use GroupMuon's options for a step"
        )
    return as_text(options)


def compare(grouped: Whitening, full: Whitening, lr: float) -> Comparison:
    """Compares two updates of the same rows of the same weight."""
    if (grouped.rows, grouped.cols) != (full.rows, full.cols):
        raise ValueError(
            "group_muon: compared updates should have the same shape, not "
            f"{grouped.rows}x{grouped.cols} and {full.rows}x{full.cols}"
        )
    pays, break_even = _ops.break_even(
        grouped.first_order, grouped.step_squared_norm, full.first_order, full.step_squared_norm, lr
    )
    ranks = zip(grouped.of_blocks.ranks, full.of_blocks.ranks, strict=True)
    return Comparison(
        gain=grouped.of_blocks.nuclear_norm - full.of_blocks.nuclear_norm,
        ideal_cost=tuple(g - f for g, f in ranks),
        norm_cost=grouped.squared_norm - full.squared_norm,
        first_order_gain=grouped.first_order - full.first_order,
        pays=pays,
        break_even=break_even,
    )


def imbalance(norms: Sequence[float]) -> float:
    """Standard deviation divided by mean: 0 if all norms are equal."""
    return _ops.imbalance(list(norms))


def look_ahead(optimizer: GroupMuon, parameter: Tensor) -> Tensor:
    """What the optimizer's next step would orthogonalize for this parameter. Changes nothing."""
    group, _, gradient = _place_of(optimizer, parameter)
    buffer = (
        optimizer.state[parameter].get("momentum_buffer") if parameter in optimizer.state else None
    )
    return _ops.look_ahead(
        gradient, torch.zeros_like(gradient) if buffer is None else buffer, as_text(shared(group))
    )


def of_parameter(
    optimizer: GroupMuon, parameter: Tensor, groupings: Sequence[str | int], *, exact: bool = True
) -> dict[str, list[Whitening]]:
    """Measures the update that the optimizer's next step would make to a parameter with a gradient: as one block
    ("packed"), with each segment whole ("three-way"), and under each of groupings for all segments."""
    group, name, gradient = _place_of(optimizer, parameter)
    layout = group["layout"]
    if not _ops.has_segment(layout, ""):
        raise ValueError(f"group_muon: the layout of parameter '{name}' has no heads to group")
    if isinstance(groupings, str):
        raise TypeError(f"group_muon: groupings should be a list of strings, not {groupings!r}")
    cuts = {"packed": _ops.as_one_block(layout), "three-way": _ops.with_grouping(layout, "all", "")}
    cuts |= {text: _ops.with_grouping(layout, text, "") for text in map(str, groupings)}
    direction = look_ahead(optimizer, parameter)
    step = optimizer.state[parameter].get("step", 0) if parameter in optimizer.state else 0
    options = shared(group)
    return {
        cut: measure(
            direction,
            gradient,
            text,
            layout,
            name=name,
            step=step,
            lr_fraction=lr_fraction(group),
            exact=exact,
            **options,
        )
        for cut, text in cuts.items()
    }


def _place_of(optimizer: GroupMuon, parameter: Tensor) -> tuple[dict[str, Any], str, Tensor]:
    """The group of a parameter, the name of its random partitions, and its gradient."""
    for group, names in optimizer._named_groups():
        for other, name in zip(group["params"], names, strict=True):
            if other is parameter:
                if parameter.grad is None:
                    raise ValueError(
                        f"group_muon: parameter '{name}' has no gradient; call backward() first"
                    )
                partition = (group["partitions"] or names)[names.index(name)]
                return group, partition, parameter.grad
    raise ValueError("group_muon: the optimizer does not have this parameter")
