"""Group Muon: Muon that orthogonalizes groups of attention heads."""

# First, since this loads the core, or says which torch it needs.
from group_muon._library import VERSION  # isort: split

from group_muon import diagnostics
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
