"""The optimizers that are compared: torch.optim.Muon, its peers from PyPI, straightforward Python
code, and Group Muon."""

import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import torch
from measure import Contender, note
from torch import Tensor, nn

import group_muon

# Three ways to evaluate the same polynomial.
MODES = {
    "plain": dict(method="newton_schulz"),
    "fast": dict(method="gram"),
    "accurate": dict(method="accurate_gram"),
}


@functools.cache
def available_modes() -> dict[str, dict[str, str]]:
    """The modes that the built library supports."""
    known = {}
    for name, options in MODES.items():
        try:
            group_muon.orthogonalize(torch.eye(2), **options)
            known[name] = options
        except ValueError as error:
            note(f"mode {name} is skipped: {error}")
    return known


@dataclass(frozen=True)
class Part:
    """Rows of a QKV matrix that are cut into blocks of equal size."""

    blocks: int
    rows: int  # rows per block
    random: bool = False  # heads are drawn again at every step


@dataclass(frozen=True)
class Cut:
    """How a QKV matrix of 3·heads·head_dim rows is cut into blocks, from the top down."""

    name: str
    layout: str  # Group Muon's layout
    parts: tuple[Part, ...]
    head_dim: int

    def block_rows(self) -> list[int]:
        return [part.rows for part in self.parts for _ in range(part.blocks)]


def packed(heads: int, head_dim: int) -> Cut:
    return Cut("packed", group_muon.plain(), (Part(1, 3 * heads * head_dim),), head_dim)


def three_way(heads: int, head_dim: int) -> Cut:
    layout = group_muon.packed_qkv(heads, head_dim)
    return Cut("three-way", layout, (Part(3, heads * head_dim),), head_dim)


def head_wise(heads: int, head_dim: int) -> Cut:
    layout = group_muon.packed_qkv(heads, head_dim, q=1, k=1, v=1)
    return Cut("head-wise", layout, (Part(3 * heads, head_dim),), head_dim)


def qk_random(heads: int, head_dim: int, g: int) -> Cut:
    """Q and K in random groups of g heads, V whole."""
    layout = group_muon.packed_qkv(heads, head_dim, q=f"{g}:random", k=f"{g}:random")
    groups = Part(heads // g, g * head_dim, random=True)
    return Cut(f"QK g = {g}", layout, (groups, groups, Part(1, heads * head_dim)), head_dim)


def flops(rows: int, cols: int, steps: int = 5) -> float:
    """FLOPs of the standard Newton–Schulz iteration on one block; a multiply-add counts twice."""
    short, long = sorted((rows, cols))
    return steps * (4 * short * short * long + 2 * short**3)


class Matrices:
    """Weights and gradients, shared by all contenders: dozens of copies would not fit in memory, and
    the time of a step does not depend on the values."""

    def __init__(self, layers: int, shapes: list[tuple[int, int]]) -> None:
        all_shapes = shapes * layers
        self.per_layer = len(shapes)
        self.weights = [torch.randn(shape) * 0.02 for shape in all_shapes]
        self.fresh = [torch.randn(shape) for shape in all_shapes]
        self.grads = [torch.zeros(shape) for shape in all_shapes]

    def parameters(self, cut: Cut | None = None) -> tuple[list[nn.Parameter], Callable[[], None]]:
        """The weights as parameters, and a function that gives them fresh gradients, since some
        optimizers overwrite or drop theirs. With a cut, the first weight of each layer (QKV) is
        split into its blocks, each a parameter."""
        params, grads = [], []
        for i, (weight, grad) in enumerate(zip(self.weights, self.grads)):
            rows = cut.block_rows() if cut and i % self.per_layer == 0 else [len(weight)]
            params += [nn.Parameter(block) for block in weight.split(rows)]
            grads += grad.split(rows)

        def give_gradients() -> None:
            torch._foreach_copy_(self.grads, self.fresh)
            for parameter, grad in zip(params, grads):
                parameter.grad = grad

        give_gradients()  # some optimizers need gradients at construction
        return params, give_gradients

    def flops(self, cut: Cut) -> float:
        total = 0.0
        for i, weight in enumerate(self.weights):
            rows = cut.block_rows() if i % self.per_layer == 0 else [len(weight)]
            total += sum(flops(r, weight.size(1)) for r in rows)
        return total


def torch_muon(matrices: Matrices, cut: Cut) -> Contender:
    """Each block is its own parameter, so nothing has to be gathered."""
    params, before = matrices.parameters(cut)
    optimizer = torch.optim.Muon(params, lr=1e-3, weight_decay=0.0)
    name = f"torch.optim.Muon, {cut.name}"
    return Contender(name, optimizer.step, matrices.flops(cut), baseline=name, before=before)


def ours(matrices: Matrices, cuts: list[Cut], modes: dict[str, dict[str, str]]) -> list[Contender]:
    """Group Muon with every cut in every mode. All share the momentum."""
    params, before = matrices.parameters()
    qkv = params[:: matrices.per_layer]
    rest = [p for i, p in enumerate(params) if i % matrices.per_layer]
    state = None
    result = []
    for cut in cuts:
        for mode, options in modes.items():
            groups = [{"params": qkv, "layout": cut.layout}, {"params": rest}]
            optimizer = group_muon.GroupMuon(groups if rest else groups[:1], **options)
            optimizer.state = state = optimizer.state if state is None else state
            random = " random" if any(part.random for part in cut.parts) else ""
            result.append(
                Contender(
                    f"Group Muon, {cut.name}{random}, {mode}",
                    optimizer.step,
                    matrices.flops(cut),
                    baseline=f"torch.optim.Muon, {cut.name}",
                    mode=mode,
                    before=before,
                )
            )
    return result


def newton_schulz(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Muon's polynomial on a block [m, n] or a stack of blocks [B, m, n], in plain PyTorch."""
    x = x.to(dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(5):
        a = x @ x.mT
        b = add_product(a, a, a, beta=-4.7750, alpha=2.0315)
        x = add_product(x, b, x, beta=3.4445)
    return x.mT if tall else x


def newton_schulz_loop(stack: Tensor) -> Tensor:
    return torch.stack([newton_schulz(block) for block in stack])


def python_muon(
    name: str, matrices: Matrices, cut: Cut, orthogonalize: Callable[[Tensor], Tensor]
) -> Contender:
    """Muon on blocks of QKV in straightforward Python: one momentum buffer per matrix, and an
    orthogonalization of stacks [blocks, rows, cols]."""
    params, before = matrices.parameters()
    buffers = [torch.zeros_like(p) for p in params]

    def apply(weight: Tensor, update: Tensor, part: Part) -> None:
        """Weight and update are both [blocks · rows, cols]."""
        cols = update.size(-1)
        if not part.random:
            result = orthogonalize(update.view(part.blocks, part.rows, cols))
            weight.add_(result.view_as(update), alpha=-1e-3)
            return
        heads = update.view(-1, cut.head_dim, cols)
        order = torch.randperm(len(heads))
        result = orthogonalize(heads[order].view(part.blocks, part.rows, cols))
        weight.view_as(heads).index_add_(0, order, result.view_as(heads).float(), alpha=-1e-3)

    @torch.no_grad()
    def step() -> None:
        sizes = [part.blocks * part.rows for part in cut.parts]
        for p, buffer in zip(params, buffers):
            buffer.lerp_(p.grad, 0.05)
            update = p.grad.lerp(buffer, 0.95)
            for weight, rows, part in zip(p.split(sizes), update.split(sizes), cut.parts):
                apply(weight, rows, part)

    return Contender(name, step, matrices.flops(cut), before=before)


def from_muon_optimizer(matrices: Matrices) -> Contender:
    import muon

    params, before = matrices.parameters()
    optimizer = muon.SingleDeviceMuon(params, lr=1e-3)
    name = f"muon-optimizer {version('muon-optimizer')}, packed"
    return Contender(name, optimizer.step, before=before)


def from_pytorch_optimizer(matrices: Matrices) -> Contender:
    import pytorch_optimizer

    params, before = matrices.parameters()
    optimizer = pytorch_optimizer.Muon([{"params": params, "use_muon": True}], lr=1e-3)
    name = f"pytorch-optimizer {version('pytorch-optimizer')}, packed"
    return Contender(name, optimizer.step, before=before)


def from_heavyball(matrices: Matrices) -> Contender:
    """With its defaults: through torch.compile."""
    import heavyball

    params, before = matrices.parameters()
    optimizer = heavyball.Muon(params, lr=1e-3)
    name = f"heavyball {version('heavyball')} (compiled), packed"
    return Contender(name, optimizer.step, before=before)


def from_optax(matrices: Matrices) -> Contender:
    """Jitted. optax iterates in the momentum's type, so gradients and momentum are bf16 to make the
    iteration bf16. Weights are fp32, as for all contenders."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.contrib.muon(1e-3, mu_dtype=jnp.bfloat16)
    weights = [jnp.asarray(w.numpy()) for w in matrices.weights]
    grads = [jnp.asarray(g.numpy(), dtype=jnp.bfloat16) for g in matrices.fresh]
    held = weights, optimizer.init(weights)

    def update(weights, state, grads):
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step() -> None:
        nonlocal held
        held = jax.block_until_ready(compiled(*held, grads))

    name = f"optax {version('optax')} on JAX (bf16 gradients and momentum), packed"
    # OpenMP's threads spin for some milliseconds after a step and would take cores from XLA.
    return Contender(name, step, before=lambda: time.sleep(0.1))


def peers(matrices: Matrices, cut: Cut, only: str) -> Iterator[Contender]:
    """Installed peers that can step and whose names match `only`. All get the packed matrices."""
    for make in (from_muon_optimizer, from_pytorch_optimizer, from_heavyball, from_optax):
        try:
            peer = make(matrices)
            if not re.search(only, peer.name):
                continue
            peer.before()
            peer.step()
        except Exception as error:  # a peer that fails must not stop the others
            note(f"{make.__name__[5:]} is skipped: {type(error).__name__}: {error}")
            continue
        peer.flops = matrices.flops(cut)
        peer.baseline = f"torch.optim.Muon, {cut.name}"
        yield peer
