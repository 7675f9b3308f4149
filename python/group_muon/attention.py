"""Where the heads lie in the attention weights of a model: rules for the attention modules we know."""

import re
from collections.abc import Callable, Iterator
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
    bare,
    class_name,
    segments_of,
    stored_in_by_out,
    weight_of,
)
from group_muon.sizes import (
    HEADS,
    Site,
    Sizes,
    UnresolvedError,
    declared,
    declares_heads,
    named_attention,
    sizes_of,
)

# Names of attention weights.
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("linear_q", "linear_k", "linear_v"),
    ("c_q", "c_k", "c_v"),
    ("Wq", "Wk", "Wv"),
    ("query_key", "query_key", "value"),  # Reformer: queries and keys are the same
)
# Further weights of such a module, and what they make.
_BESIDE = {
    "query_global": "q", "key_global": "k", "value_global": "v",  # Longformer
    "pos_q_proj": "q", "pos_query_proj": "q", "pos_proj": "k", "pos_key_proj": "k",  # DeBERTa
    "linear_pos": "k", "relative_k_proj": "k",  # Conformers: keys of positions
}  # fmt: skip
_OUTPUT = (
    "o_proj", "out_proj", "c_proj", "dense", "wo", "o", "out_lin", "Wo", "proj", "projection", "to_out",
    "linear_out", "output_proj", "output", "projection_layer", "post",
)  # fmt: skip
_FUSED = ("query_key_value", "qkv_proj", "Wqkv", "qkv", "qkv_linear", "in_proj")

# Row orders of fused weights, by family.
_INTERLEAVED = ("gpt_neox", "gpt_neox_japanese", "bloom", "persimmon", "deberta")
_PACKED = (
    "phi3", "phi4_multimodal", "modernbert", "modernbert_decoder", "mpt", "dbrx", "layoutlmv2",
    "blip", "blip_2", "instructblip", "instructblipvideo", "deepseek_ocr2", "got_ocr2", "hiera", "mgp_str",
    "pp_formulanet", "sam", "sam2", "sam_hq", "seggpt", "slanext", "timesformer", "unlimited_ocr", "vitdet",
    "cohere_compass", "ernie4_5_vl_moe", "exaone4_5", "glm4v", "glm4v_moe", "glm5_next", "glm_image",
    "glm_ocr", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5",
    "qwen3_5_moe", "qwen4_exp", "pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec", "pp_ocrv6_small_rec",
)  # fmt: skip
_PACKED_IN_TIMM = (
    "attention", "vision_transformer", "vision_transformer_relpos", "vision_transformer_sam", "eva", "beit",
    "cait", "convit", "hiera", "hieradet_sam2", "metaformer", "mvitv2", "nest", "swin_transformer",
    "swin_transformer_v2", "swin_transformer_v2_cr", "volo",
)  # fmt: skip
# Families whose c_attn is all of Q, then K, then V.
_C_ATTN = ("gpt2", "openai", "imagegpt", "decision_transformer", "gpt_bigcode")
# Families whose q_proj holds query and gate rows of each head.
_GATED = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")

# Children of an attention module that make queries, keys or values, by their names.
_QKV_LIKE = re.compile(r"(^|_)w?(q|k|v|qk|kv|qkv|query|key|value)(_|$)|^r_proj$|^pos_proj$")
_OUTPUT_LIKE = re.compile(r"^(o|out|output|proj|dense|post)(_|$)|_(o|out|output)$")
_HEADLESS = re.compile(r"norm|conv|bias|(^|_)a_proj|kv_a_proj_with_mqa")


@dataclass
class _Projection:
    """A weight of an attention module, and the layer it belongs to."""

    weight: Tensor
    layer: nn.Module | None = None
    name: str = ""

    @property
    def flipped(self) -> bool:
        base = getattr(self.layer, "base_layer", self.layer)
        return isinstance(base, nn.Module) and stored_in_by_out(base)

    def extent(self, axis: int) -> int:
        """Outputs (axis 0) or inputs (axis 1)."""
        return self.weight.shape[-1 if (axis == 1) != self.flipped else -2]


@dataclass
class _Found:
    """The layout of a weight as if it were stored out × in. Without one it is unresolved."""

    projection: _Projection
    why: str
    layout: str | None = None
    state: str = KNOWN


def attention_choices(model: nn.Module, wanted: Wanted) -> dict[int, Choice]:
    """id(weight) → choice, for the weights of attention modules."""
    choices: dict[int, Choice] = {}
    known: tuple[str, ...] = ()  # names of modules, with a dot
    attention: tuple[str, ...] = ()
    for site in _sites(model, wanted):
        inside_known = site.name.startswith(known)
        here = _choices_at(site, inside_known)
        if not here and site.name.startswith(attention):
            here = _choices(site, _forgotten(site, []))
        if here or named_attention(site.module):
            attention += (site.name + "." if site.name else "",)
        if any(choice.state != UNRESOLVED for choice in here.values()):
            known += (site.name + "." if site.name else "",)
        for key, choice in here.items():
            # A module inside a known one adds to it; a known weight keeps its first meaning, so that a
            # weight which makes queries and keys is grouped as queries.
            if key not in choices or choices[key].state == UNRESOLVED:
                choices[key] = choice
    return choices


def _sites(model: nn.Module, wanted: Wanted) -> Iterator[Site]:
    """All modules, outer ones first, each with the config nearest to it."""
    modules = dict(model.named_modules())
    configs: dict[str, object] = {}
    for name, module in modules.items():
        parent = name.rpartition(".")[0]
        inherited = configs.get(parent) if name else None
        configs[name] = getattr(module, "config", None) or inherited
        yield Site(bare(name), module, modules[parent] if name else None, configs[name], wanted)


def _choices_at(site: Site, inside_known: bool) -> dict[int, Choice]:
    """The choices for one module, which may lie inside a known attention module."""
    found: list[_Found] = []
    try:
        for resolve in _RESOLVERS:
            found = resolve(site) or []
            if found:
                found += _forgotten(site, found)
                break
        else:
            outer = not inside_known and declares_heads(site.module)
            if named_attention(site.module) or outer or _makes_queries_and_keys(site.module):
                kind = class_name(site.module)
                raise UnresolvedError(f"{kind} is not a known kind of attention")
    except UnresolvedError as reason:
        found = [_Found(p, str(reason)) for p in _all_projections(site.module)]
    return _choices(site, found)


def _choices(site: Site, found: list[_Found]) -> dict[int, Choice]:
    choices: dict[int, Choice] = {}
    for item in found:
        choice = _choice(site, item)
        choices.setdefault(id(item.projection.weight), choice)
        if item.projection.layer is not None:
            choices |= adapter_choices(item.projection.layer, choice)
    return choices


def _choice(site: Site, found: _Found) -> Choice:
    weight, flipped = found.projection.weight, found.projection.flipped
    layout = lay.plain() if found.layout is None else found.layout
    conv = isinstance(found.projection.layer, nn.modules.conv._ConvNd)
    layout = lay.transposed(layout) if flipped else layout
    if weight.dim() > 2 and "flatten" not in layout:
        layout = lay.flattened(layout) if conv else lay.stacked(layout)
    why = found.why + (", in × out" if flipped else "") + _tall(weight, layout)
    if found.layout is None:
        return Choice("attention", found.why, layout, UNRESOLVED, None, _suggestion(site, found))
    choice = Choice("attention", why, layout, found.state)
    # Separate Q and K weights share a partition by drawing it under the same name.
    if site.wanted.share_qk and {"q", "k", "nope"} & set(segments_of(layout)):
        choice.partition = site.name or class_name(site.module)
    return choice


def _tall(weight: Tensor, layout: str) -> str:
    """A hint if a segment has more lines (heads × rows) than the matrix has directions."""
    directions = weight.shape[-1 if layout.startswith("rows") else -2]
    if "flatten" in layout:
        directions = weight.shape[0]
    extents = re.findall(r"=(\d+)x(\d+)@", layout)
    if all(int(heads) * int(rows) <= directions for heads, rows in extents):
        return ""
    return f"; ungrouped, its heads share {directions} directions"


# The known kinds of attention.


def _multihead_attention(site: Site) -> list[_Found] | None:
    module = site.module
    if not isinstance(module, nn.MultiheadAttention):
        return None
    heads, dim = module.num_heads, module.head_dim
    sizes = Sizes(heads, heads, heads, dim, dim, "module.num_heads")
    packed = getattr(module, "in_proj_weight", None)  # None if Q, K and V are separate
    if packed is not None:
        found = [_qkv(site, _Projection(packed), "packed", sizes)]
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        found = [_one(site, _Projection(w), s, sizes) for s, w in zip("qkv", weights, strict=True)]
    return found + _output(site, sizes)


def _mla(site: Site) -> list[_Found] | None:
    """Multi-head latent attention (DeepSeek). The config's head_dim may cover only the rope part."""
    key_value = _projection(site.module, "kv_b_proj")
    if key_value is None:
        return None
    heads, source = declared(site, HEADS)
    nope, rope, value = (
        declared(site, (name,))[0]
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    grouping, why = site.wanted.grouping, f"MLA, {heads} heads ({source})"
    layout = lay.mla_key_value(heads, nope, value, grouping("k", heads), grouping("v", heads))
    text = f"{why}, k {nope} + v {value} rows"
    found = [_checked(key_value, heads * (nope + value), source, layout, text)]
    if query := _projection(site.module, "q_b_proj", "q_proj"):
        layout = lay.mla_query(heads, nope, rope, grouping("q", heads))
        text = f"{why}, nope {nope} + rope {rope} rows"
        found.append(_checked(query, heads * (nope + rope), source, layout, text))
    return found + _output(site, Sizes(heads, heads, heads, value, value, source))


def _linear_attention(site: Site) -> list[_Found] | None:
    """GatedDeltaNet (Qwen3-Next, Qwen3.5): Q, K, V and the output gate z, per key head or packed."""
    mixed = _projection(site.module, "in_proj_qkvz")
    packed = _projection(site.module, "in_proj_qkv")
    projection = mixed or packed
    if projection is None:
        return None
    if site.family not in _GATED:
        raise UnresolvedError(f"the row order of '{site.family}' is unknown")
    sizes = sizes_of(site)
    per_key = sizes.v_heads // sizes.k_heads
    shares = {"q": 1, "k": 1, "v": per_key, "z": per_key} if mixed else {}
    whole = {"q": sizes.heads, "k": sizes.k_heads, "v": sizes.v_heads}
    parts = {
        name: (share, *_rows_and_grouping(site, sizes, name))
        for name, share in (shares or whole).items()
    }
    layout = lay.pattern(sizes.k_heads if mixed else 1, share_qk=site.wanted.share_qk, **parts)
    rows = 2 * sizes.k_heads * sizes.head_dim + sizes.v_heads * sizes.value_dim * (
        2 if mixed else 1
    )
    order = "q, k, v, z per key head" if mixed else "packed QKV"
    why = f"linear attention, {order}, {sizes.text()}"
    return [_checked(projection, rows, sizes.source, layout, why), *_output(site, sizes)]


def _rows_and_grouping(site: Site, sizes: Sizes, name: str) -> tuple[int, str]:
    if name == "z":
        return sizes.value_dim, "all"
    heads, rows = sizes.of(name)
    return rows, site.wanted.grouping(name, heads, clamp=sizes.linear)


def _tensors(site: Site) -> list[_Found] | None:
    """XLNet: weights of shape hidden × heads × head_dim. `r` makes the keys of positions."""
    names = {"q": "q", "k": "k", "v": "v", "r": "k", "o": "o"}
    weights = {n: getattr(site.module, n, None) for n in names}
    if not all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights.values()):
        return None
    sizes = sizes_of(site)
    found = []
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or tuple(weight.shape[1:]) != (
            sizes.heads,
            sizes.head_dim,
        ):
            raise UnresolvedError(f"{sizes.text()} declared, but a weight has another shape")
        segment = names[name]
        grouping = site.wanted.grouping(segment, sizes.heads)
        layout = lay.separate(sizes.heads, sizes.head_dim, grouping, segment)
        if segment == "o":
            layout = lay.output_projection(sizes.heads, sizes.head_dim, grouping)
        # Q, K and V are in × out, O is out × in; in all of them the columns are heads × head_dim.
        layout = lay.flattened(layout if segment == "o" else lay.transposed(layout))
        why = f"{segment.upper()}, hidden × heads × head_dim, {sizes.text()}"
        found.append(_Found(_Projection(weight), why, layout))
    return found


def _separate(site: Site) -> list[_Found] | None:
    """Q, K and V as three weights."""
    for names in _SEPARATE:
        projections = [p for name in names if (p := _projection(site.module, name))]
        if len(projections) < len(names):
            continue
        sizes = sizes_of(site)
        if site.wanted.share_qk and sizes.heads != sizes.k_heads:
            raise ValueError(
                f"group_muon: {sizes.heads} query heads and {sizes.k_heads} KV heads cannot share "
                "a random partition; set share_qk=False"
            )
        parts = [*zip("qkv", projections, strict=True)]
        beside = [
            (segment, p) for n, segment in _BESIDE.items() if (p := _projection(site.module, n))
        ]
        found = [_one(site, p, segment, sizes) for segment, p in parts + beside]
        return found + _output(site, sizes)
    return None


def _c_attn(site: Site) -> list[_Found] | None:
    """GPT-2 and nanoGPT: all of Q, then K, then V. Cross-attention has Q in a weight of its own."""
    projection = _projection(site.module, "c_attn")
    if projection is None:
        return None
    sizes, kind = sizes_of(site), "packed"
    if site.family == "gpt_bigcode":
        multi_query = bool(getattr(site.config, "multi_query", True))
        sizes.k_heads = sizes.v_heads = 1 if multi_query else sizes.heads
        kind = "packed" if multi_query else "interleaved"
    query = _projection(site.module, "q_attn")
    if query is not None:
        if site.family == "gpt_bigcode":
            raise UnresolvedError("the cross-attention of gpt_bigcode is unknown")
        found = [_one(site, query, "q", sizes), _key_value(site, projection, sizes)]
    else:
        found = [_qkv(site, projection, kind, sizes)]
    if site.family not in _C_ATTN and class_name(site.module) != "CausalSelfAttention":
        for item in found:
            item.state, item.why = GUESSED, f"{item.why}, in GPT-2's order by its name"
    return found + _output(site, sizes)


def _fused(site: Site) -> list[_Found] | None:
    """Q, K and V in one weight, in an order that depends on the model family."""
    projection = _projection(site.module, *_FUSED)
    name = site.family
    if projection is None or (name != "deberta" and not _projection(site.module, *_FUSED[:-1])):
        return None
    sizes = sizes_of(site)
    if name == "falcon":
        grouped = bool(getattr(site.config, "new_decoder_architecture", False))
        multi_query = bool(getattr(site.config, "multi_query", False))
        if not grouped:
            sizes.k_heads = sizes.v_heads = 1 if multi_query else sizes.heads
        kind = "packed" if multi_query and not grouped else "interleaved"
    elif name == "codegen":
        kind = "codegen"
    elif name == "minimax":  # linear attention, in which the config's KV heads do not count
        sizes.k_heads = sizes.v_heads = sizes.heads
        kind = "interleaved"
    elif name in _INTERLEAVED:
        kind = "interleaved"
    elif name in _PACKED or name.removeprefix("timm.") in _PACKED_IN_TIMM:
        kind = "packed"
    else:
        where = f"'{name}'" if name else class_name(site.module)
        raise UnresolvedError(f"the row order of fused weights in {where} is unknown")
    beside = [
        _one(site, p, segment, sizes)
        for child, segment in _BESIDE.items()
        if (p := _projection(site.module, child))
    ]
    return [_qkv(site, projection, kind, sizes), *beside, *_output(site, sizes)]


_RESOLVERS: tuple[Callable[[Site], list[_Found] | None], ...] = (
    _multihead_attention,
    _mla,
    _linear_attention,
    _tensors,
    _separate,
    _c_attn,
    _fused,
)


# Single weights.


def _qkv(site: Site, projection: _Projection, kind: str, sizes: Sizes) -> _Found:
    """A weight that holds Q, K and V."""
    heads, kv_heads, dim = sizes.heads, sizes.k_heads, sizes.head_dim
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    times = {"packed": 1, "interleaved": kv_heads, "codegen": 4}[kind]
    order = "qvk" if kind == "codegen" else "qkv"  # CodeGen: for 4 TPU cores, and V before K
    extent = (heads + 2 * kv_heads) * dim
    if any(count % times for count in counts.values()):
        return _Found(projection, f"{heads} heads are not a multiple of {times}")
    parts = {s: (counts[s] // times, dim, site.wanted.grouping(s, counts[s])) for s in order}
    layout = lay.pattern(times, share_qk=site.wanted.share_qk, **parts)
    kind = "packed (q, v, k in 4 blocks)" if kind == "codegen" else kind
    why = f"{kind} QKV, {sizes.text()}"
    return _checked(projection, extent, sizes.source, layout, why)


def _key_value(site: Site, projection: _Projection, sizes: Sizes) -> _Found:
    parts = {s: (*sizes.of(s), site.wanted.grouping(s, sizes.of(s)[0])) for s in "kv"}
    extent = sum(heads * rows for heads, rows, _ in parts.values())
    why = f"packed KV, {sizes.text()}"
    return _checked(projection, extent, sizes.source, lay.pattern(1, share_qk=False, **parts), why)


def _one(site: Site, projection: _Projection, segment: str, sizes: Sizes) -> _Found:
    """A weight that holds Q, K or V. Q may have a gate beside each head."""
    heads, rows = sizes.of(segment)
    grouping = site.wanted.grouping(segment, heads, clamp=sizes.linear)
    why = f"{segment.upper()}, {heads} heads × {rows} ({sizes.source})"
    if segment == "q" and projection.extent(0) == 2 * heads * rows:
        layout = lay.pattern(heads, q=(1, rows, grouping), gate=(1, rows, "all"))
        if site.family in _GATED:
            return _Found(projection, f"{why}, query and gate rows per head", layout)
        reason = f"it has twice the rows of {heads} heads × {rows}, in an unknown order"
        return _Found(projection, reason)
    layout = lay.separate(heads, rows, grouping, segment)
    return _checked(projection, heads * rows, sizes.source, layout, why)


def _output(site: Site, sizes: Sizes) -> list[_Found]:
    """The output projection, whose heads are columns. In BERT's family it lies beside the module."""
    projection = _projection(site.module, *_OUTPUT)
    parent = site.parent
    if projection is None and class_name(parent).lower().endswith(("attention", "attentionlayer")):
        beside = getattr(parent, "output", None)
        if isinstance(beside, nn.Module) and isinstance(parent, nn.Module):
            projection = _projection(beside, "dense") or _projection(parent, "output")
    heads, columns = sizes.of("o")
    if projection is None:
        return _perhaps_output(site.module, heads * columns)
    if site.family == "diffllama":  # the difference of two heads is one head of twice the size
        heads, columns = heads // 2, 2 * columns
    layout = lay.output_projection(heads, columns, site.wanted.grouping("o", heads))
    why = f"output projection, {heads} heads × {columns} ({sizes.source})"
    return [_checked(projection, heads * columns, sizes.source, layout, why, axis=1)]


def _perhaps_output(module: nn.Module, columns: int) -> list[_Found]:
    """Layers further inside that the name and the number of inputs make an output projection."""
    found = []
    for name, layer in module.named_modules():
        weight = weight_of(layer) if _OUTPUT_LIKE.search(name.rpartition(".")[2]) else None
        if weight is not None and weight.dim() == 2 and not _not_a_projection(layer):
            projection = _Projection(weight, layer, name.rpartition(".")[2])
            if projection.extent(1) == columns:
                found.append(_Found(projection, "it may be the output projection, by its name"))
    return found


def _checked(
    projection: _Projection, extent: int, source: str, layout: str, why: str, axis: int = 0
) -> _Found:
    if projection.extent(axis) == extent and projection.weight.dim() in (2, 3):
        return _Found(projection, why, layout)
    side = ("rows", "columns")[axis]
    shape = tuple(projection.weight.shape)
    return _Found(projection, f"{extent} {side} declared ({source}), but the shape is {shape}")


# Weights of a module.


def _projection(module: nn.Module, *names: str) -> _Projection | None:
    """The first of these children that has a weight; looks through the wrappers of peft and Moshi."""
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, nn.Module):
            child = _unwrapped(child)
            weight = weight_of(child)
            if weight is not None and weight.dim() >= 2:
                return _Projection(weight, child, name)
    return None


def _unwrapped(child: nn.Module) -> nn.Module:
    saved = getattr(child, "modules_to_save", None)  # peft trains a copy of the layer
    if isinstance(saved, nn.ModuleDict) and len(saved):
        return next(iter(saved.values()))
    inner = getattr(child, "linear", None)
    if isinstance(inner, nn.Module) and not hasattr(child, "weight"):
        return inner
    if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child):
        return child[0]
    return child


def _all_projections(module: nn.Module) -> list[_Projection]:
    """All matrices that an attention module holds itself."""
    found = [_projection(module, name) for name, _ in module.named_children()]
    own = getattr(module, "weight", None)
    if isinstance(own, Tensor) and own.dim() == 2 and not isinstance(module, nn.Embedding):
        found.append(_Projection(own, module))
    found += [_Projection(getattr(module, name), None, name) for name in _own_matrices(module)]
    return [p for p in found if p is not None and not _not_a_projection(p.layer)]


def _qkv_of(name: str) -> set[str]:
    """Which of q, k and v a weight makes by its name, such as W_Q, to_qkv or keys."""
    parts = r"(?:^|_)w?(qkvo?|qk|kv|q|k|v|query|queries|key|value)s?(?=_|$)"
    words = re.findall(parts, name.lower())
    letters = [word if set(word) <= {*"qkvo"} else word[0] for word in words]
    return set("".join(letters))


def _makes_queries_and_keys(module: nn.Module) -> bool:
    """Whether a module is attention by what it holds: layers or parameters for queries and for keys."""
    layers = [n for n, _ in module.named_children() if _projection(module, n)]
    names = [n for n in layers + _own_matrices(module) if not _HEADLESS.search(n.lower())]
    return {"q", "k"} <= set().union(*map(_qkv_of, names))


def _own_matrices(module: nn.Module) -> list[str]:
    """Parameters that make queries, keys or values. One for queries alone may be a table of learned queries."""
    own = module.named_parameters(recurse=False)
    names = [n for n, p in own if _qkv_of(n) and sum(size > 1 for size in p.shape) > 1]
    if {"q", "k"} <= set().union(*map(_qkv_of, names)):
        return names
    return [name for name in names if not torch.ops.group_muon.role_by_name(name)]


def _not_a_projection(layer: nn.Module | None) -> bool:
    depthwise = isinstance(layer, nn.modules.conv._ConvNd) and layer.groups > 1
    return depthwise or isinstance(layer, (nn.Embedding, nn.EmbeddingBag))


def _forgotten(site: Site, found: list[_Found]) -> list[_Found]:
    """Children that make queries, keys or values by their names, but that no rule has covered."""
    covered = {id(item.projection.weight) for item in found}
    names = [name for name, _ in site.module.named_children() if _QKV_LIKE.search(name)]
    rest = [_projection(site.module, name) for name in names if not _HEADLESS.search(name)]
    return [
        _Found(p, f"the purpose of '{p.name}' is unknown")
        for p in rest
        if p and id(p.weight) not in covered and not _not_a_projection(p.layer)
    ]


# Suggestions for unresolved weights.


def _suggestion(site: Site, found: _Found) -> str:
    """Code for a layout that fits the weight's shape, or one with words to replace."""
    code = _suggested(site, found.projection)
    if found.projection.flipped:
        code = f"group_muon.transposed({code})"
    return f"group_muon.stacked({code})" if found.projection.weight.dim() == 3 else code


def _suggested(site: Site, projection: _Projection) -> str:
    def group(segment: str, heads: int) -> str:
        return f'"{site.wanted.grouping(segment, heads)}"'

    try:
        sizes = sizes_of(site)
    except UnresolvedError:
        return f"group_muon.separate(HEADS, HEAD_DIM, {group('q', 0)})"
    heads, dim = sizes.of("q")
    kv_heads, _ = sizes.of("k")
    rows, columns = projection.extent(0), projection.extent(1)
    q, k = group("q", heads), group("k", kv_heads)
    outputs, size = sizes.of("o")
    if columns == outputs * size and projection.name in _OUTPUT:
        return f"group_muon.output_projection({outputs}, {size}, {group('o', outputs)})"
    if rows == (heads + 2 * kv_heads) * dim:
        return f"group_muon.packed_qkv({heads}, {dim}, {kv_heads}, q={q}, k={k})"
    if rows == 2 * heads * dim:
        return f'group_muon.pattern({heads}, q=(1, {dim}, {q}), gate=(1, {dim}, "all"))'
    named = _QKV_LIKE.search(projection.name)
    for segment in named[2][0] if named else "qkv":
        count, size = sizes.of(segment)
        if rows == count * size:
            return f'group_muon.separate({count}, {size}, {group(segment, count)}, "{segment}")'
    return f"group_muon.separate(HEADS, HEAD_DIM, {q})"
