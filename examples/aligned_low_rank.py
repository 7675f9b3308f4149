"""The paper's aligned low-rank example: k heads whose gradients all point along one direction v.

    G_i = a·u_i·vᵀ,  ‖u_i‖ = ‖v‖ = 1

The whole gradient has rank one, and so has every head's. Whitening head by head gains a(k - √k) to first order and costs
(k - 1)βη/2 through its larger norm: grouping pays only as long as β is small enough. Run it with

    python examples/aligned_low_rank.py
"""

import math

import torch

import group_muon
from group_muon import diagnostics

ROWS, COLS, STRENGTH = 4, 64, 1.0
BETA, LR = 8.0, 0.1

torch.manual_seed(0)


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


print(f"a = {STRENGTH:g}, β = {BETA:g}, η = {LR:g}\n")
print("  k       gain    a(k-√k)       cost  (k-1)βη/2   grouping pays while")
for k in range(1, 13):
    gradient = STRENGTH * (unit(k, ROWS)[:, :, None] * unit(COLS)).flatten(0, 1)
    full, heads = (
        diagnostics.measure(
            gradient, gradient, group_muon.separate(k, ROWS, grouping), **diagnostics.IDEAL
        )[0]
        for grouping in ("all", "1")
    )
    comparison = diagnostics.compare(heads, full, LR)
    cost = BETA * LR / 2 * comparison.norm_cost
    closed_gain, closed_cost = STRENGTH * (k - math.sqrt(k)), (k - 1) * BETA * LR / 2
    assert abs(comparison.gain - closed_gain) < 1e-9 and abs(cost - closed_cost) < 1e-9
    pays = f"β < {comparison.break_even:.3f}" if k > 1 else "they are the same"
    gain = abs(comparison.gain)  # not -0
    print(f"{k:3} {gain:10.6f} {closed_gain:10.6f} {abs(cost):10.6f} {closed_cost:10.6f}   {pays}")
