"""The operators behind the Python package, checked with PyTorch's opcheck."""

import pytest
import torch

import group_muon
from group_muon.options import as_text

ORTHOGONALIZE = dict(
    method="newton_schulz", coefficients="quintic", steps=5, tail_steps=0, restarts=[], precision="bfloat16",
    engine="auto", eps=1e-7, relative_eps=True, rank_tolerance=0.0,
)  # fmt: skip
STEP = dict(
    momentum=0.95, nesterov=True, average=False, seed=0, base_scale="sqrt_max", transfer="same", reference="segment",
    match_spectral=False, row_balance=False,
)  # fmt: skip


def step_arguments(count=3):
    weights = [torch.randn(12, 8) for _ in range(count)]
    return (
        weights,
        [torch.randn(12, 8) for _ in range(count)],
        [torch.randn(12, 8) for _ in range(count)],
        [group_muon.separate(6, 2, "3:random")] * count,
        [str(i) for i in range(count)],
        [str(i) for i in range(count)],
        list(range(count)),
        [0.1] * count,
        [0.01] * count,
        [1.0] * count,
        [""] * count,
    )


@pytest.mark.parametrize("method", ["newton_schulz", "gram", "exact"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (2, 3, 4, 7)])
def test_opcheck_orthogonalize(method, shape):
    options = as_text(ORTHOGONALIZE | {"method": method, "precision": "float32"})
    torch.library.opcheck(torch.ops.group_muon.orthogonalize.default, (torch.randn(shape), options))


def test_opcheck_step():
    options = as_text(STEP | ORTHOGONALIZE)
    torch.library.opcheck(torch.ops.group_muon.step_.default, (*step_arguments(), options))


def test_step_says_what_it_writes():
    """Exactly what the schema marks as written is written."""
    arguments = step_arguments()
    before = [[t.clone() for t in tensors] for tensors in arguments[:3]]
    torch.ops.group_muon.step_(*arguments, as_text(STEP | ORTHOGONALIZE))
    written = [not torch.equal(a[0], b[0]) for a, b in zip(arguments, before)]
    assert written == [True, False, True]


def test_lists_of_unequal_length_are_refused():
    arguments = list(step_arguments())
    arguments[1] = arguments[1][:2]
    with pytest.raises(
        ValueError, match="lists of equal length, with one entry for each of the 3 weights"
    ):
        torch.ops.group_muon.step_(*arguments, as_text(STEP | ORTHOGONALIZE))


def test_orthogonalize_compiles_into_a_graph():
    def function(x):
        return group_muon.orthogonalize(x * 2, precision="float32") + 1

    x = torch.randn(6, 10)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), function(x))
