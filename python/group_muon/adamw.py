"""AdamW for the weights that are not matrices: the step of torch.optim.AdamW(fused=True), group by group."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from group_muon.dtensors import zeros_like

# torch's vectorized kernel computes the last elements of a tensor, which do not fill a vector, otherwise than the others.
# No vector has more elements.
ALIGNED = 64

_State = MutableMapping[Tensor, dict[str, Any]]


def check(group: Mapping[str, Any], names: Sequence[str]) -> None:
    """Rejects early what the step would reject."""
    betas = tuple(group["betas"])
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ValueError(f"group_muon: betas should be two numbers in [0, 1), not {betas}")
    for key in ("weight_decay", "eps"):
        if not group[key] >= 0:
            raise ValueError(f"group_muon: {key} should be 0 or more, not {group[key]}")
    for parameter, name in zip(group["params"], names, strict=True):
        if not parameter.is_floating_point() or parameter.layout != torch.strided:
            raise TypeError(
                f"group_muon: parameter '{name}' is {parameter.layout}, {parameter.dtype}, but AdamW "
                "groups support only dense real floating-point weights"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise TypeError(
                f"group_muon: parameter '{name}' has a sparse gradient, but AdamW groups support only dense "
                "gradients; for an embedding, set sparse=False"
            )


def step(group: Mapping[str, Any], state: _State) -> None:
    weights = [parameter for parameter in group["params"] if parameter.grad is not None]
    fused = [weight for weight in weights if _can_be_fused(weight, state)]
    _step(fused, group, state, fused=True)
    if len(fused) < len(weights):
        others = [weight for weight in weights if not _can_be_fused(weight, state)]
        _step(others, group, state, fused=False)


def _step(weights: list[Tensor], group: Mapping[str, Any], state: _State, fused: bool) -> None:
    if not weights:
        return
    states = [_state_of(weight, state) for weight in weights]
    _call(
        group,
        weights,
        [_grad_of(weight) for weight in weights],
        [own["exp_avg"] for own in states],
        [own["exp_avg_sq"] for own in states],
        [own["step"] for own in states],
        fused,
    )


def _call(
    group: Mapping[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    fused: bool,
) -> None:
    adamw(
        weights,
        grads,
        averages,
        squares,
        [],
        steps,
        fused=fused,
        foreach=None if fused else False,
        amsgrad=False,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


class Shard(NamedTuple):
    """A part of a weight; contiguous tensors."""

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    last: list[int]  # where its last elements, up to ALIGNED, lie in the flattened weight
    elements: int  # of the whole weight


def step_shards(group: Mapping[str, Any], shards: Sequence[Shard]) -> None:
    """Steps each element as in a whole weight: by a vector or not."""
    calls: list[tuple[list[Tensor], Tensor]] = []  # weight, gradient, averages; step
    copies = []
    for shard in shards:
        flat = [tensor.view(-1) for tensor in shard[:4]]
        count, end = shard.weight.numel(), shard.elements - shard.elements % ALIGNED
        tail = [place - end for place in shard.last if place >= end]
        body = count - len(tail)
        even = body - body % ALIGNED
        if even:
            calls.append(([tensor[:even] for tensor in flat], shard.step.clone()))
        for begin, places, size in (
            (even, range(body - even), ALIGNED),
            (body, tail, shard.elements - end),
        ):
            if len(places) == 0:
                continue
            at = torch.tensor(places, device=shard.weight.device)
            parts = [tensor[begin : begin + len(places)] for tensor in flat]
            padded = [part.new_zeros(size).index_copy_(0, at, part) for part in parts]
            calls.append((padded, shard.step.clone()))
            copies.append((parts, padded, at))
    if calls:
        device = shards[0].weight.device.type
        fused = device in _get_fused_kernels_supported_devices()
        columns = [list(column) for column in zip(*(tensors for tensors, _ in calls), strict=True)]
        weights, grads, averages, squares = columns
        _call(group, weights, grads, averages, squares, [step for _, step in calls], fused)
    for parts, padded, at in copies:
        for i in (0, 2, 3):  # all but the gradient
            parts[i].copy_(padded[i][at])
    for shard in shards:
        shard.step.add_(1)


# torch's fused kernel walks through memory and does not look at strides: weight, gradient and state must have the same.
def _can_be_fused(weight: Tensor, state: _State) -> bool:
    own = _state_of(weight, state)
    same = own["exp_avg"].stride() == own["exp_avg_sq"].stride() == weight.stride()
    return same and weight.device.type in ("meta", *_get_fused_kernels_supported_devices())


def _grad_of(weight: Tensor) -> Tensor:
    grad = cast(Tensor, weight.grad)
    same = grad.stride() == weight.stride()
    return grad if same else torch.empty_like(weight, dtype=grad.dtype).copy_(grad)


def _state_of(weight: Tensor, state: _State) -> dict[str, Any]:
    """The state of a weight, with the names and types of torch.optim.AdamW(fused=True)."""
    own = state[weight]
    if not own:
        own |= new_state(weight)
    return own


def new_state(weight: Tensor) -> dict[str, Any]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=weight.device),
        "exp_avg": zeros_like(weight),
        "exp_avg_sq": zeros_like(weight),
    }


def place_steps(group: Mapping[str, Any], state: _State) -> None:
    """Moves loaded step counts to where the fused kernel expects them: a tensor on the weight's device."""
    for weight in group["params"]:
        if "step" in state.get(weight, {}):
            own = state[weight]
            own["step"] = torch.as_tensor(own["step"], dtype=torch.float32, device=weight.device)
