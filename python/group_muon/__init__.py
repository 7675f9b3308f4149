"""Group Muon: Muon that orthogonalizes groups of attention heads."""

from pathlib import Path

import torch

from group_muon import diagnostics
from group_muon._build import TORCH, VERSION
from group_muon.layouts import (
    convolution,
    flattened,
    grouping,
    head_order,
    interleaved_qkv,
    mla_key_value,
    mla_query,
    output_projection,
    packed_qkv,
    pattern,
    plain,
    separate,
    stacked,
    transposed,
    with_grouping,
)
from group_muon.models import param_groups
from group_muon.optimizer import GroupMuon, engines, orthogonalize

if torch.__version__.split("+")[0] != TORCH:
    raise ImportError(f"group_muon was built for torch {TORCH}, but torch is {torch.__version__}")

# The modules look up operators only when called, so the library may be loaded after them.
torch.ops.load_library(str(Path(__file__).parent / "libgroup_muon.so"))

__version__: str = VERSION
__all__ = [
    "GroupMuon",
    "convolution",
    "diagnostics",
    "engines",
    "flattened",
    "grouping",
    "head_order",
    "interleaved_qkv",
    "mla_key_value",
    "mla_query",
    "orthogonalize",
    "output_projection",
    "packed_qkv",
    "param_groups",
    "pattern",
    "plain",
    "separate",
    "stacked",
    "transposed",
    "with_grouping",
]
