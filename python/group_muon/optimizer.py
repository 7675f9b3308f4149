"""GroupMuon as a torch.optim.Optimizer: Muon's groups by the operator group_muon::step_, AdamW's by torch."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from math import fsum, sqrt
from typing import Any, NamedTuple, TypedDict, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from group_muon import adamw, contract, takeover
from group_muon.dtensors import is_sharded, local, place_states, placed, sums_of_squares, zeros_like
from group_muon.models import param_groups
from group_muon.options import as_text, shared
from group_muon.shards import Entry, Shards
from group_muon.sharing import Sharing

_ops = torch.ops.group_muon
_Loss = TypeVar("_Loss")

# Arguments of step_ for one weight: parameter, gradient, momentum buffer, layout, name, partition,
# step, lr, weight decay, lr as a fraction of the full one and, if it is a piece, the heads in it.
_Weight = tuple[Tensor, Tensor, Tensor, str, str, str, int, float, float, float, str]


def _divided(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those in shards, and the others."""
    tensors = list(tensors)
    return [t for t in tensors if is_sharded(t)], [t for t in tensors if not is_sharded(t)]


class _Unit(NamedTuple):
    """What is stepped: a weight, or a piece of one that this process owns."""

    tensor: Tensor
    name: str
    partition: str
    owned_heads: str = ""


def _of_weights(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group that its weights need not share with others of the same call."""
    return {key: group[key] for key in ("lr", "full_lr", "weight_decay")}


def _plan_of(group: Mapping[str, Any]) -> tuple[str, bool]:
    """What decides how processes may share a group's weights: the layout, and whether segments stay whole."""
    muon = group["algorithm"] == "muon"
    return (group["layout"], bool(group["match_spectral"])) if muon else ("adamw", False)


def lr_fraction(group: Mapping[str, Any]) -> float:
    """The learning rate as a fraction of the full one, by which groupings may be scheduled."""
    return float(group["lr"]) / group["full_lr"] if group["full_lr"] > 0 else 1.0


class _State(TypedDict):
    """State of one parameter."""

    step: int
    momentum_buffer: Tensor


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
    # options: begin orthogonalize (./run generate)
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
    # options: end
) -> Tensor:
    """Orthogonalizes each matrix of blocks (… × m × n). The result is in the working precision. The options are those
    of GroupMuon."""
    options = dict(
        # options: begin arguments (./run generate)
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
        # options: end
    )
    return _ops.orthogonalize(blocks, as_text(options))


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
    """Rejects groups of param_groups that lack some of the model's trainable weights."""
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
            torch optimizer takes: matrices, or groups of them. A group with
            ``"algorithm": "adamw"`` is stepped by AdamW.
        model_options: for a model, arguments of ``param_groups``, such as ``group_size=6``.
        lr: learning rate; under the default scale it is the size of one entry's step.
        full_lr: learning rate whose fractions are meant in groupings such as 1,6:random@0.5lr; 0:
            lr at construction.
        momentum: momentum coefficient μ, in [0, 1).
        nesterov: orthogonalize G + μM instead of M.
        average: momentum as an average, μM + (1-μ)G, instead of a sum, μM + G.
        weight_decay: decoupled: W ← (1 - lr·weight_decay)·W.
        layout: where the heads lie and how they are grouped; see packed_qkv and the other layout
            functions.
        seed: seed of the random partitions.
        partitions: names under which weights draw their partitions; weights with the same name,
            such as Q and K of a layer, share them.
        method: orthogonalization: newton_schulz; gram (the same polynomial on the small Gram
            matrix: less work); accurate_gram (that matrix in fp32: less rounding); exact (SVD);
            auto: gram where one of our own engines runs, else newton_schulz.
        coefficients: polynomials of the iterations: quintic (Muon's), polar_express or you_jiacheng
            (a list of five by You Jiacheng), or your own: a list of (a, b, c), one per iteration
            (C++: custom_coefficients).
        steps: number of iterations, for named coefficients.
        tail_steps: number of further iterations, which converge to the exact polar factor.
        restarts: Gram methods: iterations after which to start again from XXᵀ, against rounding;
            none: chosen for each block.
        precision: precision of the iterations: bfloat16, float32 or float64; auto: bfloat16 where
            the device has it in hardware, else float32. The first step replaces auto by the chosen
            one.
        engine: code that runs the Gram methods: portable (libtorch), neon, avx2, avx512 or
            avx512_bf16; auto: the best for the CPU.
        eps: guard against division by zero: a block is divided by ‖X‖·(1 + eps).
        relative_eps: false: divide by ‖X‖ + eps, as Muon's first script does.
        rank_tolerance: method exact: singular values up to this fraction of the largest count as 0;
            0: by precision.
        base_scale: factor on lr for the reference shape: naive 1, keller_jordan √max(1, out/in),
            mup √(out/in), moonlight 0.2·√max(out, in), sqrt_max √max(out, in).
        transfer: rule α that moves lr from the reference shape to a block's, by
            α(block)/α(reference): a name as for base_scale; same: base_scale itself; naive: no
            transfer.
        reference: shape that lr is meant for: segment (Q, K or V alone) or matrix (the whole
            weight).
        match_spectral: scale a segment's update down to the spectral norm of its largest block,
            since the blocks together have a larger one.
        row_balance: divide each output neuron's row of a block by its norm before orthogonalizing
            (MuonEq).
        maximize: step up the gradient.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: defaults of groups stepped by AdamW.
            In such a group they are called lr, betas, eps and weight_decay.
        partial: accept groups of param_groups that lack some of the model's weights.
        process_group: processes (of torch.distributed) that share every step: each keeps the state of its own pieces
            of the weights, computes their new values and sends them to the others. All must call step and
            state_dict together. Not for DTensor weights (FSDP2, tensor parallelism), which say by themselves
            where they lie: all processes of their meshes must call step together.
        gradients: with process_group, what the gradients are: local (of each process's own batch; the step averages
            them) or averaged (already, as by DistributedDataParallel).
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        # options: begin (./run generate)
        lr: float | Tensor = 3.6e-4,
        full_lr: float = 0.0,
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
        match_spectral: bool = False,
        row_balance: bool = False,
        # options: end
        maximize: bool = False,
        adamw_lr: float | Tensor = 3.6e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        partial: bool = False,
        process_group: "torch.distributed.ProcessGroup | None" = None,
        gradients: str = "local",
        **model_options: Any,
    ) -> None:
        given = locals()
        options = [p.name for p in inspect.signature(GroupMuon).parameters.values()][1:-1]
        defaults = {key: given[key] for key in options if not key.startswith("adamw_")}
        for key in ("partial", "process_group", "gradients"):
            del defaults[key]
        self._sharing: Sharing | None = None
        self._shards: Shards | None = None
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
        if process_group is not None:
            self._share(process_group, gradients)
        elif self._entries():
            self._plan_shards()

    def _entries(self) -> list[Entry]:
        """The weights in shards."""
        return [
            Entry(
                parameter,
                name,
                *_plan_of(group),
                number,
                f"{self._text_of(group)} steps={int(self.state.get(parameter, {}).get('step', 0))}",
            )
            for number, (group, names) in enumerate(self._named_groups())
            for parameter, name in zip(group["params"], names, strict=True)
            if is_sharded(parameter)
        ]

    def _plan_shards(self) -> None:
        """Plans the steps of weights in shards. Their state exists from now on: loaders of distributed checkpoints want
        it, and would otherwise make it by a step."""
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._settle_precision(group, group["params"])
        self._shards = Shards(self._entries())
        for group in self.param_groups:
            for weight in group["params"]:
                if is_sharded(weight) and not weight.is_meta and not self.state[weight]:
                    self.state[weight].update(self._new_state(group, weight))

    def _options_text(self) -> str:
        """The options that processes must share."""
        return " | ".join(map(self._text_of, self.param_groups))

    @staticmethod
    def _text_of(group: dict[str, Any]) -> str:
        if group["algorithm"] == "muon":
            options = as_text({**_of_weights(group), **shared(group)})
            return f"{options} maximize={group['maximize']} partitions={group['partitions']}"
        values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        return f"adamw {[float(value) for value in values]} maximize={group['maximize']}"

    @staticmethod
    def _new_state(group: dict[str, Any], weight: Tensor) -> dict[str, Any]:
        if group["algorithm"] == "adamw":
            return adamw.new_state(weight)
        return {"step": 0, "momentum_buffer": zeros_like(weight)}

    def _share(self, process_group: "torch.distributed.ProcessGroup", gradients: str) -> None:
        """Plans who owns what, and divides the states."""
        if self._entries():
            raise ValueError(
                "group_muon: process_group is for weights that every process holds whole, but some are DTensors (FSDP2, "
                "tensor parallelism), whose steps are shared anyway; remove process_group"
            )
        weights, names = [], []
        for number, (group, own_names) in enumerate(self._named_groups()):
            weights += group["params"]
            names += [f"{number} {name}" for name in own_names]
            if group["algorithm"] == "muon":  # later a process may own nothing of the group
                self._settle_precision(group, group["params"])
        self._sharing = Sharing(
            process_group,
            gradients,
            weights,
            names,
            self._shared_layouts(),
            f"{gradients} | {self._options_text()}",
        )
        self._divide_states()

    def _shared_layouts(self) -> list[tuple[str, bool]]:
        """What the plan of shares has to know of each weight."""
        return [_plan_of(group) for group in self.param_groups for _ in group["params"]]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent to others so far; 0 if no processes share the steps."""
        sharing = self._sharing or self._shards
        return 0 if sharing is None else sharing.bytes_sent

    def _divide_states(self) -> None:
        """Keeps the own pieces of whole states, if steps are shared. Those without a state get one: loaders of
        distributed checkpoints want it, and would otherwise make it by a step."""
        if self._sharing is None:
            return
        if self._sharing.layouts != self._shared_layouts():  # other groups may need other pieces
            self._share(self._sharing.group, self._sharing.gradients)
            return
        self.state = defaultdict(dict, self._sharing.take(self.state))
        groups = {id(weight): group for group in self.param_groups for weight in group["params"]}
        for piece, tensor in self._sharing.pieces.items():
            if not self.state[tensor]:
                group = groups[id(self._sharing.weight_of(piece))]
                self.state[tensor].update(self._new_state(group, tensor))
        self.state[
            self._sharing.weights[0]
        ]  # an empty one: also a process without pieces has some state

    def state_dict(self) -> dict[str, Any]:
        """If processes share the steps (process_group), all of them must call this together; each gets the whole state."""
        if self._sharing is None:
            return super().state_dict()
        own, self.state = self.state, defaultdict(dict, self._sharing.gather(self.state))
        try:
            return super().state_dict()
        finally:
            self.state = own

    def __getstate__(self) -> dict[str, Any]:
        if self._sharing is not None:
            raise TypeError(
                "group_muon: an optimizer whose steps processes share cannot be copied or pickled; use state_dict"
            )
        return super().__getstate__() | {"adamw_defaults": self.adamw_defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called when unpickling, and by load_state_dict after its hooks."""
        if "param_groups" in self.__dict__:
            self._check_loaded(state["param_groups"])
            for ours, loaded in zip(self.param_groups, state["param_groups"], strict=True):
                loaded.setdefault("full_lr", ours["full_lr"])
        else:
            self._sharing = None
            self._shards = None
        super().__setstate__(state)
        self._merge_numbered_states()
        self.defaults.pop("differentiable", None)  # torch adds it; it would go into the groups
        for group in self.param_groups:
            # A state saved by an older version lacks newer options.
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            self._settle_full_lr(group)
            if group["algorithm"] == "adamw":
                adamw.place_steps(group, self.state)
        place_states(self.state)
        self._divide_states()

    def _merge_numbered_states(self) -> None:
        """torch.distributed.checkpoint loads tensors in place, but puts other values below a weight's number as a
        string."""
        weights = [weight for group in self.param_groups for weight in group["params"]]
        states: dict[Any, Any] = self.state
        for key in [key for key in states if isinstance(key, str) and key.isdecimal()]:
            states[weights[int(key)]].update(states.pop(key))

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
        self._settle_full_lr(self.param_groups[-1])

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
        if self._sharing is not None:
            self.state = defaultdict(dict, self._sharing.gather(self.state))
        for group, layout in changes:
            group["layout"] = layout
        self._divide_states()

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

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of all of them together is at most max_norm, and returns that norm from
        before. With process_group and local gradients it is the norm of their mean, which torch's function of this name
        cannot know: it would scale each process's gradients by another factor. It comes after the last backward; there,
        step or zero_grad must come next. Norms are summed in fp64, so that the factor is that of one process, whatever
        the number of processes and shards. Collective if processes share the steps or weights are DTensors."""
        sharing = self._sharing if self._sharing is not None and self._sharing.local else None
        grads: list[Any] = (
            [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            if sharing is None
            else sharing.reduced_grads(self._options_text())
        )
        if any(is_sharded(g) and any(p.is_partial() for p in g.placements) for g in grads):
            raise ValueError(
                "group_muon: a gradient is a sum over processes that was not taken yet (Partial); redistribute it before "
                "its norm is measured"
            )
        squares = sums_of_squares(grads)
        norm = torch.tensor(sqrt(fsum(squares) if sharing is None else sharing.sum(squares)))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            local(grad).mul_(factor.to(grad.device))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._sharing is not None:
            self._sharing.forget()
        super().zero_grad(set_to_none)

    # The step counts select the head groups, so a compiled step would be compiled anew every time. There is nothing
    # to fuse either: all of Muon is one operator, each AdamW group another.
    @torch._disable_dynamo
    def _step(self) -> None:
        # Check everything before writing anything.
        for group, names in self._named_groups():
            self._check(group, names)
        if self._sharing is not None:
            if self._sharing.layouts != self._shared_layouts():
                raise ValueError(
                    "group_muon: the layout or match_spectral of a group was edited, but the processes have shared the "
                    "weights by the old one; use set_grouping to change a layout"
                )
            self._sharing.step(self._step_pieces, self._options_text())
            return
        self._agree()
        self._step_units(self._units(), self.state)

    def _agree(self) -> None:
        """Before a step: weights in shards are planned, and processes compare what they do."""
        entries = self._entries()
        if not entries:
            return
        if self._shards is None:
            self._plan_shards()
        active = [entry.weight for entry in entries if entry.weight.grad is not None]
        cast(Shards, self._shards).agree(entries, active)

    def _units(self) -> list[tuple[dict[str, Any], list[_Unit]]]:
        """The weights with gradients, by group."""
        return [
            (
                group,
                [
                    _Unit(parameter, name, partition)
                    for parameter, name, partition in zip(
                        group["params"], names, group["partitions"] or names, strict=True
                    )
                    if parameter.grad is not None
                ],
            )
            for group, names in self._named_groups()
        ]

    def _step_pieces(self, pieces: list[int]) -> None:
        """Steps pieces that this process owns."""
        sharing = cast(Sharing, self._sharing)
        places = {
            id(parameter): (number, name, partition)
            for number, (group, names) in enumerate(self._named_groups())
            for parameter, name, partition in zip(
                group["params"], names, group["partitions"] or names, strict=True
            )
        }
        units: list[tuple[dict[str, Any], list[_Unit]]] = [
            (group, []) for group in self.param_groups
        ]
        for piece in pieces:
            number, name, partition = places[id(sharing.weight_of(piece))]
            heads = sharing.owned_heads_of(piece)
            units[number][1].append(_Unit(sharing.pieces[piece], name, partition, heads))
        self._step_units(units, self.state)

    def _step_units(
        self,
        units: Iterable[tuple[dict[str, Any], list[_Unit]]],
        states: MutableMapping[Tensor, Any],
    ) -> None:
        units = list(units)
        batches = self._batches(units, states)
        for group, some in units:
            if group["algorithm"] == "adamw":
                sharded, whole = _divided([unit.tensor for unit in some])
                adamw.step({**group, "params": whole}, states)
                if sharded:
                    cast(Shards, self._shards).step_adamw(group, sharded, states)
        in_shards = {}
        for options, weights in batches.items():
            in_shards[options] = [weight for weight in weights if is_sharded(weight[0])]
            whole_weights = [weight for weight in weights if not is_sharded(weight[0])]
            if whole_weights:
                _ops.step_(*map(list, zip(*whole_weights, strict=True)), options)
        if any(in_shards.values()):
            cast(Shards, self._shards).step(in_shards)
        for weights in batches.values():
            for parameter, *_ in weights:
                states[parameter]["step"] += 1

    def _batches(
        self,
        units: Iterable[tuple[dict[str, Any], list[_Unit]]],
        states: MutableMapping[Tensor, Any],
    ) -> dict[str, list[_Weight]]:
        """Muon's weights by their step options. Those with equal options are stepped together, which batches their
        blocks."""
        batches: dict[str, list[_Weight]] = {}
        for group, some in units:
            if group["algorithm"] != "muon":
                continue
            self._settle_precision(group, [unit.tensor for unit in some])
            weights = batches.setdefault(as_text(shared(group)), [])
            lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
            fraction = lr_fraction(group)
            for parameter, name, partition, heads in some:
                grad = cast(Tensor, parameter.grad)
                state = self._state_of(parameter, states)
                weights.append(
                    (parameter, -grad if group["maximize"] else grad, state["momentum_buffer"], group["layout"], name,
                     partition, state["step"], lr, weight_decay, fraction, heads)
                )  # fmt: skip
        return batches

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
            momentum = self._state_of(parameter, self.state)["momentum_buffer"]
            momentum.copy_(placed(loaded, parameter))
        self._divide_states()

    def _named_groups(self, algorithm: str = "") -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each group of an algorithm ("": of both) with the names of its parameters: given, else their indices in
        the optimizer."""
        first = 0
        for group in self.param_groups:
            count = len(group["params"])
            if not algorithm or group["algorithm"] == algorithm:
                yield group, group.get("param_names") or [str(first + i) for i in range(count)]
            first += count

    @staticmethod
    def _state_of(parameter: Tensor, states: MutableMapping[Tensor, Any]) -> _State:
        state = states[parameter]
        if not state:
            state["step"] = 0
            state["momentum_buffer"] = zeros_like(parameter)
        return state

    @staticmethod
    def _settle_full_lr(group: dict[str, Any]) -> None:
        if group["algorithm"] == "muon" and not group["full_lr"]:
            group["full_lr"] = float(group["lr"])

    @staticmethod
    def _settle_precision(group: dict[str, Any], weights: Iterable[Tensor]) -> None:
        """Replaces precision "auto" by the choice for these weights."""
        if group["precision"] != "auto":
            return
        for parameter in weights:
            if not parameter.is_meta:
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
        options = {**_of_weights(group), **shared(group)}
        _ops.check(
            group["params"], [p.grad for p in group["params"]], names, group["layout"], as_text(options)
        )  # fmt: skip
