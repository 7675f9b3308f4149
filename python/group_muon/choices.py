"""What param_groups decides for a weight, and what the user asked for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from group_muon import layouts as lay

KNOWN, GUESSED, UNRESOLVED = "known", "guess", "UNRESOLVED"


@dataclass
class Choice:
    """Role and layout of one weight, and the reason."""

    role: str  # attention and matrix: Muon; embedding, head, gain, bias and other: AdamW
    why: str
    layout: str = ""  # Muon only
    state: str = KNOWN
    partition: str | None = None  # shared with other weights; None: its own
    suggestion: str = ""  # code for the argument `layouts`, if UNRESOLVED

    @property
    def algorithm(self) -> str:
        return "muon" if self.layout else "adamw"

    def text(self) -> str:
        """The reason as the table shows it."""
        mark = {KNOWN: "", GUESSED: "guess: ", UNRESOLVED: "UNRESOLVED, so plain: "}
        return mark[self.state] + self.why


class Wanted:
    """The groupings the user asked for."""

    def __init__(
        self,
        group_size: int | str | dict[str, int | str] | None,
        rule: str = "random",
        segments: Sequence[str] = ("q", "k"),
        share_qk: bool = False,
        gate_up: str = "two",
    ) -> None:
        self.rule = rule
        self.share_qk = share_qk
        self.gate_up = gate_up
        self.per_segment = isinstance(group_size, dict)
        self.sizes: Mapping[str, int | str | None] = (
            group_size if isinstance(group_size, dict) else dict.fromkeys(segments, group_size)
        )
        for segment in self.sizes:
            if segment not in ("q", "k", "v", "o"):
                raise ValueError(f"group_muon: unknown segment '{segment}': use q, k, v or o")
        if gate_up not in ("one", "two"):
            raise ValueError(f"group_muon: gate_up should be 'one' or 'two', not {gate_up!r}")

    def grouping(self, segment: str, heads: int, clamp: bool = False) -> str:
        """The grouping of a segment. With `clamp`, a layer with fewer heads uses all of them."""
        size = self.sizes.get(segment)
        if size is None:
            return "all"
        # For the queries of ordinary attention that would hide a mistake.
        if isinstance(size, int) and not self.per_segment and (clamp or segment in "kv"):
            size = min(size, heads)
        return ",".join(self._with_rule(part) for part in str(size).split(","))

    def _with_rule(self, part: str) -> str:
        groups, at, start = part.strip().partition("@")
        # Sizes alone, also with a factor and in a periodic grouping: 6, 6*0.5, 6~3/5.
        return re.sub(r"(^|~)(\d+)(?=[*/~]|$)", rf"\1\2:{self.rule}", groups) + at + start

    def missing(self, layouts: Sequence[str]) -> list[str]:
        """Requested segments that no layout has."""
        found = {name for layout in layouts for name in segments_of(layout)}
        found |= {"q"} if "nope" in found else set()
        return [s for s, size in self.sizes.items() if size is not None and s not in found]


def segments_of(layout: str) -> list[str]:
    return re.findall(r"(\S+)=\d", layout)


def bare(name: str) -> str:
    """A name without the prefixes of torch.compile, DistributedDataParallel, FSDP and checkpointing."""
    wrappers = "module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    return re.sub(rf"(^|(?<=\.))({wrappers})(\.|$)", "", name)


def ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def class_name(module: object) -> str:
    """The name of a module's class; fully_shard (FSDP2) puts one of its own before it."""
    kinds = type(module).__mro__
    return kinds[2 if kinds[1].__name__ == "FSDPModule" else 0].__name__


def family(module: nn.Module, config: object = None) -> str:
    """The transformers folder or timm file that defines a class, else the config's model type, or ""."""
    for cls in type(module).__mro__:
        if found := re.match(r"transformers\.models\.(\w+)\.", cls.__module__):
            return found[1]
        if cls.__module__.startswith("timm."):
            return "timm." + cls.__module__.rpartition(".")[2]
    name = getattr(config, "model_type", "")
    return name if isinstance(name, str) else ""


def stored_in_by_out(module: nn.Module) -> bool:
    """Hugging Face's Conv1D, which is a linear layer."""
    return class_name(module) == "Conv1D" and not isinstance(module, nn.Conv1d)


def weight_of(module: nn.Module) -> Tensor | None:
    """The parameter behind a layer's weight, even if the weight is computed from it, as by weight_norm."""
    computed = getattr(getattr(module, "parametrizations", None), "weight", None)
    for name in ("original", "original1"):
        if isinstance(original := getattr(computed, name, None), Tensor):
            return original
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def adapters(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """LoRA's pairs (A: r × in, B: out × r) for a wrapped layer of peft. AdaLoRA's are bare parameters."""
    down, up = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
    kinds = (nn.ModuleDict, nn.ParameterDict)
    if not (isinstance(down, kinds) and isinstance(up, kinds)):
        return []

    def matrix(item: nn.Module | Tensor) -> Tensor | None:
        return (
            item.weight
            if isinstance(item, nn.Linear)
            else item
            if isinstance(item, Tensor)
            else None
        )

    pairs = [(matrix(down[name]), matrix(up[name])) for name in down if name in up]
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def adapter_choices(module: nn.Module, choice: Choice) -> dict[int, Choice]:
    """Heads along the rows of a weight are rows of LoRA's B; heads along its columns, columns of A."""
    found: dict[int, Choice] = {}
    layout = lay.transposed(choice.layout) if "transposed" in choice.layout else choice.layout
    by_columns = layout.startswith("columns") or "output_projection" in choice.suggestion
    for a, b in adapters(module):
        with_heads, other = (a, b) if by_columns else (b, a)
        name, other_name = ("A", "B") if by_columns else ("B", "A")
        found[id(with_heads)] = replace(choice, why=f"LoRA {name} of {choice.why}", layout=layout)
        found[id(other)] = Choice("matrix", f"LoRA {other_name}", lay.plain())
    return found
