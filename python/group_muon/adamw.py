"""AdamW for the weights that are not matrices: the step of torch.optim.AdamW(fused=True), group by group."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

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
    adamw(
        weights,
        [_grad_of(weight) for weight in weights],
        [own["exp_avg"] for own in states],
        [own["exp_avg_sq"] for own in states],
        [],
        [own["step"] for own in states],
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
        own["step"] = weight.new_zeros((), dtype=torch.float32)
        own["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        own["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return own


def place_steps(group: Mapping[str, Any], state: _State) -> None:
    """Moves loaded step counts to where the fused kernel expects them: a tensor on the weight's device."""
    for weight in group["params"]:
        if "step" in state.get(weight, {}):
            own = state[weight]
            own["step"] = torch.as_tensor(own["step"], dtype=torch.float32, device=weight.device)
