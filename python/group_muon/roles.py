"""The roles of weights outside attention: matrix, embedding, output head, gain, bias or other."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from group_muon import layouts as lay
from group_muon.choices import (
    GUESSED,
    KNOWN,
    UNRESOLVED,
    Choice,
    Wanted,
    adapter_choices,
    adapters,
    bare,
    class_name,
    family,
    stored_in_by_out,
    weight_of,
)

_ops = torch.ops.group_muon  # head_by_name, role_by_name: the list of names that C++ uses, too

_GAIN = re.compile(r"weight|original0|scale|gamma|gain|^g$|alpha|lambda|lora_magnitude|^l$|ia3_l")

# Names of experts' weights that map from and to the residual stream.
_UP = re.compile(r"gate|up|^w1|^w3|^v1|^wi|fc1|mlp1|input")
_DOWN = re.compile(r"down|^w2|^wo|fc2|mlp2|output")
_EXPERTS = ("num_experts", "moe_num_experts", "n_experts", "num_local_experts", "n_routed_experts")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "hidden_dim", "dim")
# Linear layers that hold a gate and an up-projection, one half each, by family; "": any.
_GATE_UP: dict[str, str | tuple[str, ...]] = {
    "gate_up_proj": "", "gate_up": "", "Wi": "modernbert", "weights_in": "", "input_linear": ("granite", "jetmoe"),
    "fc1": "moonshine", "proj": "clvp", "linear_1": ("aya_vision", "cohere2_vision"),
}  # fmt: skip


@dataclass
class Place:
    """A parameter, the module that owns it, and the config nearest to that module."""

    name: str
    parameter: Tensor
    owner: nn.Module
    attribute: str
    config: object


def places(model: nn.Module) -> Iterator[Place]:
    """Every parameter once."""
    seen: set[int] = set()
    configs: dict[str, object] = {}
    for name, module in model.named_modules():
        inherited = configs.get(name.rpartition(".")[0]) if name else None
        configs[name] = getattr(module, "config", None) or inherited
        for attribute, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                full = f"{name}.{attribute}" if name else attribute
                owner = _layer_behind(model, name)
                if parameter is weight_of(owner):
                    attribute = "weight"
                yield Place(full, parameter, owner, attribute, configs[name])


def _layer_behind(model: nn.Module, name: str) -> nn.Module:
    """The module of that name. For a parametrized weight, the layer that has the weight."""
    return model.get_submodule(name.removesuffix(".parametrizations.weight"))


def tied_choices(model: nn.Module) -> dict[int, Choice]:
    """Embeddings and output heads. These roles take precedence, also for a weight tied to one."""
    choices = _heads(model)
    for module in model.modules():
        outputs = getattr(module, "get_output_embeddings", None)
        head = outputs() if callable(outputs) else None
        if isinstance(weight := getattr(head, "weight", None), Tensor):
            choices[id(weight)] = Choice("head", "output head")
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            choices[id(module.weight)] = Choice("embedding", "embedding")
    return choices


def adapted_choices(model: nn.Module, wanted: Wanted) -> dict[int, Choice]:
    """LoRA adapters of layers outside attention."""
    choices: dict[int, Choice] = {}
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Linear):
            place = Place(f"{name}.weight", base.weight, base, "weight", None)
            choices |= adapter_choices(module, _linear(place, wanted))
        if (
            class_name(module) == "ParamWrapper"
            and (count := getattr(module, "num_experts", 1)) > 1
        ):
            choices |= _adapters_of_experts(module, count)
    return choices


def _adapters_of_experts(module: nn.Module, count: int) -> dict[int, Choice]:
    """peft stores A of all experts one below the other, and B with the experts' columns in turn."""
    choices: dict[int, Choice] = {}
    for a, b in adapters(module):
        rank = a.shape[0] // count
        rows = lay.pattern(1, expert=(count, rank, 1))
        columns = lay.pattern(1, expert=(count * rank, 1, f"{rank}:interval"))
        columns = columns.replace("rows", "columns", 1)
        choices[id(a)] = Choice("matrix", f"LoRA A of {count} experts, rank {rank}", rows)
        choices[id(b)] = Choice("matrix", f"LoRA B of {count} experts, rank {rank}", columns)
    return choices


def choose(place: Place, wanted: Wanted) -> Choice:
    """The choice for a weight that is neither attention nor tied to an embedding or a head."""
    parameter, owner = place.parameter, place.owner
    if _is_vector(parameter):
        return _vector(place)
    if re.search(r"norm(\dd|gated)?$", class_name(owner).lower()):
        bias = "bias" in place.attribute
        return Choice("bias", "bias") if bias else Choice("gain", "gain of a norm")
    if isinstance(owner, nn.modules.conv._ConvNd) and place.attribute == "weight":
        return _convolution(owner)
    if isinstance(owner, nn.Linear) and place.attribute == "weight":
        return _linear(place, wanted)
    if stored_in_by_out(owner) and place.attribute == "weight":
        return Choice("matrix", "matrix, in × out", lay.transposed(lay.plain()))
    return _parameter(place, wanted)


# Output heads.


def _heads(model: nn.Module) -> dict[int, Choice]:
    choices: dict[int, Choice] = {}
    for name, module in _net(model).named_modules():
        path = _path(name)
        if state := _head_state(path, module):
            several = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            for head in module.children() if several else [module]:
                weight = _last_matrix(head)
                if weight is not None and (state == KNOWN or id(weight) not in choices):
                    why = f"output head, by the name '{path[-1]}'"
                    choices[id(weight)] = Choice("head", why, state=state)
    return choices


def _net(model: nn.Module) -> nn.Module:
    """The model inside wrappers that hold nothing else with weights, such as a LightningModule."""
    while not [*model.parameters(recurse=False)]:
        inner = {n: c for n, c in model.named_children() if any(True for _ in c.parameters())}
        if len(inner) != 1 or any(_head_state([n], c) for n, c in inner.items()):
            break
        (model,) = inner.values()
    return model


def _path(name: str) -> list[str]:
    """The parts of a name without peft's wrappers."""
    return re.sub(r"\.modules_to_save\.\w+|\.base_layer", "", bare(name)).split(".")


def _head_state(path: list[str], module: nn.Module) -> str:
    """KNOWN, GUESSED, or "" if the module is not an output head."""
    state = _ops.head_by_name(".".join(path))
    if state == "guessed if linear":
        return GUESSED if isinstance(module, nn.Linear) else ""
    return {"known": KNOWN, "guessed": GUESSED}.get(state, "")


def _last_matrix(module: nn.Module) -> Tensor | None:
    """The last matrix of a head. None if the module contains attention or has no matrix.

    Also None if the matrix is square and a norm follows: that is what comes before the output.
    """
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    modules = [*module.modules()]
    inner = [m for m in modules if isinstance(m, kinds) or stored_in_by_out(m)]
    if not inner:
        own = getattr(module, "weight", None)
        table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        return own if isinstance(own, Tensor) and own.dim() >= 2 and not table else None
    if any("attention" in class_name(m).lower() for m in module.modules()):
        return None
    weight = weight_of(inner[-1])
    after = [weight_of(m) for m in modules[modules.index(inner[-1]) + 1 :]]
    norm = any(w is not None and w.dim() == 1 for w in after)
    square = weight is not None and weight.shape[0] == weight.shape[1]
    return None if norm and square else weight


# Vectors.


def _is_vector(parameter: Tensor) -> bool:
    """Whether at most one dimension is larger than 1, as in 1 × 1 × n."""
    return sum(size > 1 for size in parameter.shape) < 2


def _vector(place: Place) -> Choice:
    named = _named(place)
    if isinstance(place.owner, nn.Linear) and named == "weight":
        return Choice("other", "one row or column, not a matrix")
    if "bias" in named:
        return Choice("bias", "bias")
    role = _ops.role_by_name(named)
    if role == "embedding":
        return Choice("embedding", "vector of an embedding, by its name")
    if role == "constant":
        return Choice("other", "state-space constant")
    if _GAIN.search(named):
        return Choice("gain", "gain")
    return Choice("other", "not a matrix")


# Matrices of known layers.


def _convolution(conv: nn.modules.conv._ConvNd) -> Choice:
    depthwise = conv.groups > 1 and conv.weight.shape[1] == 1
    if depthwise:
        return Choice("other", "depthwise convolution: a filter per channel, not a matrix")
    turned = isinstance(conv, nn.modules.conv._ConvTransposeNd)
    if conv.groups > 1:
        rows = conv.weight.shape[0] // conv.groups
        layout = lay.flattened(lay.pattern(1, group=(conv.groups, rows, 1)))
        if turned:
            layout = layout.replace("rows", "rows transposed", 1)
        return Choice("matrix", f"convolution of {conv.groups} groups, flattened", layout)
    layout = lay.transposed(lay.convolution()) if turned else lay.convolution()
    return Choice("matrix", "convolution, flattened", layout)


def _linear(place: Place, wanted: Wanted) -> Choice:
    source, rows = family(place.owner, place.config), place.parameter.shape[0]
    if _holds_gate_and_up(place, rows):
        layout, why = _gate_up(rows, True, wanted)
        return Choice("matrix", why, layout, KNOWN if source else GUESSED)
    return Choice("matrix", "matrix", lay.plain())


def _holds_gate_and_up(place: Place, outputs: int) -> bool:
    path = _path(place.name.replace(".parametrizations.weight", ""))
    child = path[-2] if place.attribute == "weight" and len(path) > 1 else place.attribute
    source, families = family(place.owner, place.config), _GATE_UP.get(child)
    if families is None or not source.startswith(families) or outputs % 2:
        return False
    # Moonshine's decoder has a gate, its encoder has none.
    return child != "fc1" or outputs == 2 * getattr(place.config, "intermediate_size", 0)


def _gate_up(rows: int, halves: bool, wanted: Wanted) -> tuple[str, str]:
    """Layout and reason of a fused gate and up-projection: two halves, or alternating rows."""
    if wanted.gate_up == "one":
        return lay.plain(), 'gate and up in one block (gate_up="one")'
    times, size = (1, rows // 2) if halves else (rows // 2, 1)
    order = "" if halves else ", alternating rows"
    layout = lay.pattern(times, gate=(1, size, "all"), up=(1, size, "all"))
    return layout, f'gate and up in two blocks (gate_up="two"){order}'


# Parameters outside known layers.


def _named(place: Place) -> str:
    """The parameter's own name. In peft's dictionaries the last part names the adapter."""
    path = place.name.split(".")
    if isinstance(place.owner, nn.ParameterList):
        return ".".join(path[-3:-1])
    in_dict = isinstance(place.owner, nn.ParameterDict)
    return path[-2] if in_dict and len(path) > 1 else place.attribute


def _parameter(place: Place, wanted: Wanted) -> Choice:
    attribute, parameter = place.attribute, place.parameter
    named, kind = _named(place), class_name(place.owner)
    role = _ops.role_by_name(named)
    if role == "constant":
        return Choice("other", "state-space constant, not a matrix")
    if role == "bias":
        return Choice("bias", "bias")
    of_module = place.name.split(".")[-2] if named == "weight" and "." in place.name else ""
    if (
        role == "embedding"
        or _ops.is_embedding_name(of_module)
        or (named == "weight" and "Embedding" in kind)
    ):
        return Choice("embedding", "table of vectors, by its name")
    if "lora_embedding" in named:
        return Choice("embedding", "LoRA of an embedding")
    if "conv" in named and parameter.shape[1] == 1:
        return Choice("other", "depthwise convolution: a filter per channel, not a matrix")
    if _among_experts(place):
        if re.search(r"(attn|attention)\w*\.(.*\.)?experts\.", place.name):
            why, code = f"experts of attention ({kind}) are not known", "group_muon.plain()"
            layout = lay.plain()
            if parameter.dim() > 2:
                layout, code = lay.stacked(layout), f"group_muon.stacked({code})"
            return Choice("attention", why, layout, UNRESOLVED, None, code)
        return _expert(place, wanted)
    if parameter.dim() > 2:
        why = f"stack of matrices out × in ({kind}.{attribute})"
        return Choice("matrix", why, lay.stacked(lay.plain()), GUESSED)
    if attribute == "weight" and re.search(r"Linear|Router|Gate", kind):
        return Choice("matrix", f"matrix of {kind}", lay.plain())
    return Choice("matrix", f"matrix out × in ({kind}.{attribute})", lay.plain(), GUESSED)


def _among_experts(place: Place) -> bool:
    names = f"{place.name} {class_name(place.owner)}".lower()
    router = re.search(r"router|gate$", class_name(place.owner).lower())
    return "expert" in names and not router


def _expert(place: Place, wanted: Wanted) -> Choice:
    if place.parameter.dim() == 2:
        return _packed_experts(place)
    turned, reason = _direction(place)
    outputs = place.parameter.shape[-1 if turned else -2]
    layout, why = lay.plain(), ""
    if _holds_gate_and_up(place, outputs):
        halves = getattr(place.owner, "is_concatenated", True) is not False
        layout, why = _gate_up(outputs, halves, wanted)
    layout = lay.stacked(lay.transposed(layout) if turned else layout)
    order = "in × out" if turned else "out × in"
    why = f"experts × {order}, {reason or 'by default'}" + (f"; {why}" if why else "")
    return Choice("matrix", why, layout, KNOWN if reason else GUESSED)


def _direction(place: Place) -> tuple[bool, str]:
    """Whether experts are stored in × out, and how that is known; "" if it is not."""
    declared = getattr(place.owner, "is_transposed", None)
    if isinstance(declared, bool):
        return declared, "module.is_transposed"
    rows, columns = place.parameter.shape[-2:]
    sizes = (getattr(place.owner, "output_size", None), getattr(place.owner, "input_size", None))
    if sizes == (rows, columns):
        return False, "module.output_size"
    for owner in (place.owner, place.config):
        for name in _HIDDEN:
            hidden = getattr(owner, name, None)
            if hidden in (rows, columns) and rows != columns:
                if _DOWN.search(place.attribute):
                    return columns == hidden, f"{name} {hidden}"
                if _UP.search(place.attribute):
                    return rows == hidden, f"{name} {hidden}"
    return False, ""


def _packed_experts(place: Place) -> Choice:
    """Experts one below the other in one matrix: each is a block of its own."""
    count = next(
        (n for name in _EXPERTS if isinstance(n := getattr(place.owner, name, None), int)), 0
    )
    rows = place.parameter.shape[0]
    if not count or rows % count or rows == count:
        return Choice("matrix", f"matrix ({place.attribute})", lay.plain(), GUESSED)
    code = f"pattern(1, expert=({count}, {rows // count}, 1))"
    if family(place.owner, place.config) != "dbrx":
        why = f"it may hold {count} experts of {rows // count} rows"
        return Choice("matrix", why, lay.plain(), UNRESOLVED, None, f"group_muon.{code}")
    layout = lay.pattern(1, expert=(count, rows // count, 1))
    if place.attribute == "w2":  # stored in × out, as its inputs are the experts' hidden units
        layout = layout.replace("rows", "rows transposed", 1)
    return Choice("matrix", f"{count} experts in one matrix", layout)
