"""param_groups: which weight of a model gets which optimizer and which layout, and why."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from torch import Tensor, nn

from group_muon import layouts

# Names under which attention layers declare their sizes, on the module or on its config.
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
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
_MODEL_HEAD = ("lm_head", "embed_out", "output", "head", "classifier", "score")


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
    group_size: int | dict[str, int | str] | None = 6,
    rule: str = "random",
    *,
    segments: tuple[str, ...] = ("q", "k"),
    share_qk: bool = False,
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
        group_size: heads in a group, for the `segments`; where a layer has fewer heads (as for keys
            in grouped-query attention), all of them. Or a dict with a size or a grouping text for each
            of "q", "k", "v" and "o" (the output projection, by columns), such as
            {"q": 6, "k": "2:interval", "v": "1@0,4@2000"}. None: no groups.
        rule: "adjacent", "interval" or "random".
        segments: what a `group_size` that is a number is for; the rest is orthogonalized whole.
        share_qk: Q and K of a layer draw the same random partition.
        verbose: print the table, to `file` or standard output.

    Example:
        muon, adamw = group_muon.param_groups(model, group_size=6, rule="random")
        optimizers = [GroupMuon(muon, lr=3.6e-4), torch.optim.AdamW(adamw, lr=3.6e-3, fused=True)]
    """
    choices = _choose(model, _Wanted(group_size, rule, segments, share_qk))
    muon: dict[str, dict] = {}
    adamw: list = []
    rows = []
    for name, parameter in model.named_parameters():  # a tied weight comes once
        if not parameter.requires_grad:
            continue
        choice = choices.get(id(parameter)) or _default_choice(parameter)
        rows.append((name, tuple(parameter.shape), choice))
        if choice.optimizer == "AdamW":
            adamw.append((name, parameter))
        else:
            empty = {"params": [], "layout": choice.layout, "partitions": []}
            group = muon.setdefault(choice.layout, empty)
            group["params"].append((name, parameter))
            group["partitions"].append(choice.partition or name)
    if verbose:
        print(_table(rows), file=file or sys.stdout)
    return list(muon.values()), [{"params": adamw}] if adamw else []


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
        if size is None or isinstance(size, str):
            return size or "all"
        return layouts.grouping(size if self.per_segment else min(size, heads), self.rule)


def _choose(model: nn.Module, wanted: _Wanted) -> dict[int, _Choice]:
    """id(parameter) → choice, for every parameter of which a module says something."""
    choices: dict[int, _Choice] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            layout = layouts.convolution()
            choices[id(module.weight)] = _Choice("GroupMuon", layout, "convolution, flattened")
        choices.update(_attention(name, module, wanted))
    # Last, since a weight tied to an embedding or a head is AdamW's whatever else it is.
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            choices[id(module.weight)] = _Choice("AdamW", "", "embedding")
        elif name in _MODEL_HEAD and isinstance(module, nn.Linear):
            choices.setdefault(id(module.weight), _Choice("AdamW", "", "output head"))
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if _has_weight(output):
        choices.setdefault(id(output.weight), _Choice("AdamW", "", "output head"))
    return choices


def _default_choice(parameter: Tensor) -> _Choice:
    if parameter.dim() < 2:
        return _Choice("AdamW", "", "not a matrix")
    if parameter.dim() == 3:
        return _Choice("GroupMuon", layouts.stacked(layouts.plain()), "stack of matrices")
    return _Choice("GroupMuon", layouts.plain(), "matrix")


def _attention(name: str, module: nn.Module, wanted: _Wanted) -> dict[int, _Choice]:
    """The choices for an attention module's weights; nothing for other modules."""
    # Q and K as weights of their own share a partition by drawing it under the module's name.
    partition = (name or type(module).__name__) if wanted.share_qk else None
    try:
        for resolve in (_multihead_attention, _mla, _separate, _c_attn, _fused):
            if found := resolve(module, wanted):
                return {
                    id(w): _Choice("GroupMuon", layout, why, partition) for w, layout, why in found
                }
        if type(module).__name__.lower().endswith("attention") and any(
            isinstance(child, nn.Linear) for child in module.children()
        ):
            raise _Unresolved(f"{type(module).__name__} is not a known kind of attention")
    except _Unresolved as reason:
        why = f"UNRESOLVED, so plain: {reason}"
        own = (p for p in module.parameters() if p.dim() == 2)
        return {id(p): _Choice("GroupMuon", layouts.plain(), why) for p in own}
    return {}


def _multihead_attention(module: nn.Module, wanted: _Wanted):
    if not isinstance(module, nn.MultiheadAttention):
        return None
    sizes = _Sizes(module.num_heads, module.num_heads, module.head_dim, "module.num_heads")
    if module.in_proj_weight is not None:
        found = [_qkv(module.in_proj_weight, layouts.packed_qkv, sizes, wanted)]
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        found = [_one(weight, segment, sizes, wanted) for segment, weight in zip("qkv", weights)]
    return found + _output(module, sizes, wanted)


def _mla(module: nn.Module, wanted: _Wanted):
    """Multi-head latent attention, as in DeepSeek. Its config's head_dim may be the rope part only."""
    if not _has_weight(getattr(module, "kv_b_proj", None)):
        return None
    heads, source = _declared(module, _HEADS)
    nope, rope, value = (
        _declared(module, (name,))[0]
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    why = f"MLA, {heads} heads ({source})"
    _expect(module.kv_b_proj.weight, heads * (nope + value), source)
    key_value = layouts.mla_key_value(
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
        layout = layouts.mla_query(heads, nope, rope, wanted.grouping("q", heads))
        found.append((query.weight, layout, f"{why}, nope {nope} + rope {rope} rows"))
    return found + _output(module, _Sizes(heads, heads, value, source), wanted)


def _separate(module: nn.Module, wanted: _Wanted):
    """Q, K and V as three weights."""
    for names in _SEPARATE:
        children = [getattr(module, name, None) for name in names]
        if all(_has_weight(child) for child in children):
            sizes = _sizes(module)
            if wanted.share_qk and sizes.heads != sizes.kv_heads:
                raise ValueError(
                    f"group_muon: {sizes.heads} query heads and {sizes.kv_heads} KV heads cannot share "
                    "a random partition; leave share_qk off"
                )
            found = [_one(c.weight, segment, sizes, wanted) for segment, c in zip("qkv", children)]
            return found + _output(module, sizes, wanted)
    return None


def _c_attn(module: nn.Module, wanted: _Wanted):
    """GPT-2 and nanoGPT: all of Q, then K, then V; Hugging Face's Conv1D stores it in × out."""
    child = getattr(module, "c_attn", None)
    if not _has_weight(child):
        return None
    if hasattr(module, "q_attn"):
        raise _Unresolved("cross-attention packs K and V without Q")
    flipped = type(child).__name__ == "Conv1D"
    sizes = _sizes(module)
    weight, layout, why = _qkv(child.weight, layouts.packed_qkv, sizes, wanted, flipped)
    return [(weight, layout, why)] + _output(module, sizes, wanted, flipped)


def _fused(module: nn.Module, wanted: _Wanted):
    """Q, K and V in one weight, in an order that only the model family tells."""
    child = next((c for n in _FUSED if _has_weight(c := getattr(module, n, None))), None)
    if child is None:
        return None
    sizes = _sizes(module)
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", type(module).__name__)
    if family in ("gpt_neox", "bloom"):
        order = layouts.interleaved_qkv
    elif family == "falcon":
        grouped = config.new_decoder_architecture
        if not grouped:
            sizes.kv_heads = 1 if config.multi_query else sizes.heads
        order = (
            layouts.packed_qkv if config.multi_query and not grouped else layouts.interleaved_qkv
        )
    elif family == "phi3":
        order = layouts.packed_qkv
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
    kind = "packed" if order is layouts.packed_qkv else "interleaved"
    why = f"{kind} QKV, {_heads_text(heads, kv_heads)} × {head_dim} ({sizes.source})"
    return (
        (weight, layouts.transposed(layout), why + ", in × out")
        if flipped
        else (weight, layout, why)
    )


def _one(weight: Tensor, segment: str, sizes: _Sizes, wanted: _Wanted):
    """A weight that holds Q, K or V."""
    heads = sizes.heads if segment == "q" else sizes.kv_heads
    _expect(weight, heads * sizes.head_dim, sizes.source)
    layout = layouts.separate(heads, sizes.head_dim, wanted.grouping(segment, heads), segment)
    why = f"{segment.upper()}, {heads} heads × {sizes.head_dim} ({sizes.source})"
    rows, columns = weight.shape
    if rows > columns:
        why += f"; taller than wide: ungrouped, heads share {columns} directions"
    return weight, layout, why


def _output(module: nn.Module, sizes: _Sizes, wanted: _Wanted, flipped: bool = False) -> list:
    """The output projection, whose heads are columns (rows, where it is stored in × out)."""
    child = next((c for n in _OUTPUT if _has_weight(c := getattr(module, n, None))), None)
    if child is None:
        return []
    _expect(child.weight, sizes.heads * sizes.head_dim, sizes.source, axis=0 if flipped else 1)
    layout = layouts.output_projection(
        sizes.heads, sizes.head_dim, wanted.grouping("o", sizes.heads)
    )
    why = f"output projection, {sizes.heads} heads × {sizes.head_dim} ({sizes.source})"
    return [(child.weight, layouts.transposed(layout) if flipped else layout, why)]


def _sizes(module: nn.Module) -> _Sizes:
    heads, source = _declared(module, _HEADS)
    kv_heads, _ = _declared(module, _KV_HEADS, default=heads)
    head_dim, _ = _declared(module, _HEAD_DIM, default=0)
    if not head_dim:
        head_dim = _declared(module, _WIDTH)[0] // heads
    return _Sizes(heads, kv_heads, head_dim, source)


def _declared(
    module: nn.Module, names: tuple[str, ...], default: int | None = None
) -> tuple[int, str]:
    """The first of these numbers that the module, or else its config, declares; and where."""
    for owner, place in ((module, "module"), (getattr(module, "config", None), "config")):
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
