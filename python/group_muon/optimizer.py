"""GroupMuon as a torch.optim.Optimizer: Muon's groups by the operator group_muon::step_, AdamW's by torch."""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from group_muon import adamw, contract, takeover
from group_muon.models import param_groups

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


def _refuse_vector(parameter: Tensor, name: str) -> None:
    if parameter.dim() < 2:
        raise ValueError(
            f"group_muon: parameter '{name}' of shape {list(parameter.shape)} is not a matrix. Pass the model, as in "
            "GroupMuon(model, group_size=6), or param_groups(model), which give embeddings, head, gains and biases to "
            'AdamW; in groups of your own, set "algorithm": "adamw" for them'
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


def _groups_of(
    params: "ParamsT | nn.Module", model_options: dict[str, Any], known: Sequence[str]
) -> ParamsT:
    """The parameters or groups to step; for a model, all of its trainable weights."""
    accepted = [name for name in inspect.signature(param_groups).parameters if name != "model"]
    for name, value in list(model_options.items()):
        if name not in accepted:
            if words := contract.refusal(name, value, [*known, *accepted], "of GroupMuon"):
                raise TypeError(words)
            del model_options[name]
    if not isinstance(params, nn.Module):
        if model_options:
            name = next(iter(model_options))
            raise TypeError(
                f"group_muon: {name} is for a model: use GroupMuon(model, {name}=…) or "
                f"GroupMuon(param_groups(model, {name}=…))"
            )
        return params
    groups = param_groups(params, **model_options)
    if not groups:
        raise ValueError(f"group_muon: {type(params).__name__} has no trainable weights")
    return groups


def _check_whole_model(groups: ParamsT, partial: bool) -> None:
    """Refuses groups of param_groups that lack some of the model's trainable weights."""
    dicts = [group for group in groups if isinstance(group, dict)]
    expected = max((group.get("model_weights", 0) for group in dicts), default=0)
    held = sum(len(group["params"]) for group in dicts) if expected else 0
    if held < expected and not partial:
        raise ValueError(
            f"group_muon: these groups have {held} of the model's {expected} trainable weights, so the others would "
            "never be trained; pass all groups of param_groups, or partial=True. (ZeroRedundancyOptimizer splits groups; it "
            "is not supported.)"
        )


class GroupMuon(torch.optim.Optimizer):
    """Muon that orthogonalizes groups of attention heads, and AdamW for what is not a matrix.

    Runs on any device that libtorch supports; tested on CPU and meta, untested on CUDA.
    load_state_dict also restores the saved options, including the layout and its groupings. To
    change them, call set_grouping (or edit param_groups) after loading.

    Args:
        params: a model, the groups of ``group_muon.param_groups(model, …)``, or what every
            optimizer of torch takes: matrices, or groups of them. A group with
            ``"algorithm": "adamw"`` is stepped by AdamW.
        model_options: for a model, arguments of ``param_groups``:
            ``GroupMuon(model, group_size=6, rule="random")``.
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
        maximize: step up the gradient.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: defaults of groups stepped by AdamW.
            In such a group they are called lr, betas, eps and weight_decay.
        partial: accept groups of param_groups that lack some of the model's weights.
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
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
        maximize: bool = False,
        adamw_lr: float | Tensor = 3.6e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        partial: bool = False,
        **model_options: Any,
    ) -> None:
        given = locals()
        options = [p.name for p in inspect.signature(GroupMuon).parameters.values()][1:-1]
        defaults = {key: given[key] for key in options if not key.startswith("adamw_")}
        del defaults["partial"]
        defaults |= {"betas": adamw_betas, "algorithm": "muon"}
        # Options that an AdamW group has under the same names, with other defaults.
        self.adamw_defaults = {
            "lr": adamw_lr, "eps": adamw_eps, "weight_decay": adamw_weight_decay
        }  # fmt: skip
        contract.check_lr(lr)
        contract.check_lr(adamw_lr, "adamw_lr")
        self._check({**defaults, "params": [], "partitions": None}, [])
        groups = _groups_of(params, model_options, options)
        if not isinstance(groups, Tensor):  # which torch refuses
            groups = cast(ParamsT, list(groups))
            _check_whole_model(groups, partial)
        super().__init__(groups, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"adamw_defaults": self.adamw_defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles, and ends load_state_dict, when its hooks have run."""
        if "param_groups" in self.__dict__:
            self._check_loaded(state["param_groups"])
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; it would go into the groups
        for group in self.param_groups:
            # A state saved by an older version lacks newer options.
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            if group["algorithm"] == "adamw":
                adamw.place_steps(group, self.state)

    def _check_loaded(self, groups: list[dict[str, Any]]) -> None:
        if not all("layout" in group for group in groups):
            raise ValueError(
                "group_muon: this is not a GroupMuon state; use load_muon for one of torch.optim.Muon"
            )
        for number, (ours, loaded) in enumerate(zip(self.param_groups, groups, strict=True)):
            algorithm = loaded.get("algorithm", "muon")
            if ours["algorithm"] != algorithm:
                raise ValueError(
                    f"group_muon: parameter group {number} is stepped by {ours['algorithm']}, but by {algorithm} in "
                    "the loaded state"
                )
            if ours["layout"] != loaded["layout"]:
                warnings.warn(
                    f"group_muon: the loaded state replaces the layout '{ours['layout']}' by '{loaded['layout']}'; "
                    "to use another grouping, call set_grouping after loading",
                    stacklevel=5,
                )
            if unknown := contract.unknown_keys(loaded, self.defaults):
                warnings.warn(
                    f"group_muon: this version does not know '{unknown[0]}' of the loaded state",
                    stacklevel=5,
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group = {k: v for k, v in param_group.items() if k != "model_weights"}
            contract.check_keys(param_group, self.defaults)
            algorithm = param_group.get("algorithm", "muon")
            if algorithm not in contract.ALGORITHMS:
                raise ValueError(
                    f"group_muon: unknown algorithm {algorithm!r} of a parameter group: use muon or adamw"
                )
            if algorithm == "adamw":
                param_group = {**self.adamw_defaults, **param_group}
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
        for group, names in self._named_groups("muon"):
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
        self._step()
        return loss

    # The step counts select the head groups, so a compiled step would be compiled anew every time. There is nothing
    # to fuse either: all of Muon is one operator, a group of AdamW another.
    @torch._disable_dynamo
    def _step(self) -> None:
        # Check everything before writing anything.
        for group, names in self._named_groups():
            self._check(group, names)
        for group, _ in self._named_groups("adamw"):
            adamw.step(group, self.state)
        for shared, weights in self._batches():
            if weights:
                _ops.step_(*map(list, zip(*weights, strict=True)), **_operator_options(shared))
            for parameter, *_ in weights:
                self.state[parameter]["step"] += 1

    def _batches(self) -> "list[tuple[StepOptions, list[_Weight]]]":
        """Muon's weights with gradients. Those with equal step options are stepped together, which batches
        their blocks."""
        batches: dict[str, tuple[StepOptions, list[_Weight]]] = {}
        for group, names in self._named_groups("muon"):
            self._settle_precision(group)
            shared = _shared(group)
            _, weights = batches.setdefault(repr(shared), (shared, []))
            lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
            for parameter, name, partition in zip(
                group["params"], names, group["partitions"] or names, strict=True
            ):
                if parameter.grad is None:
                    continue
                grad = -parameter.grad if group["maximize"] else parameter.grad
                state = self._state_of(parameter)
                weights.append(
                    (parameter, grad, state["momentum_buffer"], group["layout"], name, partition,
                     state["step"], lr, weight_decay)
                )  # fmt: skip
        return list(batches.values())

    def load_muon(self, muon: "torch.optim.Muon | dict[str, Any]") -> None:
        """Loads the momentum of a torch.optim.Muon over the same matrices, or of its state_dict
        (matched by parameter name if both have names, else in order).

        What differs afterwards, with the same lr, weight_decay, average=True and the matching base_scale:
        torch.optim.Muon divides by max(‖X‖, eps), so it shrinks the updates of matrices whose norm is far below 1e-7;
        GroupMuon is relative to the norm. torch.optim.Muon always iterates in bfloat16; GroupMuon does where the
        hardware has it. In bfloat16, directions with singular values below about 1e-3 of the largest are mostly
        rounding, so the updates of ill-conditioned matrices differ there; precision="float32" computes them."""
        ours = [
            (parameter, name, group["average"])
            for group, names in self._named_groups("muon")
            for parameter, name in zip(group["params"], names, strict=True)
        ]
        for parameter, loaded in takeover.momentum_of(muon, ours):
            self._state_of(parameter)["momentum_buffer"].copy_(loaded)

    def _named_groups(self, algorithm: str = "") -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each group of an algorithm ("": of both) with the names of its parameters: given, else their indices in
        the optimizer."""
        first = 0
        for group in self.param_groups:
            count = len(group["params"])
            if not algorithm or group["algorithm"] == algorithm:
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
        """Rejects now what the step would reject."""
        contract.check_lr(group["lr"])
        if group["algorithm"] == "adamw":
            adamw.check(group, names)
            return
        for parameter, name in zip(group["params"], names, strict=True):
            _refuse_dtensor(parameter, name)
            _refuse_vector(parameter, name)
        partitions = group["partitions"]
        if partitions is not None and len(partitions) != len(group["params"]):
            raise ValueError(
                f"group_muon: {len(partitions)} names are given for {len(group['params'])} parameters"
            )
        if not isinstance(group["layout"], str):
            raise TypeError(
                f"group_muon: layout should be a string such as packed_qkv() returns, not {group['layout']!r}"
            )
        _ops.check(
            group["params"], [p.grad for p in group["params"]], names, group["layout"],
            float(group["lr"]), float(group["weight_decay"]),
            **_operator_options(_shared(group)),
        )  # fmt: skip
