"""How many heads an attention module has, and how large they are: as the module declares, else its config."""

import re
from dataclasses import dataclass, replace

from torch import nn

from group_muon.choices import Wanted, family

# Names under which attention modules, or their configs, declare their sizes.
HEADS = (
    "num_heads", "num_attention_heads", "n_head", "n_heads", "n_local_heads", "heads", "num_q_heads",
    "num_query_heads", "nhead", "num_head",
)  # fmt: skip
_K_HEADS = ("num_k_heads", "num_key_heads")
_V_HEADS = ("num_v_heads", "num_value_heads")
_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads", "kv_heads",
    "kv_n_heads",
)  # fmt: skip
_HEAD_DIM = (
    "head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "dim_per_head", "head_k_dim",
    "key_value_proj_dim",
)  # fmt: skip
_VALUE_DIM = ("head_v_dim", "v_head_dim", "value_head_dim")
_WIDTH = ("internal_dim", "dim_out", "embed_dim", "hidden_size", "n_embd", "d_model", "dim")
_SIZES = {*HEADS, *_K_HEADS, *_V_HEADS, *_KV_HEADS, *_HEAD_DIM, *_VALUE_DIM, "all_head_size"}
# Unknown names that look like head sizes. They may contradict the config.
_HEADLIKE = re.compile(r"heads?$|head_?(dim|size)$|(dim|size)_(per_)?head$|^d_(k|v|kv|qk)$")


@dataclass
class Sizes:
    """Sizes that an attention module or its config declares; `source` says where."""

    heads: int
    k_heads: int
    v_heads: int
    head_dim: int
    value_dim: int
    source: str
    linear: bool = False  # linear attention

    def of(self, segment: str) -> tuple[int, int]:
        """Number of heads, and rows of a head. The output projection has one head per head of attention's output."""
        if segment == "o":
            return max(self.heads, self.v_heads), self.value_dim
        count = {"q": self.heads, "k": self.k_heads, "v": self.v_heads}[segment]
        return count, self.value_dim if segment == "v" else self.head_dim

    def text(self) -> str:
        heads = f"{self.heads} heads"
        if self.linear:
            heads += f", {self.v_heads} value heads"
        elif self.k_heads != self.heads:
            heads += f", {self.k_heads} KV heads"
        return f"{heads} × {self.head_dim} ({self.source})"


class UnresolvedError(Exception):
    """The reason why weights of an attention module stay on plain Muon."""


@dataclass
class Site:
    """An attention module, its surroundings and the groupings the user asked for."""

    name: str
    module: nn.Module
    parent: nn.Module | None
    config: object
    wanted: Wanted

    @property
    def family(self) -> str:
        return family(self.module, self.config)


def sizes_of(site: Site) -> Sizes:
    """The module's own numbers, then the config's. A config with another number of heads is ignored."""
    module, config = site.module, site.config
    heads, source = _own(module, (*HEADS, *_K_HEADS)) or declared(site, HEADS)
    if source.startswith("config"):
        _nothing_else(module)
    elif (_number(config, "config", HEADS) or (heads, ""))[0] != heads:
        config = None
    same = replace(site, config=config)
    k_heads = (_own(module, _K_HEADS) or declared(same, _KV_HEADS, default=heads))[0]
    v_heads = (_own(module, _V_HEADS) or (k_heads, ""))[0]
    head_dim, _ = declared(same, _HEAD_DIM, default=0)
    if not head_dim:
        head_dim = declared(site, _WIDTH)[0] // heads
    value_dim = (_own(module, _VALUE_DIM) or (head_dim, ""))[0]
    return Sizes(heads, k_heads, v_heads, head_dim, value_dim, source, _is_linear(module))


def _is_linear(module: nn.Module) -> bool:
    named = re.search(r"delta|lightning", type(module).__name__.lower())
    return bool(named) or _own(module, (*_K_HEADS, *_V_HEADS, "head_k_dim")) is not None


def _nothing_else(module: nn.Module) -> None:
    """Rejects a module that declares head sizes under unknown names, so its config may not apply."""
    for name, value in vars(module).items():
        strange = _HEADLIKE.search(name) and name not in _SIZES
        if strange and isinstance(value, int) and not isinstance(value, bool):
            raise UnresolvedError(f"the module declares {name} = {value}, which is not understood")


def _own(module: nn.Module, names: tuple[str, ...]) -> tuple[int, str] | None:
    """The first of these numbers that the module declares, and its name."""
    return _number(module, "module", names)


def declared(site: Site, names: tuple[str, ...], default: int | None = None) -> tuple[int, str]:
    """The first of these numbers that the module or its config declares, and where."""
    found = _own(site.module, names) or _number(site.config, "config", names)
    if found is None and default is None:
        raise UnresolvedError(f"neither the module nor its config declares {' or '.join(names)}")
    return found or (default or 0, "default")


def _number(owner: object, place: str, names: tuple[str, ...]) -> tuple[int, str] | None:
    for name in names:
        try:
            value = getattr(owner, name, None)
        except Exception:  # transformers' configs raise if layers differ
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, f"{place}.{name}"
    return None


def named_attention(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith(("attention", "attn"))


def declares_heads(module: nn.Module) -> bool:
    """Whether a module declares heads, and no module inside it does."""
    names = (*HEADS, *_K_HEADS, *_V_HEADS)
    inner = (m for m in module.modules() if m is not module)
    return _own(module, names) is not None and not any(
        named_attention(m) or _own(m, names) for m in inner
    )
