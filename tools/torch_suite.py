"""Runs PyTorch's own tests of optimizers with GroupMuon in the place of torch.optim.Muon.

torch_suite.py TEST_OPTIM [unittest options]

TEST_OPTIM is test/test_optim.py of PyTorch's source, for the installed torch. It needs the package expecttest.
Options that GroupMuon calls otherwise are given by its own names (docs/python.md lists them), and so are its
error messages.
"""

import pathlib
import runpy
import sys

import torch
from torch.testing._internal import common_optimizers
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
)

from group_muon import GroupMuon


class Muon(GroupMuon):
    """The suite treats an optimizer of this name as one for matrices."""


def inputs(device, dtype=None):
    """The suite's inputs of torch.optim.Muon, by GroupMuon's names."""
    own = {
        "ns_steps": lambda n: {"steps": n},
        "ns_coefficients": lambda k: {"coefficients": [k] * 5},
    }
    for case in common_optimizers.optim_inputs_func_muon(device, dtype):
        for name, translated in own.items():
            if name in case.kwargs:
                case.kwargs |= translated(case.kwargs.pop(name))
        yield case


def errors(device, dtype):
    """The suite's errors of every optimizer, and those of torch.optim.Muon with our words."""
    cases = common_optimizers.get_error_inputs_for_all_optims(device, dtype)
    vector = torch.rand(3, device=device, dtype=dtype, requires_grad=True)
    matrix = torch.rand(2, 3, device=device, dtype=dtype, requires_grad=True)
    numbers = torch.rand(2, 3, device=device, dtype=torch.complex64)
    for params, kwargs, error, words in (
        (vector, {}, ValueError, "is not a matrix"),
        (matrix, {"adjust_lr_fn": "arbitrary"}, TypeError, "is not supported: use base_scale"),
        (numbers, {}, TypeError, "ComplexFloat|complex"),
    ):
        case = OptimizerInput(params=[params], kwargs=kwargs, desc=words)
        cases.append(
            ErrorOptimizerInput(
                case,
                error_type=error,
                error_regex=words,
                error_on=OptimizerErrorEnum.CONSTRUCTION_ERROR,
            )
        )
    return cases


def main() -> None:
    path = pathlib.Path(sys.argv.pop(1))
    database = common_optimizers.optim_db
    database[:] = [
        OptimizerInfo(
            Muon,
            optim_inputs_func=lambda device, dtype=None: list(inputs(device, dtype)),
            optim_error_inputs_func=errors,
            supported_impls=(),
            not_og_supported_flags=(),
            supports_complex=False,
        )
    ]
    sys.argv = [str(path), *sys.argv[1:]]
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
