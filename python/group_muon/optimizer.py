"""GroupMuon as a torch.optim.Optimizer: a thin wrapper around the operator group_muon::step_."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

_ops = torch.ops.group_muon
_Loss = TypeVar("_Loss")

# Arguments of step_ for one weight: parameter, gradient, momentum buffer, layout, name, partition,
# step, lr and weight decay.
_Weight = tuple[Tensor, Tensor, Tensor, str, str, str, int, float, float]


class StepOptions(TypedDict, total=False):
    """Options that weights must share to be stepped in one call, by the operator's argument names."""

    momentum: float
    nesterov: bool
    average: bool
    seed: int
    base_scale: str
    transfer: str
    reference: str
    method: str
    coefficients: str | Sequence[Sequence[float]]
    steps: int
    tail_steps: int
    restarts: Sequence[int]
    precision: str | torch.dtype
    engine: str
    eps: float
    relative_eps: bool
    rank_tolerance: float


class _State(TypedDict):
    """State of one parameter."""

    step: int
    momentum_buffer: Tensor


_SHARED = tuple(StepOptions.__annotations__)


def _shared(group: Mapping[str, Any]) -> StepOptions:
    return cast(StepOptions, {key: group[key] for key in _SHARED})


def _operator_options(options: StepOptions) -> dict[str, object]:
    """Options as the operators take them: coefficients by name or as a flat list of values."""
    coefficients = options["coefficients"]
    custom: list[float] = []
    if not isinstance(coefficients, str):
        if not (coefficients and all(isinstance(t, Sequence) for t in coefficients)):
            raise ValueError(
                "group_muon: coefficients should be a name or a list of at least one (a, b, c)"
            )
        custom = [float(value) for triple in coefficients for value in triple]
        coefficients = "quintic"
    return {
        **options,
        "coefficients": coefficients,
        "custom_coefficients": custom,
        "steps": int(options["steps"]),
        "tail_steps": int(options["tail_steps"]),
        "restarts": list(options["restarts"]),
        "precision": str(options["precision"]).removeprefix("torch."),
    }


def _refuse_dtensor(parameter: Tensor, name: str) -> None:
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: nothing is a DTensor
    if module is not None and isinstance(parameter, module.DTensor):
        raise TypeError(
            f"group_muon: parameter '{name}' is a DTensor. Heads would be cut from the local shard "
            "instead of the whole weight, so GroupMuon does not support sharded weights; pass whole ones."
        )


def orthogonalize(
    blocks: Tensor,
    *,
    method: str = "auto",
    coefficients: str | Sequence[Sequence[float]] = "quintic",
    steps: int = 5,
    tail_steps: int = 0,
    restarts: Sequence[int] = (),
    precision: str | torch.dtype = "auto",
    engine: str = "auto",
    eps: float = 1e-7,
    relative_eps: bool = True,
    rank_tolerance: float = 0.0,
) -> Tensor:
    """Orthogonalizes each matrix of blocks (… × m × n). The result is in the working precision."""
    options: StepOptions = dict(  # torch.compile cannot trace StepOptions(...)
        method=method,
        coefficients=coefficients,
        steps=steps,
        tail_steps=tail_steps,
        restarts=restarts,
        precision=precision,
        engine=engine,
        eps=eps,
        relative_eps=relative_eps,
        rank_tolerance=rank_tolerance,
    )
    return _ops.orthogonalize(blocks, **_operator_options(options))


def engines() -> list[str]:
    """The engines that run on this CPU, the best last. GROUP_MUON_CPU=avx2 forbids better ones."""
    return _ops.engines()


class GroupMuon(torch.optim.Optimizer):
    """Muon that orthogonalizes groups of attention heads.

    Runs on any device that libtorch supports; tested on CPU and meta, untested on CUDA.
    load_state_dict also restores the saved options, including the layout and its groupings. To
    change them, call set_grouping (or edit param_groups) after loading.

    Args:
        params: matrices (or parameter groups of them). Use AdamW for embeddings, head, gains and
            biases. ``group_muon.param_groups(model, group_size=6)`` makes the split.
        lr: learning rate; with the default scale, the size of one entry's step.
        momentum: in [0, 1).
        nesterov: orthogonalize the look-ahead G + μM instead of M.
        average: momentum as a running average, μM + (1-μ)G, instead of a sum, μM + G.
        weight_decay: decoupled.
        layout: where the heads lie and how they are grouped; see ``group_muon.packed_qkv`` and
            the other layout functions. The default is plain Muon.
        seed: seed of the random partitions. They also depend on the step and on the parameter's
            name (pass named parameters) or index.
        partitions: a name for each parameter of a group, used only for its random partitions.
            Parameters with the same name draw the same partition, such as Q and K of a layer.
        method: "newton_schulz", "gram" (the same polynomial on the Gram matrix: less work),
            "accurate_gram" (with that matrix in fp32: less rounding), "exact" (SVD) or "auto"
            ("gram" with a SIMD engine, else "newton_schulz").
        coefficients: "quintic", "polar_express", "you_jiacheng", or a list of (a, b, c), one per
            step.
        steps: number of iterations, for named coefficients.
        tail_steps: number of additional iterations that converge to the exact polar factor.
        restarts: for Gram methods, steps after which to restart. Empty: chosen for each block.
        precision: "bfloat16", "float32", "float64", or "auto": bfloat16 if the device has it in
            hardware, else float32. The first step replaces "auto" in the parameter group by the
            chosen precision, so a saved state keeps it.
        engine: which code runs the Gram methods: "auto", "portable" (libtorch's operations), or a
            SIMD engine for one kind of CPU: "neon", "avx2", "avx512", "avx512_bf16".
            ``group_muon.engines()`` lists those that run here.
        eps, relative_eps: divide by ‖X‖·(1 + eps), or by ‖X‖ + eps if not relative.
        rank_tolerance: for "exact", the fraction of the largest singular value up to which
            singular values count as 0. 0: by precision.
        base_scale: "naive", "keller_jordan", "mup", "moonlight" or "sqrt_max".
        transfer: rule that transfers lr from the reference shape to a block's shape: the same
            names, or "same" for base_scale.
        reference: "segment" (Q, K or V alone) or "matrix" (the whole weight).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3.6e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        average: bool = False,
        weight_decay: float = 0.0,
        layout: str = "rows",
        seed: int = 0,
        partitions: Sequence[str] | None = None,
        method: str = "auto",
        coefficients: str | Sequence[Sequence[float]] = "quintic",
        steps: int = 5,
        tail_steps: int = 0,
        restarts: Sequence[int] = (),
        precision: str | torch.dtype = "auto",
        engine: str = "auto",
        eps: float = 1e-7,
        relative_eps: bool = True,
        rank_tolerance: float = 0.0,
        base_scale: str = "sqrt_max",
        transfer: str = "same",
        reference: str = "segment",
    ) -> None:
        defaults = {
            key: value
            for key, value in locals().items()
            if key not in ("self", "params", "__class__")
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state saved by an older version lacks newer options.
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not all("layout" in group for group in state_dict["param_groups"]):
            raise ValueError(
                "group_muon: this is not a GroupMuon state; use load_muon for one of torch.optim.Muon"
            )
        before = [group["layout"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        after = [group["layout"] for group in self.param_groups]
        for old, new in zip(before, after, strict=True):
            if old != new:
                warnings.warn(
                    f"group_muon: the loaded state replaces the layout '{old}' by '{new}'; to use "
                    "another grouping, call set_grouping after loading",
                    stacklevel=2,
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check(*list(self._named_groups())[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def set_grouping(self, grouping: str | int, segment: str) -> None:
        """Changes the grouping from the next step on, for the segments with this name ("q", "k", …; "": all
        segments) in every parameter group that has one. Momentum is kept."""
        changes = []  # check all layouts before changing any
        for group, names in self._named_groups():
            if _ops.has_segment(group["layout"], segment):
                layout = _ops.with_grouping(group["layout"], str(grouping), segment)
                self._check(group | {"layout": layout}, names)
                changes.append((group, layout))
        if not changes:
            words = (word for group in self.param_groups for word in group["layout"].split())
            known = sorted({word.split("=")[0] for word in words if "=" in word})
            raise ValueError(
                f"group_muon: no parameter group has a segment '{segment}' to group; segments: "
                + (", ".join(known) or "none")
            )
        for group, layout in changes:
            group["layout"] = layout

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], _Loss]) -> _Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], _Loss] | None = None) -> _Loss | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Check everything before writing anything.
        for group, names in self._named_groups():
            self._check(group, names)
            self._settle_precision(group)
        # Groups with equal step options are stepped together, which batches their blocks.
        batches: dict[str, tuple[StepOptions, list[_Weight]]] = {}
        for group, names in self._named_groups():
            shared = _shared(group)
            _, weights = batches.setdefault(repr(shared), (shared, []))
            lr = float(group["lr"])
            for parameter, name, partition in zip(
                group["params"], names, group["partitions"] or names, strict=True
            ):
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                weights.append(
                    (parameter, parameter.grad, state["momentum_buffer"], group["layout"], name,
                     partition, state["step"], lr, float(group["weight_decay"]))
                )  # fmt: skip
        for shared, weights in batches.values():
            if weights:
                _ops.step_(*map(list, zip(*weights, strict=True)), **_operator_options(shared))
            for parameter, *_ in weights:
                self.state[parameter]["step"] += 1
        return loss

    def load_muon(self, muon: "torch.optim.Muon | dict[str, Any]") -> None:
        """Loads the momentum of a torch.optim.Muon over the same parameters, or of its state_dict
        (matched by parameter name if both have names, else in order)."""
        buffers = self._muon_buffers(muon)
        changes = []  # check everything before writing anything
        for group, names in self._named_groups():
            for parameter, name in zip(group["params"], names, strict=True):
                if id(parameter) not in buffers:
                    raise ValueError(f"group_muon: the other optimizer has no parameter '{name}'")
                buffer, momentum = buffers[id(parameter)]
                if buffer is None:
                    continue
                if buffer.shape != parameter.shape:
                    raise ValueError(
                        f"group_muon: momentum of shape {tuple(buffer.shape)} does not fit parameter "
                        f"'{name}' of shape {tuple(parameter.shape)}"
                    )
                # torch.optim.Muon keeps the average (1-μ)·ΣμⁱG; ours may be the sum ΣμⁱG.
                scale = 1.0 if group["average"] else 1.0 / (1.0 - momentum)
                changes.append((parameter, buffer * scale))
        for parameter, loaded in changes:
            self._state_of(parameter)["momentum_buffer"].copy_(loaded)

    def _muon_buffers(
        self, muon: "torch.optim.Muon | dict[str, Any]"
    ) -> dict[int, tuple[Tensor | None, float]]:
        """id(our parameter) → (momentum buffer or None, momentum coefficient) of the other optimizer."""
        groups = (
            muon.param_groups if isinstance(muon, torch.optim.Optimizer) else muon["param_groups"]
        )
        if not all("momentum" in group for group in groups):
            raise ValueError("group_muon: load_muon needs a torch.optim.Muon or its state_dict")
        if isinstance(muon, torch.optim.Optimizer):
            return {
                id(p): (
                    muon.state[p].get("momentum_buffer") if p in muon.state else None,
                    g["momentum"],
                )
                for g in muon.param_groups
                for p in g["params"]
            }
        theirs = [
            (name, (muon["state"].get(index, {}).get("momentum_buffer"), group["momentum"]))
            for group in muon["param_groups"]
            for index, name in zip(
                group["params"], group.get("param_names") or group["params"], strict=True
            )
        ]
        ours = [
            (p, name)
            for group, names in self._named_groups()
            for p, name in zip(group["params"], names, strict=True)
        ]
        by_name = dict(theirs)
        if all(isinstance(name, str) for name in by_name):
            return {id(p): by_name[name] for p, name in ours if name in by_name}
        if len(theirs) != len(ours):
            raise ValueError(
                f"group_muon: the other optimizer has {len(theirs)} parameters, this one has {len(ours)}; "
                "pass named parameters to both"
            )
        return {id(p): entry for (p, _), (_, entry) in zip(ours, theirs, strict=True)}

    def _named_groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each group with the names of its parameters: given, else their indices in the optimizer."""
        first = 0
        for group in self.param_groups:
            count = len(group["params"])
            yield group, group.get("param_names") or [str(first + i) for i in range(count)]
            first += count

    def _state_of(self, parameter: Tensor) -> _State:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["momentum_buffer"] = torch.zeros_like(
                parameter, memory_format=torch.preserve_format
            )
        return state

    def _settle_precision(self, group: dict[str, Any]) -> None:
        """Replaces precision "auto" by the choice for these weights."""
        if group["precision"] != "auto":
            return
        for parameter in group["params"]:
            if parameter.grad is not None and not parameter.is_meta:
                group["precision"], *_ = _ops.resolved(
                    group["method"], "auto", group["engine"], parameter.device
                )
                return

    def _check(self, group: dict[str, Any], names: list[str]) -> None:
        """Rejects now what the operator would reject at the first step."""
        for parameter, name in zip(group["params"], names, strict=True):
            _refuse_dtensor(parameter, name)
        partitions = group["partitions"]
        if partitions is not None and len(partitions) != len(group["params"]):
            raise ValueError(
                f"group_muon: {len(partitions)} names are given for {len(group['params'])} parameters"
            )
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError(f"group_muon: lr should have one element, not {group['lr'].numel()}")
        if not isinstance(group["layout"], str):
            raise TypeError(
                f"group_muon: layout should be a string such as packed_qkv() returns, not {group['layout']!r}"
            )
        _ops.check(
            group["params"], [p.grad for p in group["params"]], names, group["layout"],
            float(group["lr"]), float(group["weight_decay"]),
            **_operator_options(_shared(group)),
        )  # fmt: skip
