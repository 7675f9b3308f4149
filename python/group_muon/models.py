"""param_groups: which weight of a model gets which optimizer and which layout, and why."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TextIO

import torch
from torch import Tensor, nn

from group_muon import layouts as lay

# Names under which attention layers declare their sizes, on the module or on its config.
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "n_local_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "head_size")
_WIDTH = ("embed_dim", "hidden_size", "n_embd", "d_model", "dim")

# Names of their weights.
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
)
_FUSED = ("query_key_value", "qkv_proj")
_OUTPUT = ("o_proj", "out_proj", "c_proj", "dense", "wo")
# Output heads: by these names anywhere in a model, and by those directly below its root.
_HEAD_ANYWHERE = ("lm_head", "embed_out", "classifier", "score")
_HEAD_AT_TOP = ("head", "output", "out", "unembed", "decoder", "fc")


@dataclass
class _Choice:
    """What becomes of one weight."""

    optimizer: str
    layout: str
    why: str
    partition: str | None = None  # shared with other weights; None: the weight's own


@dataclass
class _Sizes:
    """What an attention module, or its config, declares; `source` says where."""

    heads: int
    kv_heads: int
    head_dim: int
    source: str


class _Unresolved(Exception):
    """Says why the weights of an attention module stay on plain Muon."""


def param_groups(
    model: nn.Module,
    group_size: int | str | dict[str, int | str] | None,
    rule: str = "random",
    *,
    segments: tuple[str, ...] = ("q", "k"),
    share_qk: bool = False,
    layouts: dict[str, str] | None = None,
    adamw: Sequence[str] = (),
    verbose: bool = True,
    file: TextIO | None = None,
) -> tuple[list[dict], list[dict]]:
    """Parameter groups for GroupMuon and for AdamW, and a table of what went where and why.

    Knows the attention weights of Hugging Face GPT-2, Llama, Qwen, Mistral, Phi-3, GPT-NeoX, Bloom,
    Falcon, DeepSeek (MLA) and BERT, of nanoGPT and Llama's own code, and of nn.MultiheadAttention.
    Head counts are read from the module, then from its config, never guessed from a shape. What
    cannot be resolved stays on plain Muon, and the table says so. Embeddings, the output head, gains
    and biases go to AdamW.

    Args:
        group_size: heads in a group, for the `segments`; where a layer has fewer KV heads, all of
            those. Or a grouping text such as "1@0,6@2000". Or a dict with a size or a grouping text for each
            of "q", "k", "v" and "o" (the output projection, by columns), such as
            {"q": 6, "k": "2:interval", "v": "1@0,4@2000"}. None: no groups.
        rule: "adjacent", "interval" or "random", where a grouping text names none.
        segments: what a `group_size` that is a number is for; the rest is orthogonalized whole.
        share_qk: Q and K of a layer draw the same random partition.
        layouts: layouts of your own for weights it does not know, by the ends of their names, such
            as {"attn.qkv.weight": group_muon.packed_qkv(12, 64, q="6:random")}.
        adamw: further weights for AdamW, by the ends of their names, such as ["fusion.weight"].
        verbose: print the table, to `file` or standard output.

    Example:
        muon, adamw = group_muon.param_groups(model, group_size=6, rule="random")
        optimizers = [GroupMuon(muon, lr=3.6e-4), torch.optim.AdamW(adamw, lr=3.6e-3)]
    """
    if isinstance(adamw, str):
        raise TypeError(f"group_muon: adamw should be a list of names, such as ['{adamw}']")
    named = dict.fromkeys(adamw, "") | (layouts or {})
    unused = set(named)
    wanted = _Wanted(group_size, rule, segments, share_qk)
    choices = _choose(model, wanted)
    muon_groups: dict[str, dict] = {}
    adamw_params: list = []
    rows = []
    for name, parameter in model.named_parameters():  # a tied weight comes once
        if not parameter.requires_grad:
            continue
        choice = choices.get(id(parameter)) or _default_choice(name, parameter)
        for end in filter(partial(_ends_with, name), named):
            unused.discard(end)
            choice = _Choice("GroupMuon" if named[end] else "AdamW", named[end], "as you said")
        rows.append((name, tuple(parameter.shape), choice))
        if choice.optimizer == "AdamW":
            adamw_params.append((name, parameter))
        else:
            torch.ops.group_muon.check_layout(parameter, choice.layout, name)
            empty = {"params": [], "layout": choice.layout, "partitions": []}
            group = muon_groups.setdefault(choice.layout, empty)
            group["params"].append((name, parameter))
            group["partitions"].append(choice.partition or _bare(name))
    if unused:
        raise ValueError(f"group_muon: no weight's name ends with '{unused.pop()}'")
    if verbose:
        print(_table(rows) + wanted.missing(rows), file=file or sys.stdout)
    return list(muon_groups.values()), [{"params": adamw_params}] if adamw_params else []


class _Wanted:
    """The groupings the user asked for."""

    def __init__(self, group_size, rule: str, segments: tuple[str, ...], share_qk: bool):
        self.rule = rule
        self.share_qk = share_qk
        self.per_segment = isinstance(group_size, dict)
        self.sizes = group_size if self.per_segment else dict.fromkeys(segments, group_size)
        for segment in self.sizes:
            if segment not in ("q", "k", "v", "o"):
                raise ValueError(f"group_muon: unknown segment '{segment}': use q, k, v or o")

    def grouping(self, segment: str, heads: int) -> str:
        size = self.sizes.get(segment)
        if size is None:
            return "all"
        # Fewer KV heads than asked for: all of them. Not for queries, where it would be a mistake.
        if isinstance(size, int) and not self.per_segment and segment in "kv":
            size = min(size, heads)
        return ",".join(self._with_rule(part) for part in str(size).split(","))

    def _with_rule(self, part: str) -> str:
        size, at, step = part.strip().partition("@")
        return part if ":" in size or size == "all" else f"{size}:{self.rule}{at}{step}"

    def missing(self, rows: list) -> str:
        """Says which of the segments asked for no weight has."""
        found = {name for _, _, choice in rows for name in _segments(choice.layout)}
        found |= {"q"} if "nope" in found else set()
        lost = [s for s, size in self.sizes.items() if size is not None and s not in found]
        return "".join(f"\nnote: no weight was found that holds the segment '{s}'" for s in lost)


def _choose(model: nn.Module, wanted: _Wanted) -> dict[int, _Choice]:
    """id(parameter) → choice, for every parameter of which a module says something."""
    choices: dict[int, _Choice] = {}
    config = getattr(model, "config", None)
    for name, module in model.named_modules():
        if layout := _module_layout(module):
            conv = isinstance(module, nn.modules.conv._ConvNd)
            why = "convolution, flattened" if conv else "matrix, in × out"
            # Not if the attention module around it, which comes first, knows more.
            choices.setdefault(id(module.weight), _Choice("GroupMuon", layout, why))
        choices.update(_attention(_bare(name), module, config, wanted))
    # Last, since a weight tied to an embedding or a head is AdamW's whatever else it is.
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
    """A name without what torch.compile and DistributedDataParallel put before it."""
    return re.sub(r"(^|(?<=\.))(module|_orig_mod)(\.|$)", "", name)


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _is_head(name: str) -> bool:
    parts = name.split(".")
    at_top = len(parts) == 1 and parts[0] in _HEAD_AT_TOP
    return at_top or parts[0] == "heads" or parts[-1] in _HEAD_ANYWHERE


def _module_layout(module: nn.Module) -> str | None:
    """The layout of a weight that is not simply out × in."""
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
    """The choices for an attention module's weights; nothing for other modules."""
    config = getattr(module, "config", config)
    choices: dict[int, _Choice] = {}
    try:
        for resolve in (_multihead_attention, _mla, _separate, _c_attn, _fused):
            for weight, layout, why in resolve(module, config, wanted) or []:
                choices[id(weight)] = _Choice("GroupMuon", layout, why + _tall(weight, layout))
                # Q and K as weights of their own share a partition by drawing it under one name.
                if wanted.share_qk and {"q", "k", "nope"} & set(_segments(layout)):
                    choices[id(weight)].partition = name or type(module).__name__
            if choices:
                return choices
        named = type(module).__name__.lower().endswith("attention")
        declares = any(isinstance(getattr(module, name, None), int) for name in _HEADS)
        if named or declares:
            raise _Unresolved(f"{type(module).__name__} is not a known kind of attention")
    except _Unresolved as reason:
        why = f"UNRESOLVED, so plain: {reason}"
        for child in [module, *module.children()]:
            weight = getattr(child, "weight", None)
            if (
                isinstance(weight, Tensor)
                and weight.dim() == 2
                and not isinstance(child, nn.Embedding)
            ):
                layout = _module_layout(child) or lay.plain()
                choices[id(weight)] = _Choice("GroupMuon", layout, why)
    return choices


def _tall(weight: Tensor, layout: str) -> str:
    """A hint where the heads of a whole segment are more than its matrix has directions."""
    directions = weight.shape[1 if layout.startswith("rows") else 0]
    extents = re.findall(r"=(\d+)x(\d+)@", layout)
    if all(int(heads) * int(rows) <= directions for heads, rows in extents):
        return ""
    return f"; ungrouped, its heads share {directions} directions"


def _segments(layout: str) -> list[str]:
    return re.findall(r"(\S+)=\d", layout)


def _multihead_attention(module: nn.Module, config: object, wanted: _Wanted):
    if not isinstance(module, nn.MultiheadAttention):
        return None
    sizes = _Sizes(module.num_heads, module.num_heads, module.head_dim, "module.num_heads")
    if module.in_proj_weight is not None:
        found = [_qkv(module.in_proj_weight, lay.packed_qkv, sizes, wanted)]
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        found = [_one(weight, segment, sizes, wanted) for segment, weight in zip("qkv", weights)]
    return found + _output(module, sizes, wanted)


def _mla(module: nn.Module, config: object, wanted: _Wanted):
    """Multi-head latent attention, as in DeepSeek. Its config's head_dim may be the rope part only."""
    if not _has_weight(getattr(module, "kv_b_proj", None)):
        return None
    heads, source = _declared(module, config, _HEADS)
    nope, rope, value = (
        _declared(module, config, (name,))[0]
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    why = f"MLA, {heads} heads ({source})"
    _expect(module.kv_b_proj.weight, heads * (nope + value), source)
    key_value = lay.mla_key_value(
        heads, nope, value, wanted.grouping("k", heads), wanted.grouping("v", heads)
    )
    found = [(module.kv_b_proj.weight, key_value, f"{why}, k {nope} + v {value} rows")]
    query = next(
        (
            getattr(module, n)
            for n in ("q_b_proj", "q_proj")
            if _has_weight(getattr(module, n, None))
        ),
        None,
    )
    if query is not None:
        _expect(query.weight, heads * (nope + rope), source)
        layout = lay.mla_query(heads, nope, rope, wanted.grouping("q", heads))
        found.append((query.weight, layout, f"{why}, nope {nope} + rope {rope} rows"))
    return found + _output(module, _Sizes(heads, heads, value, source), wanted)


def _separate(module: nn.Module, config: object, wanted: _Wanted):
    """Q, K and V as three weights."""
    for names in _SEPARATE:
        children = [getattr(module, name, None) for name in names]
        if all(_has_weight(child) for child in children):
            sizes = _sizes(module, config)
            if wanted.share_qk and sizes.heads != sizes.kv_heads:
                raise ValueError(
                    f"group_muon: {sizes.heads} query heads and {sizes.kv_heads} KV heads cannot share "
                    "a random partition; leave share_qk off"
                )
            found = [_one(c.weight, segment, sizes, wanted) for segment, c in zip("qkv", children)]
            return found + _output(module, sizes, wanted)
    return None


def _c_attn(module: nn.Module, config: object, wanted: _Wanted):
    """GPT-2 and nanoGPT: all of Q, then K, then V; Hugging Face's Conv1D stores it in × out."""
    child = getattr(module, "c_attn", None)
    if not _has_weight(child):
        return None
    if hasattr(module, "q_attn"):
        raise _Unresolved("cross-attention packs K and V without Q")
    flipped = type(child).__name__ == "Conv1D"
    sizes = _sizes(module, config)
    order = lay.packed_qkv
    if _family(module, config) == "gpt_bigcode":
        sizes.kv_heads = 1 if config.multi_query else sizes.heads
        order = lay.packed_qkv if config.multi_query else lay.interleaved_qkv
    return [_qkv(child.weight, order, sizes, wanted, flipped)] + _output(
        module, sizes, wanted, flipped
    )


def _fused(module: nn.Module, config: object, wanted: _Wanted):
    """Q, K and V in one weight, in an order that only the model family tells."""
    child = next((c for n in _FUSED if _has_weight(c := getattr(module, n, None))), None)
    if child is None:
        return None
    sizes = _sizes(module, config)
    family = _family(module, config)
    if family in ("gpt_neox", "bloom"):
        order = lay.interleaved_qkv
    elif family == "falcon":
        grouped = config.new_decoder_architecture
        if not grouped:
            sizes.kv_heads = 1 if config.multi_query else sizes.heads
        order = lay.packed_qkv if config.multi_query and not grouped else lay.interleaved_qkv
    elif family == "phi3":
        order = lay.packed_qkv
    else:
        raise _Unresolved(f"the order of rows in a fused weight of '{family}' is not known")
    return [_qkv(child.weight, order, sizes, wanted)] + _output(module, sizes, wanted)


def _qkv(weight: Tensor, order: Callable, sizes: _Sizes, wanted: _Wanted, flipped: bool = False):
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


def _one(weight: Tensor, segment: str, sizes: _Sizes, wanted: _Wanted):
    """A weight that holds Q, K or V."""
    heads = sizes.heads if segment == "q" else sizes.kv_heads
    _expect(weight, heads * sizes.head_dim, sizes.source)
    layout = lay.separate(heads, sizes.head_dim, wanted.grouping(segment, heads), segment)
    why = f"{segment.upper()}, {heads} heads × {sizes.head_dim} ({sizes.source})"
    return weight, layout, why


def _output(module: nn.Module, sizes: _Sizes, wanted: _Wanted, flipped: bool = False) -> list:
    """The output projection, whose heads are columns (rows, where it is stored in × out)."""
    child = next((c for n in _OUTPUT if _has_weight(c := getattr(module, n, None))), None)
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
    """The first of these numbers that the module, or else its config, declares; and where."""
    for owner, place in ((module, "module"), (config, "config")):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value, f"{place}.{name}"
    if default is None:
        raise _Unresolved(f"neither the module nor its config declares {' or '.join(names)}")
    return default, "default"


def _expect(weight: Tensor, extent: int, source: str, axis: int = 0) -> None:
    if weight.dim() != 2 or weight.shape[axis] != extent:
        side = ("rows", "columns")[axis]
        raise _Unresolved(
            f"{extent} {side} declared ({source}), but the shape is {tuple(weight.shape)}"
        )


def _has_weight(module) -> bool:
    return isinstance(getattr(module, "weight", None), Tensor)


def _heads_text(heads: int, kv_heads: int) -> str:
    return f"{heads} heads" if heads == kv_heads else f"{heads} heads, {kv_heads} KV heads"


def _table(rows: list[tuple[str, tuple, _Choice]]) -> str:
    """One line for all weights that differ in the layer's number only."""
    merged: dict[tuple, int] = {}
    for name, shape, choice in rows:
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        shape_text = "×".join(map(str, shape))
        key = (pattern, shape_text, choice.optimizer, _groups_text(choice.layout), choice.why)
        merged[key] = merged.get(key, 0) + 1
    header = ("weight", "count", "shape", "optimizer", "groups", "why")
    lines = [header] + [(name, str(count), *rest) for (name, *rest), count in merged.items()]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def _groups_text(layout: str) -> str:
    """'rows q=12x64@0+64/6:random~1 …' → 'q 12/6:random …'."""
    found = re.findall(r"(\S+)=(\d+)x[^/]*/([^~\s]+)", layout)
    return " ".join(f"{name} {heads}/{grouping}" for name, heads, grouping in found) or "-"
