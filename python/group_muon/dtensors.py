"""Tensors that may be DTensors, whose elements lie in shards on several processes."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: nothing is a DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def zeros_like(weight: Tensor) -> Tensor:
    """Zeros that lie as the weight does."""
    if not is_sharded(weight):
        return torch.zeros_like(weight, memory_format=torch.preserve_format)
    from torch.distributed.tensor import DTensor

    like: Any = weight
    return DTensor.from_local(
        torch.zeros_like(local(weight), memory_format=torch.contiguous_format),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def local(tensor: Any) -> Tensor:
    """What this process holds of it."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()


def sums_of_squares(tensors: Sequence[Any]) -> list[float]:
    """Of all elements of each, in fp64. Collective if some are DTensors: sums over their shards, one for each dimension of
    a mesh."""
    norms = [torch.linalg.vector_norm(local(t), dtype=torch.float64) for t in tensors]
    squares = [norm.square() for norm in norms]
    same: dict[Any, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if is_sharded(tensor):
            dims = [
                d for d, p in enumerate(tensor.placements) if getattr(p, "dim", None) is not None
            ]
            same[tensor.device_mesh, tuple(dims)].append(i)
    for (mesh, dims), indices in same.items():
        sums = torch.stack([squares[i] for i in indices])
        for dim in dims:
            torch.distributed.all_reduce(sums, group=mesh.get_group(dim))
        for i, value in zip(indices, sums, strict=True):
            squares[i] = value
    return [float(square) for square in squares]


def placed(tensor: Any, like: Any) -> Tensor:
    """The tensor, lying as `like` does: whole, or in the same shards."""
    if is_sharded(tensor):
        if is_sharded(like) and tensor.device_mesh == like.device_mesh:
            return tensor.redistribute(like.device_mesh, like.placements)
        tensor = tensor.full_tensor()
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    if tensor.shape != like.shape:
        raise ValueError(
            f"group_muon: a state of shape {list(tensor.shape)} does not fit a weight of shape {list(like.shape)}"
        )
    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def place_states(states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Lets loaded states lie as their weights do."""
    for weight, state in states.items():
        for key, value in state.items():
            sharded = is_sharded(value) or (isinstance(value, Tensor) and is_sharded(weight))
            if key != "step" and sharded:
                state[key] = placed(value, weight)
