"""Weights in shards (DTensor): FSDP2, HSDP and tensor parallelism, with real processes; weights compared bit by bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sharing import GROUPINGS, layouts, mean_gradient, parameters, run, shape_of, weights_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import group_muon

# Shapes of a mesh and placements of the weights on it, by the number of processes.
MESHES: dict[int, dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]] = {
    2: {
        "fsdp": ((2,), (Shard(0),)),
        "columns": ((2,), (Shard(1),)),
        "replicated": ((2,), (Replicate(),)),
    },
    3: {"fsdp": ((3,), (Shard(0),)), "columns": ((3,), (Shard(1),))},
    4: {
        "fsdp": ((4,), (Shard(0),)),
        "columns": ((4,), (Shard(1),)),
        "hsdp": ((2, 2), (Replicate(), Shard(0))),
        "fsdp and rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "fsdp and columns": ((2, 2), (Shard(0), Shard(1))),
    },
}


def sharded(tensor: Tensor, mesh: Any, placements: tuple[Any, ...]) -> DTensor:
    """The same on all processes → its shards. A vector is cut along its only dimension."""
    fitting = [
        Replicate() if not isinstance(p, Replicate) and p.dim >= tensor.dim() else p
        for p in placements
    ]
    if isinstance(fitting[0], _StridedShard) and not isinstance(fitting[1], Shard):
        fitting[0] = Shard(0)
    return distribute_tensor(tensor, mesh, fitting, src_data_rank=None)


def in_shards(
    groups: list[dict[str, Any]], mesh: Any, placements: tuple[Any, ...]
) -> list[dict[str, Any]]:
    return [
        {
            **group,
            "params": [
                (name, nn.Parameter(sharded(weight.detach(), mesh, placements)))
                for name, weight in group["params"]
            ],
        }
        for group in groups
    ]


def gradients(weights: list[Tensor], step: int) -> list[Tensor | None]:
    """Of whole weights; some have none at some steps."""
    found: list[Tensor | None] = []
    for index, weight in enumerate(weights):
        like = torch.empty(weight.shape)
        found.append(mean_gradient(like, index, step, 1))
    return found


def steps_of_one(groups: list[dict[str, Any]], steps: int, **options: Any) -> list[Tensor]:
    """The weights of one process after some steps."""
    weights = parameters(groups)
    optimizer = group_muon.GroupMuon(groups, **options)
    for step in range(steps):
        for weight, grad in zip(weights, gradients(weights, step), strict=True):
            weight.grad = grad
        optimizer.step()
    return [weight.detach() for weight in weights]


def steps_in_shards(weights: list[Any], optimizer: Any, steps: range) -> None:
    for step in steps:
        for weight, grad in zip(weights, gradients(weights, step), strict=True):
            weight.grad = (
                None if grad is None else sharded(grad, weight.device_mesh, weight.placements)
            )
        optimizer.step()


def assert_same(weights: list[Any], expected: list[Tensor], what: str) -> None:
    for number, (weight, whole) in enumerate(zip(weights, expected, strict=True)):
        own = sharded(whole, weight.device_mesh, weight.placements).to_local()
        assert torch.equal(weight.detach().to_local(), own), f"{what}: weight {number}"


def _every_grouping(rank: int, processes: int, folder: str, steps: int) -> None:
    expected = torch.load(f"{folder}/expected.pt")
    for kind, (shape, placements) in MESHES[processes].items():
        mesh = init_device_mesh("cpu", shape)
        for number, grouping in enumerate(GROUPINGS):
            groups = in_shards(weights_of(grouping), mesh, placements)
            optimizer = group_muon.GroupMuon(groups)
            steps_in_shards(parameters(groups), optimizer, range(steps))
            assert_same(parameters(groups), expected[number], f"{kind}, {grouping}")


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_weights_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    torch.save([steps_of_one(weights_of(g), 20) for g in GROUPINGS], tmp_path / "expected.pt")
    run(processes, tmp_path, _every_grouping, 20)
