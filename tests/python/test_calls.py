"""What a GPU would see of a step: how many operator calls, that nothing waits for the device, and torch.compile."""

import functools
import pathlib
import sys

import pytest
import torch
from torch import nn

import group_muon
from group_muon import GroupMuon

sys.path.append(str(pathlib.Path(__file__).parents[2] / "bench"))
from calls import CONTENDERS, count, group_muon_step
from pretend import DEVICE, Calls, weight


@functools.cache
def launches(layers, layout):
    return count(lambda n: group_muon_step(n, layout), layers).launches


@functools.cache
def counted(name, layers):
    return count(CONTENDERS[name], layers)


def layout_of(heads, q):
    return group_muon.packed_qkv(heads, 768 // heads, q=q, k=q, v=q)


class TestNumberOfCalls:
    @pytest.mark.parametrize("rule", ["adjacent", "interval", "random"])
    def test_does_not_grow_with_groups(self, rule):
        """12 groups of one head take as many calls as 2 groups of six."""
        counts = {g: launches(12, layout_of(12, f"{g}:{rule}")) for g in (1, 2, 3, 6)}
        if rule == "interval":
            del counts[1]  # adjacent, which needs no index
        assert len(set(counts.values())) == 1, counts

    @pytest.mark.parametrize("q", ["2", "2:random"])
    def test_does_not_grow_with_heads(self, q):
        counts = {heads: launches(12, layout_of(heads, q)) for heads in (4, 12, 48)}
        assert len(set(counts.values())) == 1, counts

    def test_grows_with_layers_in_proportion(self):
        for layout in ("rows", layout_of(12, "6:random"), layout_of(12, 1)):
            few, many = launches(12, layout), launches(48, layout)
            # A bucket that is not full may split one way or the other.
            assert 3.8 * few < many < 4.05 * few, layout

    @pytest.mark.parametrize("layers", [12, 48])
    def test_is_below_that_of_torch_muon(self, layers):
        theirs = counted("torch.optim.Muon, packed", layers).launches
        ours = counted("GroupMuon, QK g = 6 random", layers).launches
        assert ours < 0.75 * theirs

    def test_adamw_is_two_calls_for_a_group(self):
        random6 = layout_of(12, "6:random")
        without = count(lambda n: group_muon_step(n, random6), 12)
        with_adamw = count(lambda n: group_muon_step(n, random6, adamw=True), 12)
        assert with_adamw.names["_fused_adamw_"] == 1
        assert with_adamw.launches == without.launches + 2


class TestWaiting:
    """A CUDA graph can be captured only from a step that neither waits nor copies from the host's memory."""

    @pytest.mark.parametrize("layers", [12, 48])
    @pytest.mark.parametrize("name", [n for n in CONTENDERS if "random" not in n])
    def test_fixed_groups_need_nothing_from_the_host(self, name, layers):
        calls = counted(name, layers)
        assert calls.waits == 0 and calls.copies == 0

    @pytest.mark.parametrize("layers", [12, 48])
    @pytest.mark.parametrize("name", [n for n in CONTENDERS if "random" in n])
    def test_random_groups_do_not_wait_for_the_device(self, name, layers):
        assert counted(name, layers).waits == 0

    @pytest.mark.parametrize("layers", [12, 48])
    @pytest.mark.parametrize("name", [n for n in CONTENDERS if "random" in n])
    def test_random_groups_copy_their_rows_once(self, name, layers):
        assert counted(name, layers).copies == 1

    @pytest.mark.parametrize("method", ["newton_schulz", "gram", "accurate_gram"])
    @pytest.mark.parametrize(
        "options", [{}, {"nesterov": False}, {"average": True}, {"weight_decay": 0.1}]
    )
    def test_no_option_waits(self, method, options):
        layout = layout_of(12, 6)
        make = lambda n: group_muon_step(n, layout, method=method, **options)  # noqa: E731
        calls = count(make, 2)
        assert calls.waits == 0 and calls.copies == 0

    def test_the_count_sees_waits_and_copies(self):
        w = weight(4, 4)
        with Calls() as calls, torch.no_grad():
            w.sum().item()
            w.add_(torch.ops.aten._to_copy(torch.ones(4, 4), device=DEVICE))
            w.cpu()
        assert calls.waits == 2 and calls.copies == 1
        assert calls.names["add_"] == 1 and calls.names["_to_copy"] == 2

    def test_the_counted_step_is_the_real_one(self):
        layout = group_muon.packed_qkv(6, 2, q="3:random", k="2:interval")
        groups = lambda w, b: [  # noqa: E731
            {"params": [w], "layout": layout},
            {"params": [b], "algorithm": "adamw"},
        ]
        pretended = [weight(36, 12), weight(12)]
        real = [nn.Parameter(p.here.clone()) for p in pretended]
        for p, q in zip(pretended, real):
            q.grad = p.grad.here.clone()
        options = dict(engine="portable", precision="float32", lr=0.1, adamw_lr=0.1)
        ours, theirs = GroupMuon(groups(*pretended), **options), GroupMuon(groups(*real), **options)
        for _ in range(3):
            with Calls():
                ours.step()
            theirs.step()
        for p, q in zip(pretended, real):
            assert torch.equal(p.here, q)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_step_is_the_step(backend):
    torch._dynamo.reset()

    def made():
        torch.manual_seed(0)
        model = nn.MultiheadAttention(24, 6)
        return model, GroupMuon(model, group_size=3, lr=0.1, adamw_lr=0.1, verbose=False)

    (model, plain), (other, optimizer) = made(), made()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (plain, optimizer)]
    compiled = torch.compile(optimizer.step, backend=backend)
    for step in range(12):  # more than dynamo compiles before it gives up
        for m in (model, other):
            for i, p in enumerate(m.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + i))
        plain.step()
        compiled()
        for scheduler in schedulers:
            scheduler.step()
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
    assert optimizer.state[other.in_proj_weight]["step"] == 12
