"""Group Muon: Muon that orthogonalizes groups of attention heads."""

from pathlib import Path

import torch

_BUILT_FOR = "2.13.0"
if torch.__version__.split("+")[0] != _BUILT_FOR:
    raise ImportError(f"group_muon is built for torch {_BUILT_FOR}, but finds {torch.__version__}")

torch.ops.load_library(str(Path(__file__).parent / "libgroup_muon.so"))

from group_muon import diagnostics
from group_muon.layouts import (
    convolution,
    grouping,
    head_order,
    interleaved_qkv,
    mla_key_value,
    mla_query,
    output_projection,
    packed_qkv,
    plain,
    separate,
    stacked,
    transposed,
    with_grouping,
)
from group_muon.models import param_groups
from group_muon.optimizer import GroupMuon, engines, orthogonalize

__version__ = "0.1.0"
__all__ = [
    "GroupMuon",
    "convolution",
    "diagnostics",
    "engines",
    "grouping",
    "head_order",
    "interleaved_qkv",
    "mla_key_value",
    "mla_query",
    "orthogonalize",
    "output_projection",
    "packed_qkv",
    "param_groups",
    "plain",
    "separate",
    "stacked",
    "transposed",
    "with_grouping",
]
