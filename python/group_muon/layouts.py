"""Layouts: where the heads of a weight lie. These functions return a layout as a string.

Groupings are strings as well: "all" (one group), "6:random", "3:interval", "2" (adjacent; the number 2 also
works), an explicit order such as "2:3-1-0-2", with a factor on the learning rate "6:random*0.5", whole at every fifth
step "6:random~all/5", or a schedule such as "1@0,6:random@2000" or "1,6:random@0.5lr".
"""

import torch

_ops = torch.ops.group_muon


def grouping(group_size: int | None = None, rule: str = "adjacent") -> str:
    """A grouping as a string: grouping(6, "random") is "6:random". The default size is all heads."""
    return "all" if group_size is None else f"{group_size}:{rule}"


def plain() -> str:
    """The whole matrix is one block: plain Muon."""
    return _ops.plain()


def convolution() -> str:
    """A convolution's weight, flattened to out × (in · kernel)."""
    return _ops.convolution()


def packed_qkv(
    heads: int,
    head_dim: int,
    kv_heads: int = 0,
    value_dim: int = 0,
    *,
    q: str | int = "all",
    k: str | int = "all",
    v: str | int = "all",
    share_qk: bool = False,
) -> str:
    """All query heads, then all key heads, then all value heads (GPT-2, nanoGPT).

    With share_qk, Q and K draw the same random partition."""
    return _ops.packed_qkv(heads, head_dim, kv_heads, value_dim, str(q), str(k), str(v), share_qk)


def interleaved_qkv(
    heads: int,
    head_dim: int,
    kv_heads: int = 0,
    value_dim: int = 0,
    *,
    q: str | int = "all",
    k: str | int = "all",
    v: str | int = "all",
    share_qk: bool = False,
) -> str:
    """[q, k, v] per head (GPT-NeoX); with fewer KV heads, [q … q, k, v] per KV head."""
    return _ops.interleaved_qkv(
        heads, head_dim, kv_heads, value_dim, str(q), str(k), str(v), share_qk
    )


def separate(heads: int, head_dim: int, grouping: str | int = "all", name: str = "heads") -> str:
    """A projection on its own (Q, K or V): the heads one below the other."""
    return _ops.separate(heads, head_dim, str(grouping), name)


def mla_query(heads: int, nope_dim: int, rope_dim: int, grouping: str | int = "all") -> str:
    """Query up-projection of multi-head latent attention: [nope, rope] per head."""
    return _ops.mla_query(heads, nope_dim, rope_dim, str(grouping))


def mla_key_value(
    heads: int, nope_dim: int, value_dim: int, k: str | int = "all", v: str | int = "all"
) -> str:
    """Key-value up-projection of multi-head latent attention: [k, v] per head."""
    return _ops.mla_key_value(heads, nope_dim, value_dim, str(k), str(v))


def output_projection(heads: int, value_dim: int, grouping: str | int = "all") -> str:
    """The output projection, whose heads lie along the columns."""
    return _ops.output_projection(heads, value_dim, str(grouping))


def transposed(layout: str) -> str:
    """The same weight stored as in × out, as in Hugging Face's Conv1D."""
    return _ops.transposed(layout)


def stacked(layout: str) -> str:
    """Applies the layout to each matrix of a weight with leading dimensions (experts × out × in)."""
    return _ops.stacked(layout)


def flattened(layout: str) -> str:
    """Applies the layout to a weight read as first dimension × all others (hidden × heads × head_dim)."""
    words = layout.split(" ")
    words.insert(2 if "transposed" in words else 1, "flatten")
    return " ".join(words)


def pattern(times: int, *, share_qk: bool = False, **parts: tuple[int, int, str | int]) -> str:
    """Any order of rows that repeats: each part is (heads, rows of a head, grouping), from top to bottom.

    pattern(1, q=(12, 64, 6), k=(4, 64, 2), v=(4, 64, "all")) is packed; with 4 times q=(3, …), k=(1, …),
    v=(1, …) it is interleaved; pattern(12, q=(1, 64, 6), gate=(1, 64, "all")) has query and gate per head."""
    period = sum(heads * rows for heads, rows, _ in parts.values())
    words, first = ["rows"], 0
    streams = _streams(list(parts), share_qk)
    for stream, (name, (heads, rows, grouping)) in zip(streams, parts.items(), strict=True):
        starts = [first + i * period + j * rows for i in range(times) for j in range(heads)]
        listed = ",".join(map(str, starts))
        words.append(f"{name}={len(starts)}x{rows}@{listed}/{grouping}~{stream}")
        first += heads * rows
    return transposed(transposed(" ".join(words)))  # as the core writes it


def _streams(names: list[str], share_qk: bool) -> list[int]:
    """Q, K and V draw from the streams that packed_qkv gives them, other parts from streams of their own."""
    fixed = {"q": 0, "k": 0 if share_qk else 1, "v": 2}
    rest = iter(range(3 if set(names) & set(fixed) else 0, 3 + len(names)))
    return [fixed[name] if name in fixed else next(rest) for name in names]


def with_grouping(layout: str, grouping: str | int, segment: str = "") -> str:
    """The layout with another grouping for the segments with this name ("": all segments)."""
    return _ops.with_grouping(layout, str(grouping), segment)


def head_order(
    heads: int,
    grouping: str | int,
    *,
    seed: int = 0,
    step: int = 0,
    lr_fraction: float = 1.0,
    parameter: str = "0",
    stream: int = 0,
) -> list[int]:
    """The order in which heads are gathered at a step, with the learning rate at a fraction of the full one; each run of
    g heads is one group."""
    return _ops.head_order(heads, str(grouping), seed, step, lr_fraction, parameter, stream)
