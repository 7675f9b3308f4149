"""The paper's aligned low-rank example: k heads whose gradients all point along one direction v.

    G_i = a_i·u_i·vᵀ,  ‖u_i‖ = ‖v‖ = 1

The whole gradient and each head's gradient have rank one. To first order, whitening head by head gains
Σ|a_i| - √Σa_i², which is a(k - √k) for equal strengths. It costs (k - 1)βη/2 because of its larger norm, so grouping
pays only while β is small enough. With group_muon installed, or PYTHONPATH=build/release/python after ./run build:

    python examples/aligned_low_rank.py
"""

import math

import torch

import group_muon
from group_muon import diagnostics

ROWS, COLS = 4, 64
BETA, LR = 8.0, 0.1

torch.manual_seed(0)


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def table(title, strengths_of, closed_form):
    print(f"{title}, β = {BETA:g}, η = {LR:g}\n")
    print("  k       gain  closed form      cost  (k-1)βη/2   grouping pays while")
    for k in range(1, 13):
        a = strengths_of(k)
        gradient = (a[:, None, None] * unit(k, ROWS)[:, :, None] * unit(COLS)).flatten(0, 1)
        full, heads = (
            diagnostics.measure(
                gradient, gradient, group_muon.separate(k, ROWS, grouping), **diagnostics.IDEAL
            )[0]
            for grouping in ("all", "1")
        )
        comparison = diagnostics.compare(heads, full, LR)
        gain, cost = abs(comparison.gain), abs(BETA * LR / 2 * comparison.norm_cost)
        closed_gain, closed_cost = closed_form(a), (k - 1) * BETA * LR / 2
        assert abs(gain - closed_gain) < 1e-9 and abs(cost - closed_cost) < 1e-9
        pays = f"β < {comparison.break_even:.3f}" if k > 1 else "both are the same"
        print(f"{k:3} {gain:10.6f} {closed_gain:12.6f} {cost:9.6f} {closed_cost:10.6f}   {pays}")


table(
    "Equal strengths a = 1.5: the gain is a(k - √k)",
    lambda k: torch.full((k,), 1.5, dtype=torch.float64),
    lambda a: 1.5 * (len(a) - math.sqrt(len(a))),
)
print()
table(
    "Strengths a_i = ±1/i: the gain is Σ|a_i| - √Σa_i²",
    lambda k: torch.tensor([(-1) ** i / (i + 1) for i in range(k)], dtype=torch.float64),
    lambda a: abs(a.abs().sum().item() - math.sqrt(a.square().sum().item())),
)
