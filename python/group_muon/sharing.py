"""Steps that several processes share: each owns pieces of the weights, keeps their state and sends their new values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What the gradients are when a step begins.
GRADIENTS = ("local", "averaged")


class Sharing:
    """This process's side. All processes of the group must make the same calls in the same order."""

    def __init__(
        self,
        group: "torch.distributed.ProcessGroup",
        gradients: str,
        weights: Sequence[Tensor],
        names: Sequence[str],
        layouts: Sequence[tuple[str, bool]],
        options: str,
    ) -> None:
        if gradients not in GRADIENTS:
            raise ValueError(
                f"group_muon: gradients should be local or averaged, not {gradients!r}"
            )
        self.group = group
        self.gradients = gradients
        self.local = gradients == "local"
        self.layouts = list(layouts)
        self.weights = list(weights)
        self._exchange = torch.classes.group_muon.Exchange(
            group.group_name,
            list(names),
            [w.detach() for w in weights],
            [layout for layout, _ in layouts],
            [whole for _, whole in layouts],
            options,
        )
        self.own = self._exchange.own_pieces()
        # Each piece is a tensor of its own: a view of the weight where possible.
        self.pieces = {
            piece: self._exchange.take(piece, self.weight_of(piece).detach()).contiguous()
            for piece in self.own
        }

    def weight_of(self, piece: int) -> Tensor:
        return self.weights[self._exchange.weight_of(piece)]

    def owned_heads_of(self, piece: int) -> str:
        return self._exchange.owned_heads_of(piece)

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other processes so far."""
        return self._exchange.bytes_sent()

    def step(self, step_pieces: Callable[[list[int]], None]) -> None:
        """Gets the gradients of the own pieces, has them stepped, round by round, and exchanges the new values."""
        grads = [weight.grad for weight in self.weights]
        active = self._exchange.with_gradient(grads, not self.local)
        weights = [weight.detach() for weight in self.weights]
        rounds = self._exchange.begin(weights, active, grads if self.local else [])
        for round_ in range(rounds):
            pieces = self._exchange.pieces_of_round(round_)
            means = self._exchange.mean_grads(round_) if self.local else []
            for i, piece in enumerate(pieces):
                whole, own = self.weight_of(piece), self.pieces[piece]
                if not self._is_view(piece):
                    own.copy_(self._exchange.take(piece, whole.detach()))
                own.grad = means[i] if self.local else self._exchange.take(piece, whole.grad)
            step_pieces(pieces)
            for piece in pieces:
                self.pieces[piece].grad = None
                if not self._is_view(piece):
                    self._exchange.put(piece, self.weight_of(piece).detach(), self.pieces[piece])
            self._exchange.send_values(round_, [self.pieces[piece] for piece in pieces])
        self._exchange.end()

    def _is_view(self, piece: int) -> bool:
        ours, theirs = self.pieces[piece], self.weight_of(piece)
        return ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()

    def gather(self, state: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """The states of whole weights, on every process."""
        own = [state.get(self.pieces[piece], {}) for piece in self.own]
        counts = [0] * len(self.weights)
        for piece, values in zip(self.own, own, strict=True):
            if values:
                counts[self._exchange.weight_of(piece)] = int(values["step"]) + 1
        counts = self._exchange.largest(counts)
        result: dict[Tensor, dict[str, Any]] = {}
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            has = [0] * len(self.weights)
            for piece, values in zip(self.own, own, strict=True):
                has[self._exchange.weight_of(piece)] |= key in values
            which = self._exchange.largest(has)
            whole = self._exchange.assemble([values.get(key) for values in own], which, -1)
            for weight, tensor, count in zip(self.weights, whole, counts, strict=True):
                if tensor is None:
                    continue
                step: int | Tensor = count - 1
                if key != "momentum_buffer":
                    step = weight.new_tensor(count - 1, dtype=torch.float32)
                result.setdefault(weight, {"step": step})[key] = tensor
        return result

    def take(self, state: Mapping[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """The own pieces' states, from those of whole weights."""
        result: dict[Tensor, dict[str, Any]] = {}
        for piece in self.own:
            values = state.get(self.weight_of(piece))
            if not values:
                continue
            result[self.pieces[piece]] = {
                key: self._exchange.take(piece, value).clone(memory_format=torch.contiguous_format)
                if key != "step"
                else value.clone()
                if isinstance(value, Tensor)
                else value
                for key, value in values.items()
            }
        return result
