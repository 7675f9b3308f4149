"""param_groups: chooses the optimizer and layout for each weight of a model, and says why."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TextIO, TypeGuard

import torch
from torch import Tensor, nn

from group_muon import layouts as lay

# Names under which attention modules, or their configs, declare their sizes.
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "n_local_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "head_size")
_WIDTH = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim")

# Names of attention weights.
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
)
_FUSED = ("query_key_value", "qkv_proj")
_OUTPUT = ("o_proj", "out_proj", "c_proj", "dense", "wo")
# Names of output heads: anywhere in a model, and directly below its root.
_HEAD_ANYWHERE = ("lm_head", "embed_out", "classifier", "score")
_HEAD_AT_TOP = ("head", "output", "out", "unembed", "decoder", "fc")


@dataclass
class _Choice:
    """Optimizer and layout of one weight, and the reason."""

    optimizer: str
    layout: str
    why: str
    partition: str | None = None  # shared with other weights; None: its own


@dataclass
class _Sizes:
    """Sizes that an attention module or its config declares; `source` says where."""

    heads: int
    kv_heads: int
    head_dim: int
    source: str


class _Weighted(Protocol):
    weight: Tensor


_Found = tuple[Tensor, str, str]  # weight, layout, reason
_Row = tuple[str, tuple[int, ...], _Choice]  # name, shape, choice


class _UnresolvedError(Exception):
    """The reason why the weights of an attention module stay on plain Muon."""


def param_groups(
    model: nn.Module,
    group_size: int | str | dict[str, int | str] | None = None,
    rule: str = "random",
    *,
    segments: Sequence[str] = ("q", "k"),
    share_qk: bool = False,
    layouts: dict[str, str] | None = None,
    adamw: Sequence[str] = (),
    verbose: bool = True,
    file: TextIO | None = None,
) -> list[dict[str, Any]]:
    """Returns parameter groups for GroupMuon, and prints a table of all choices.

    Knows the attention weights of Hugging Face GPT-2, Llama, Qwen, Mistral, Phi-3, GPT-NeoX, Bloom,
    Falcon, DeepSeek (MLA) and BERT, of nanoGPT and Llama's own code, and of nn.MultiheadAttention.
    Head counts are read from the module, then from its config, never guessed from a shape. Weights
    that cannot be resolved stay on plain Muon, and the table says so. Embeddings, the output head,
    gains and biases go to AdamW.

    Args:
        group_size: heads per group, for the `segments`; all KV heads if a layer has fewer. Or a
            grouping such as "1@0,6@2000". Or a dict with a size or a grouping for any of "q", "k",
            "v" and "o" (the output projection, by columns), such as
            {"q": 6, "k": "2:interval", "v": "1@0,4@2000"}. None: no groups.
        rule: "adjacent", "interval" or "random", for sizes and groupings without a rule.
        segments: segments that `group_size` applies to, unless it is a dict. The others are
            orthogonalized whole.
        share_qk: Q and K of a layer draw the same random partition.
        layouts: layouts for unknown weights by the end of their names, such as
            {"attn.qkv.weight": group_muon.packed_qkv(12, 64, q="6:random")}.
        adamw: additional weights for AdamW by the end of their names, such as ["fusion.weight"].
        verbose: print the table to `file`, by default standard output.

    Example:
        groups = group_muon.param_groups(model, group_size=6, rule="random")
        optimizer = GroupMuon(groups, lr=3.6e-4, adamw_lr=3.6e-3)
    """
    if isinstance(adamw, str):
        raise TypeError(f"group_muon: adamw should be a list of names, such as ['{adamw}']")
    named = dict.fromkeys(adamw, "") | (layouts or {})
    unused = set(named)
    wanted = _Wanted(group_size, rule, segments, share_qk)
    choices = _choose(model, wanted)
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    rows: list[_Row] = []
    for name, parameter in model.named_parameters():  # lists a tied weight once
        if not parameter.requires_grad:
            continue
        choice = choices.get(id(parameter)) or _default_choice(name, parameter)
        for end in filter(partial(_ends_with, name), named):
            unused.discard(end)
            choice = _Choice(
                "GroupMuon" if named[end] else "AdamW", named[end], "set by the caller"
            )
        rows.append((name, tuple(parameter.shape), choice))
        role = _role(name, choice)
        group = groups.setdefault((role, choice.layout), {"params": [], "role": role})
        group["params"].append((name, parameter))
        if choice.optimizer == "AdamW":
            group["algorithm"] = "adamw"
        else:
            torch.ops.group_muon.check_layout(parameter, choice.layout, name)
            group |= {"algorithm": "muon", "layout": choice.layout}
            group.setdefault("partitions", []).append(choice.partition or _bare(name))
    if unused:
        raise ValueError(f"group_muon: no weight's name ends with '{unused.pop()}'")
    if verbose:
        print(_table(rows) + wanted.missing(rows), file=file or sys.stdout)
    for group in groups.values():
        group["model_weights"] = len(rows)
    return list(groups.values())


def _role(name: str, choice: _Choice) -> str:
    if choice.optimizer != "AdamW":
        return "attention" if _segments(choice.layout) else "matrix"
    if "embedding" in choice.why or "head" in choice.why:
        return "head" if "head" in choice.why else "embedding"
    return "bias" if name.endswith("bias") else "gain" if choice.why == "not a matrix" else "other"


class _Wanted:
    """The groupings the user asked for."""

    def __init__(
        self,
        group_size: int | str | dict[str, int | str] | None,
        rule: str,
        segments: Sequence[str],
        share_qk: bool,
    ) -> None:
        self.rule = rule
        self.share_qk = share_qk
        self.per_segment = isinstance(group_size, dict)
        self.sizes: Mapping[str, int | str | None] = (
            group_size if isinstance(group_size, dict) else dict.fromkeys(segments, group_size)
        )
        for segment in self.sizes:
            if segment not in ("q", "k", "v", "o"):
                raise ValueError(f"group_muon: unknown segment '{segment}': use q, k, v or o")

    def grouping(self, segment: str, heads: int) -> str:
        size = self.sizes.get(segment)
        if size is None:
            return "all"
        # With fewer KV heads than requested, use all. For queries that would hide a mistake.
        if isinstance(size, int) and not self.per_segment and segment in "kv":
            size = min(size, heads)
        return ",".join(self._with_rule(part) for part in str(size).split(","))

    def _with_rule(self, part: str) -> str:
        size, at, step = part.strip().partition("@")
        return part if ":" in size or size == "all" else f"{size}:{self.rule}{at}{step}"

    def missing(self, rows: list[_Row]) -> str:
        """Notes on requested segments that no weight has."""
        found = {name for _, _, choice in rows for name in _segments(choice.layout)}
        found |= {"q"} if "nope" in found else set()
        lost = [s for s, size in self.sizes.items() if size is not None and s not in found]
        return "".join(f"\nnote: no weight has the segment '{s}'" for s in lost)


def _choose(model: nn.Module, wanted: _Wanted) -> dict[int, _Choice]:
    """id(parameter) → choice, for every parameter whose module determines it."""
    choices: dict[int, _Choice] = {}
    config = getattr(model, "config", None)
    for name, module in model.named_modules():
        if layout := _module_layout(module):
            conv = isinstance(module, nn.modules.conv._ConvNd)
            why = "convolution, flattened" if conv else "matrix, in × out"
            # The attention module around it comes first and takes precedence.
            choices.setdefault(id(module.weight), _Choice("GroupMuon", layout, why))
        choices.update(_attention(_bare(name), module, config, wanted))
    # Last, because a weight tied to an embedding or a head always goes to AdamW.
    for name, module in model.named_modules():
        outputs = getattr(module, "get_output_embeddings", lambda: None)
        heads = [outputs()] if callable(outputs) else []
        if _is_head(_bare(name)) and isinstance(module, nn.Linear):
            heads.append(module)
        for head in filter(_has_weight, heads):
            choices[id(head.weight)] = _Choice("AdamW", "", "output head")
    for _, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            choices[id(module.weight)] = _Choice("AdamW", "", "embedding")
    return choices


def _bare(name: str) -> str:
    """A name without the prefixes of torch.compile and DistributedDataParallel."""
    return re.sub(r"(^|(?<=\.))(module|_orig_mod)(\.|$)", "", name)


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _is_head(name: str) -> bool:
    parts = name.split(".")
    at_top = len(parts) == 1 and parts[0] in _HEAD_AT_TOP
    return at_top or parts[0] == "heads" or parts[-1] in _HEAD_ANYWHERE


def _module_layout(module: nn.Module) -> str | None:
    """The layout of a module's weight if it is not out × in."""
    if type(module).__name__ == "Conv1D" and _has_weight(module):  # Hugging Face's
        return lay.transposed(lay.plain())
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return lay.transposed(lay.convolution())
    if isinstance(module, nn.modules.conv._ConvNd):
        return lay.convolution()
    return None


def _default_choice(name: str, parameter: Tensor) -> _Choice:
    last = name.split(".")[-1]
    if parameter.dim() < 2 or max(parameter.shape[:-1]) == 1:
        return _Choice("AdamW", "", "not a matrix")
    if last.endswith("bias"):
        return _Choice("AdamW", "", "bias")
    if "token" in last or ("pos" in last and "emb" in last):
        return _Choice("AdamW", "", "embedding, by its name")
    if parameter.dim() > 2:
        return _Choice("GroupMuon", lay.stacked(lay.plain()), "stack of matrices")
    return _Choice("GroupMuon", lay.plain(), "matrix")


def _attention(name: str, module: nn.Module, config: object, wanted: _Wanted) -> dict[int, _Choice]:
    """The choices for an attention module's weights; empty for other modules."""
    config = getattr(module, "config", config)
    choices: dict[int, _Choice] = {}
    try:
        for resolve in (_multihead_attention, _mla, _separate, _c_attn, _fused):
            for weight, layout, why in resolve(module, config, wanted) or []:
                choices[id(weight)] = _Choice("GroupMuon", layout, why + _tall(weight, layout))
                # Separate Q and K weights share a partition by drawing it under the same name.
                if wanted.share_qk and {"q", "k", "nope"} & set(_segments(layout)):
                    choices[id(weight)].partition = name or type(module).__name__
            if choices:
                return choices
        named = type(module).__name__.lower().endswith("attention")
        declares = any(isinstance(getattr(module, name, None), int) for name in _HEADS)
        if named or declares:
            raise _UnresolvedError(f"{type(module).__name__} is not a known kind of attention")
    except _UnresolvedError as reason:
        why = f"UNRESOLVED, so plain: {reason}"
        for child in [module, *module.children()]:
            own = getattr(child, "weight", None)
            if isinstance(own, Tensor) and own.dim() == 2 and not isinstance(child, nn.Embedding):
                layout = _module_layout(child) or lay.plain()
                choices[id(own)] = _Choice("GroupMuon", layout, why)
    return choices


def _tall(weight: Tensor, layout: str) -> str:
    """A hint if a whole segment has more lines (heads × rows) than its matrix has directions."""
    directions = weight.shape[1 if layout.startswith("rows") else 0]
    extents = re.findall(r"=(\d+)x(\d+)@", layout)
    if all(int(heads) * int(rows) <= directions for heads, rows in extents):
        return ""
    return f"; ungrouped, its heads share {directions} directions"


def _segments(layout: str) -> list[str]:
    return re.findall(r"(\S+)=\d", layout)


def _multihead_attention(module: nn.Module, config: object, wanted: _Wanted) -> list[_Found] | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    sizes = _Sizes(module.num_heads, module.num_heads, module.head_dim, "module.num_heads")
    packed = getattr(module, "in_proj_weight", None)  # None if Q, K and V are separate
    if packed is not None:
        found = [_qkv(packed, lay.packed_qkv, sizes, wanted)]
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        found = [_one(w, s, sizes, wanted) for s, w in zip("qkv", weights, strict=True)]
    return found + _output(module, sizes, wanted)


def _mla(module: nn.Module, config: object, wanted: _Wanted) -> list[_Found] | None:
    """Multi-head latent attention (DeepSeek). The config's head_dim may cover only the rope part."""
    key_value = getattr(module, "kv_b_proj", None)
    if not _has_weight(key_value):
        return None
    heads, source = _declared(module, config, _HEADS)
    nope, rope, value = (
        _declared(module, config, (name,))[0]
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    why = f"MLA, {heads} heads ({source})"
    _expect(key_value.weight, heads * (nope + value), source)
    layout = lay.mla_key_value(
        heads, nope, value, wanted.grouping("k", heads), wanted.grouping("v", heads)
    )
    found = [(key_value.weight, layout, f"{why}, k {nope} + v {value} rows")]
    query = _child(module, ("q_b_proj", "q_proj"))
    if query is not None:
        _expect(query.weight, heads * (nope + rope), source)
        layout = lay.mla_query(heads, nope, rope, wanted.grouping("q", heads))
        found.append((query.weight, layout, f"{why}, nope {nope} + rope {rope} rows"))
    return found + _output(module, _Sizes(heads, heads, value, source), wanted)


def _separate(module: nn.Module, config: object, wanted: _Wanted) -> list[_Found] | None:
    """Q, K and V as three weights."""
    for names in _SEPARATE:
        children = [c for n in names if _has_weight(c := getattr(module, n, None))]
        if len(children) == len(names):
            sizes = _sizes(module, config)
            if wanted.share_qk and sizes.heads != sizes.kv_heads:
                raise ValueError(
                    f"group_muon: {sizes.heads} query heads and {sizes.kv_heads} KV heads cannot share "
                    "a random partition; set share_qk=False"
                )
            parts = zip("qkv", children, strict=True)
            found = [_one(child.weight, segment, sizes, wanted) for segment, child in parts]
            return found + _output(module, sizes, wanted)
    return None


def _c_attn(module: nn.Module, config: object, wanted: _Wanted) -> list[_Found] | None:
    """GPT-2 and nanoGPT: all of Q, then K, then V. Hugging Face's Conv1D stores it as in × out."""
    child = getattr(module, "c_attn", None)
    if not _has_weight(child):
        return None
    if hasattr(module, "q_attn"):
        raise _UnresolvedError("cross-attention packs K and V without Q")
    flipped = type(child).__name__ == "Conv1D"
    sizes = _sizes(module, config)
    order = lay.packed_qkv
    if _family(module, config) == "gpt_bigcode":
        multi_query = _flag(config, "multi_query")
        sizes.kv_heads = 1 if multi_query else sizes.heads
        order = lay.packed_qkv if multi_query else lay.interleaved_qkv
    found = _qkv(child.weight, order, sizes, wanted, flipped)
    return [found, *_output(module, sizes, wanted, flipped)]


def _fused(module: nn.Module, config: object, wanted: _Wanted) -> list[_Found] | None:
    """Q, K and V in one weight, in an order that depends on the model family."""
    child = _child(module, _FUSED)
    if child is None:
        return None
    sizes = _sizes(module, config)
    family = _family(module, config)
    if family in ("gpt_neox", "bloom"):
        order = lay.interleaved_qkv
    elif family == "falcon":
        grouped = _flag(config, "new_decoder_architecture")
        multi_query = _flag(config, "multi_query")
        if not grouped:
            sizes.kv_heads = 1 if multi_query else sizes.heads
        order = lay.packed_qkv if multi_query and not grouped else lay.interleaved_qkv
    elif family == "phi3":
        order = lay.packed_qkv
    else:
        raise _UnresolvedError(f"the row order of fused weights in '{family}' is unknown")
    return [_qkv(child.weight, order, sizes, wanted), *_output(module, sizes, wanted)]


def _qkv(
    weight: Tensor,
    order: Callable[..., str],
    sizes: _Sizes,
    wanted: _Wanted,
    flipped: bool = False,
) -> _Found:
    """A weight that holds Q, K and V, in that order."""
    heads, kv_heads, head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    _expect(weight, (heads + 2 * kv_heads) * head_dim, sizes.source, axis=1 if flipped else 0)
    layout = order(
        heads,
        head_dim,
        kv_heads,
        q=wanted.grouping("q", heads),
        k=wanted.grouping("k", kv_heads),
        v=wanted.grouping("v", kv_heads),
        share_qk=wanted.share_qk,
    )
    kind = "packed" if order is lay.packed_qkv else "interleaved"
    why = f"{kind} QKV, {_heads_text(heads, kv_heads)} × {head_dim} ({sizes.source})"
    return (
        (weight, lay.transposed(layout), why + ", in × out") if flipped else (weight, layout, why)
    )


def _one(weight: Tensor, segment: str, sizes: _Sizes, wanted: _Wanted) -> _Found:
    """A weight that holds Q, K or V."""
    heads = sizes.heads if segment == "q" else sizes.kv_heads
    _expect(weight, heads * sizes.head_dim, sizes.source)
    layout = lay.separate(heads, sizes.head_dim, wanted.grouping(segment, heads), segment)
    why = f"{segment.upper()}, {heads} heads × {sizes.head_dim} ({sizes.source})"
    return weight, layout, why


def _output(
    module: nn.Module, sizes: _Sizes, wanted: _Wanted, flipped: bool = False
) -> list[_Found]:
    """The output projection, whose heads are columns (or rows, if stored as in × out)."""
    child = _child(module, _OUTPUT)
    if child is None:
        return []
    _expect(child.weight, sizes.heads * sizes.head_dim, sizes.source, axis=0 if flipped else 1)
    layout = lay.output_projection(sizes.heads, sizes.head_dim, wanted.grouping("o", sizes.heads))
    why = f"output projection, {sizes.heads} heads × {sizes.head_dim} ({sizes.source})"
    return [(child.weight, lay.transposed(layout) if flipped else layout, why)]


def _family(module: nn.Module, config: object) -> str:
    return getattr(config, "model_type", type(module).__name__)


def _sizes(module: nn.Module, config: object) -> _Sizes:
    heads, source = _declared(module, config, _HEADS)
    kv_heads, _ = _declared(module, config, _KV_HEADS, default=heads)
    head_dim, _ = _declared(module, config, _HEAD_DIM, default=0)
    if not head_dim:
        head_dim = _declared(module, config, _WIDTH)[0] // heads
    return _Sizes(heads, kv_heads, head_dim, source)


def _declared(
    module: nn.Module, config: object, names: tuple[str, ...], default: int | None = None
) -> tuple[int, str]:
    """The first of these numbers that the module or its config declares, and where."""
    for owner, place in ((module, "module"), (config, "config")):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value, f"{place}.{name}"
    if default is None:
        raise _UnresolvedError(f"neither the module nor its config declares {' or '.join(names)}")
    return default, "default"


def _expect(weight: Tensor, extent: int, source: str, axis: int = 0) -> None:
    if weight.dim() != 2 or weight.shape[axis] != extent:
        side = ("rows", "columns")[axis]
        raise _UnresolvedError(
            f"{extent} {side} declared ({source}), but the shape is {tuple(weight.shape)}"
        )


def _has_weight(module: object) -> TypeGuard[_Weighted]:
    return isinstance(getattr(module, "weight", None), Tensor)


def _child(module: nn.Module, names: tuple[str, ...]) -> _Weighted | None:
    """The first of these children that has a weight."""
    return next(filter(_has_weight, (getattr(module, name, None) for name in names)), None)


def _flag(config: object, name: str) -> bool:
    return bool(getattr(config, name))


def _heads_text(heads: int, kv_heads: int) -> str:
    return f"{heads} heads" if heads == kv_heads else f"{heads} heads, {kv_heads} KV heads"


def _table(rows: list[_Row]) -> str:
    """One line for all weights that differ only in the layer number."""
    merged: dict[tuple[str, str, str, str, str], int] = {}
    for name, shape, choice in rows:
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        shape_text = "×".join(map(str, shape))
        key = (pattern, shape_text, choice.optimizer, _groups_text(choice.layout), choice.why)
        merged[key] = merged.get(key, 0) + 1
    header = ("weight", "count", "shape", "optimizer", "groups", "why")
    lines = [header] + [(name, str(count), *rest) for (name, *rest), count in merged.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def _groups_text(layout: str) -> str:
    """'rows q=12x64@0+64/6:random~1 …' → 'q 12/6:random …'."""
    found = re.findall(r"(\S+)=(\d+)x[^/]*/([^~\s]+)", layout)
    return " ".join(f"{name} {heads}/{grouping}" for name, heads, grouping in found) or "-"
