"""Steps that several processes share: each owns pieces of the weights, keeps their state and sends their new values."""

from collections.abc import Callable, Mapping, Sequence
from math import fsum
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
        self._grads: dict[int, list[Tensor]] = {}  # of the own pieces, by round
        self._reduced: list[tuple[int, int]] | None = None  # the gradients that were sent early
        self._bytes_sent = 0  # not by the exchange
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
        return self._exchange.bytes_sent() + self._bytes_sent

    def _begin(self, options: str) -> None:
        """Collective. Begins a step: local gradients are on their way to the owners of their pieces."""
        grads = [weight.grad for weight in self.weights]
        active = self._exchange.with_gradient(grads, not self.local, options)
        weights = [weight.detach() for weight in self.weights]
        self._rounds = self._exchange.begin(weights, active, grads if self.local else [])
        self._grads = {}

    def _grads_of(self, round_: int) -> list[Tensor]:
        """The gradients of the own pieces in a round. They come from other processes once."""
        if round_ not in self._grads:
            self._grads[round_] = (
                self._exchange.mean_grads(round_)
                if self.local
                else [
                    self._exchange.take(piece, self.weight_of(piece).grad)
                    for piece in self._exchange.pieces_of_round(round_)
                ]
            )
        return self._grads[round_]

    def _versions(self) -> list[tuple[int, int]]:
        """Tells whether gradients have changed."""
        grads = [weight.grad for weight in self.weights]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]

    def reduced_grads(self, options: str) -> list[Tensor]:
        """Collective. Exchanges the gradients now instead of in the step, which uses those returned here, the means of
        this process's pieces. They can be measured, or scaled in place."""
        self._check_unchanged()
        if self._reduced is None:
            self._begin(options)
            self._reduced = self._versions()
        return [grad for round_ in range(self._rounds) for grad in self._grads_of(round_)]

    def _check_unchanged(self) -> None:
        if self._reduced is not None and self._reduced != self._versions():
            raise ValueError(
                "group_muon: gradients changed after clip_grad_norm_, which has exchanged them already; call it after "
                "the last backward, or zero_grad() to begin anew"
            )

    def forget(self) -> None:
        """Drops gradients that were exchanged for a step that is not taken."""
        self._reduced = None
        self._grads = {}

    def sum(self, own: Sequence[float]) -> float:
        """Collective. The sum of the numbers of all processes, rounded once: whatever their order."""
        sent = torch.tensor([fsum(own)], dtype=torch.float64, device=self.weights[0].device)
        received = [torch.empty_like(sent) for _ in range(self.group.size())]
        torch.distributed.all_gather(received, sent, group=self.group)
        self._bytes_sent += sent.nbytes * (self.group.size() - 1)
        return fsum(map(float, received))

    def step(self, step_pieces: Callable[[list[int]], None], options: str) -> None:
        """Gets the gradients of the own pieces, has them stepped, round by round, and exchanges the new values.
        `options` is a text that must be the same on all processes."""
        self._check_unchanged()
        if self._reduced is None:
            self._begin(options)
        self._reduced = None
        for round_ in range(self._rounds):
            pieces = self._exchange.pieces_of_round(round_)
            grads = self._grads_of(round_)
            for piece, grad in zip(pieces, grads, strict=True):
                whole, own = self.weight_of(piece), self.pieces[piece]
                if not self._is_view(piece):
                    own.copy_(self._exchange.take(piece, whole.detach()))
                own.grad = grad
            step_pieces(pieces)
            for piece in pieces:
                self.pieces[piece].grad = None
                if not self._is_view(piece):
                    self._exchange.put(piece, self.weight_of(piece).detach(), self.pieces[piece])
            self._exchange.send_values(round_, [self.pieces[piece] for piece in pieces])
            del self._grads[round_]
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
