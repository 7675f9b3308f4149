"""GroupMuon as a torch.optim.Optimizer, compared with torch.optim.Muon and with the C++ optimizer."""

import copy
import io
import os
import pickle
import subprocess

import pytest
import torch
from torch import nn

import group_muon
from group_muon import GroupMuon


def parameter(*shape, dtype=torch.float32, seed=0):
    return nn.Parameter(
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    )


def grad_like(p, step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(p.shape, generator=generator).to(p.dtype)


def set_grads(params, step):
    for i, p in enumerate(params):
        p.grad = grad_like(p, 1000 * step + i)


PACKED = group_muon.packed_qkv(12, 2, q="6:random", k="1,4:random@3")


def two_groups(params, **options):
    groups = [
        {"params": [("qkv", params[0])], "layout": PACKED},
        {"params": [("out", params[1])], "layout": group_muon.output_projection(12, 2, "3:random")},
    ]
    return GroupMuon(groups, lr=0.02, seed=3, **options)


class TestAgainstTorchMuon:
    """Compares with torch.optim.Muon with matching options. Both iterate in bf16, each within about 3%
    of the same polynomial in fp64 (Frobenius norm; small blocks are worst), so TOLERANCE is twice that."""

    TOLERANCE = 0.06

    @pytest.mark.parametrize("nesterov", [False, True])
    @pytest.mark.parametrize("shape", [(32, 64), (64, 32), (48, 48)])
    @pytest.mark.parametrize(
        "theirs, ours",
        [("original", "keller_jordan"), ("match_rms_adamw", "moonlight")],
    )
    def test_agrees_within_bf16_rounding(self, shape, nesterov, theirs, ours):
        a, b = parameter(*shape), parameter(*shape)
        before = a.detach().clone()
        muon = torch.optim.Muon(
            [a], lr=0.1, weight_decay=0.05, nesterov=nesterov, adjust_lr_fn=theirs
        )
        group = GroupMuon(
            [b], lr=0.1, weight_decay=0.05, nesterov=nesterov, average=True, base_scale=ours
        )
        for step in range(5):
            set_grads([a], step)
            b.grad = a.grad.clone()
            muon.step()
            group.step()
        assert ((a - b).norm() / (a - before).norm()).item() < self.TOLERANCE

    def test_head_wise_is_torch_muon_on_each_head(self):
        w = parameter(24, 16)
        heads = [nn.Parameter(h.clone()) for h in w.detach().split(2)]
        before = w.detach().clone()
        ours = GroupMuon(
            [w],
            lr=0.1,
            average=True,
            base_scale="keller_jordan",
            layout=group_muon.separate(12, 2, "1"),
        )
        theirs = torch.optim.Muon(heads, lr=0.1, weight_decay=0)
        set_grads([w], 0)
        for head, g in zip(heads, w.grad.split(2)):
            head.grad = g.clone()
        ours.step()
        theirs.step()
        assert ((w - torch.cat(heads)).norm() / (w - before).norm()).item() < self.TOLERANCE

    @pytest.mark.parametrize("average", [False, True])
    @pytest.mark.parametrize("source", ["optimizer", "state_dict", "named_state_dict"])
    def test_its_momentum_can_be_taken_over(self, average, source):
        a, b = parameter(16, 32), parameter(24, 16, seed=1)
        named = source == "named_state_dict"
        muon = torch.optim.Muon([("a", a), ("b", b)] if named else [a, b], lr=0.1, weight_decay=0)
        for step in range(3):
            set_grads([a, b], step)
            muon.step()
        reference = copy.deepcopy((a, b))
        resumed = torch.optim.Muon(reference, lr=0.1, weight_decay=0)
        resumed.load_state_dict(muon.state_dict())
        # In another order, names or identity find the right buffer.
        ours = [("b", b), ("a", a)] if named else [b, a] if source == "optimizer" else [a, b]
        group = GroupMuon(ours, lr=0.1, average=average, base_scale="keller_jordan")
        group.load_muon(muon if source == "optimizer" else muon.state_dict())
        for p in (a, b):
            expected = muon.state[p]["momentum_buffer"] / (1 if average else 1 - 0.95)
            assert torch.allclose(group.state[p]["momentum_buffer"], expected)
        before = [p.detach().clone() for p in (a, b)]
        set_grads([a, b], 9)
        for p, q in zip(reference, (a, b)):
            p.grad = q.grad.clone()
        resumed.step()
        group.step()
        for p, q, start in zip(reference, (a, b), before):
            assert ((p - q).norm() / (p - start).norm()).item() < self.TOLERANCE

    def test_momentum_that_does_not_fit_is_refused(self):
        a, b = parameter(16, 32), parameter(24, 16)
        muon = torch.optim.Muon([a], lr=0.1)
        set_grads([a], 0)
        muon.step()
        with pytest.raises(ValueError, match="has 1 parameters, this one has 2"):
            GroupMuon([a, b]).load_muon(muon.state_dict())
        with pytest.raises(
            ValueError, match=r"shape \(16, 32\) does not fit parameter '0' of shape \(24, 16\)"
        ):
            GroupMuon([b]).load_muon(muon.state_dict())
        with pytest.raises(ValueError, match="has no parameter '0'"):
            GroupMuon([b]).load_muon(muon)


class TestBothDoorsAgree:
    """The C++ optimizer runs on the same input; results are equal bit for bit."""

    @pytest.mark.parametrize("method", ["newton_schulz", "gram", "exact"])
    @pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
    @pytest.mark.parametrize("nesterov", [False, True])
    def test_bitwise(self, tmp_path, method, precision, nesterov):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the C++ program: sums may depend on the number of threads
        try:
            self.compare(tmp_path, method, precision, nesterov)
        finally:
            torch.set_num_threads(threads)

    def compare(self, tmp_path, method, precision, nesterov):
        layouts = [
            PACKED,
            group_muon.transposed(group_muon.output_projection(12, 2, "3:random")),
            group_muon.plain(),
            group_muon.interleaved_qkv(8, 2, 4, q="2:interval", k="1", v="2:random"),
            group_muon.stacked(group_muon.mla_key_value(4, 3, 2, "2:random", "1")),
        ]
        shapes = [(72, 16), (24, 16), (16, 40), (32, 16), (3, 20, 8)]
        names = ["qkv", "out", "mlp", "gqa", "experts"]
        weights = [parameter(*shape, seed=i) for i, shape in enumerate(shapes)]
        grads = [[grad_like(w, 10 * step + i) for i, w in enumerate(weights)] for step in range(5)]
        options = dict(
            seed=11,
            nesterov=nesterov,
            weight_decay=0.01,
            method=method,
            coefficients="polar_express",
            precision=precision,
        )
        saved = dict(
            weights=[w.detach() for w in weights],
            grads=grads,
            layouts=layouts,
            names=names,
            **options,
        )
        torch.save(saved, tmp_path / "in.pt")
        subprocess.run(
            [os.environ["CPP_DOOR"], tmp_path / "in.pt", tmp_path / "out.pt"], check=True
        )
        groups = [
            {"params": [(n, w)], "layout": layout} for n, w, layout in zip(names, weights, layouts)
        ]
        optimizer = GroupMuon(groups, lr=0.02, **options)
        for step in grads:
            for w, g in zip(weights, step):
                w.grad = g
            optimizer.step()
        for name, ours, theirs in zip(
            names, weights, torch.load(tmp_path / "out.pt", weights_only=False)
        ):
            assert torch.equal(ours.detach(), theirs), name

    def test_random_orders(self):
        printed = subprocess.check_output([os.environ["CPP_DOOR"], "order", "12", "50"], text=True)
        expected = [[int(head) for head in line.split()] for line in printed.splitlines()]
        ours = [
            group_muon.head_order(12, "3:random", seed=7, step=step, parameter="h.0.attn", stream=1)
            for step in range(50)
        ]
        assert ours == expected


class TestContract:
    def test_is_an_optimizer(self):
        optimizer = GroupMuon([parameter(4, 4)])
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert "momentum: 0.95" in repr(optimizer)

    def test_state_dict_round_trip_in_mid_training_is_bit_identical(self):
        def train(restart):
            params = [parameter(72, 16), parameter(16, 24, seed=1)]
            optimizer = two_groups(params)
            for step in range(6):
                if step == restart:
                    file = io.BytesIO()
                    torch.save(optimizer.state_dict(), file)
                    file.seek(0)
                    params = [nn.Parameter(p.detach().clone()) for p in params]
                    optimizer = two_groups(params)
                    optimizer.load_state_dict(torch.load(file, weights_only=True))
                set_grads(params, step)
                optimizer.step()
            return params

        straight = train(None)
        for restart in (1, 2, 3, 5):
            for a, b in zip(straight, train(restart)):
                assert torch.equal(a, b)

    def test_pickle_and_deepcopy_keep_everything(self):
        params = [parameter(72, 16), parameter(16, 24)]
        optimizer = two_groups(params)
        set_grads(params, 0)
        optimizer.step()
        twins = [pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)]
        set_grads(params, 1)
        optimizer.step()
        for twin in twins:
            theirs = [p for group in twin.param_groups for p in group["params"]]
            set_grads(theirs, 1)
            twin.step()
            for ours, other in zip(params, theirs):
                assert ours is not other and torch.equal(ours, other)

    def test_a_state_of_an_older_version_loads(self):
        params = [parameter(72, 16), parameter(16, 24)]
        optimizer = two_groups(params)
        set_grads(params, 0)
        optimizer.step()
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            del group["partitions"], group["rank_tolerance"], group["full_lr"]
            group["lr"] = 1e-3
        other = two_groups(params)
        full = [group["full_lr"] for group in other.param_groups]
        other.load_state_dict(state)
        other.step()
        assert other.param_groups[0]["rank_tolerance"] == 0.0
        assert [group["full_lr"] for group in other.param_groups] == full
        assert other.param_groups[0]["lr"] == 1e-3 != full[0]

    def test_a_loaded_layout_that_differs_is_said(self):
        w = parameter(24, 16)
        saved = GroupMuon([w], layout=group_muon.separate(12, 2, "6:random")).state_dict()
        other = GroupMuon([w], layout=group_muon.separate(12, 2, "3"))
        with pytest.warns(UserWarning, match="replaces the layout .*/3' by .*/6:random'"):
            other.load_state_dict(saved)

    def test_states_of_other_optimizers_are_refused(self):
        w = parameter(24, 16)
        with pytest.raises(ValueError, match="use load_muon for one of torch.optim.Muon"):
            GroupMuon([w]).load_state_dict(torch.optim.Muon([w]).state_dict())
        with pytest.raises(ValueError, match="load_muon needs a torch.optim.Muon"):
            GroupMuon([w]).load_muon(torch.optim.AdamW([w]))

    def test_torch_dtypes_and_whole_floats_are_understood(self):
        GroupMuon([parameter(4, 4)], precision=torch.float32, steps=5.0)

    def test_a_refused_step_changes_nothing(self):
        a, b = parameter(8, 8), parameter(8, 8)
        optimizer = GroupMuon([{"params": [a]}, {"params": [b], "momentum": 0.9}])
        set_grads([a], 0)
        b.grad = torch.eye(8).to_sparse()
        before = a.detach().clone()
        with pytest.raises(TypeError, match="parameter '1' has a sparse gradient"):
            optimizer.step()
        assert torch.equal(a, before) and a not in optimizer.state

    def test_the_full_learning_rate_is_that_of_construction_unless_it_is_given(self):
        groups = [
            {"params": [parameter(4, 4)]},
            {"params": [parameter(4, 4)], "lr": 0.5},
            {"params": [parameter(4, 4)], "lr": torch.tensor(0.25)},
            {"params": [parameter(4, 4)], "full_lr": 2.0},
            {"params": [parameter(4, 4)], "algorithm": "adamw"},
        ]
        optimizer = GroupMuon(groups, lr=0.125)
        assert [g["full_lr"] for g in optimizer.param_groups] == [0.125, 0.5, 0.25, 2.0, 0.0]
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        twin = pickle.loads(pickle.dumps(optimizer))
        assert [g["full_lr"] for g in twin.param_groups] == [0.125, 0.5, 0.25, 2.0, 0.0]
        other = GroupMuon([{**g, "params": [parameter(4, 4)]} for g in groups], lr=7.0)
        other.load_state_dict(optimizer.state_dict())
        assert [g["full_lr"] for g in other.param_groups] == [0.125, 0.5, 0.25, 2.0, 0.0]
        with pytest.raises(ValueError, match="full_lr should be 0 or more, not -1"):
            GroupMuon([parameter(4, 4)], full_lr=-1)

    def test_groupings_with_factors_and_periods_and_by_learning_rate_are_what_they_say(self):
        """Against one optimizer that is told by hand, before each step, what to use."""

        def at(step, fraction):
            if fraction < 0.5:
                return "1", 2.0
            return ("all", 1.5) if step % 3 == 0 else ("6:random", 0.75)

        torch.manual_seed(3)
        ours, theirs = parameter(24, 16), parameter(24, 16)
        theirs.data.copy_(ours)
        text = "1*2,6:random*0.75~all*1.5/3@0.5lr"
        optimizer = GroupMuon([("w", ours)], lr=0.1, layout=group_muon.separate(12, 2, text))
        reference = GroupMuon([("w", theirs)], lr=0.1, layout=group_muon.separate(12, 2))
        for step, fraction in enumerate([0.25, 0.5, 1, 1, 0.75, 0.5, 0.49, 0.0]):
            grouping, factor = at(step, fraction)
            optimizer.param_groups[0]["lr"] = 0.1 * fraction
            reference.param_groups[0]["lr"] = 0.1 * fraction * factor
            reference.set_grouping(grouping, "")
            set_grads([ours], step)
            set_grads([theirs], step)
            optimizer.step()
            reference.step()
            assert torch.allclose(ours, theirs, atol=1e-6), (step, fraction)
            order = group_muon.head_order(12, text, step=step, lr_fraction=fraction, parameter="w")
            assert order == group_muon.head_order(12, grouping, step=step, parameter="w")

    def test_lr_schedulers(self):
        optimizer = GroupMuon([parameter(4, 4)], lr=1.0)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
                torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4),
            ],
            milestones=[2],
        )
        lrs = []
        for _ in range(6):
            lrs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert lrs == pytest.approx([1, 1, 1, 0.75, 0.5, 0.25])

    def test_tensor_lr(self):
        a, b = parameter(8, 8), parameter(8, 8)
        one, other = (
            GroupMuon([a], lr=0.1),
            GroupMuon([b], lr=torch.tensor(0.1, dtype=torch.float64)),
        )
        set_grads([a], 0)
        b.grad = a.grad.clone()
        one.step()
        other.step()
        assert torch.equal(a, b)

    def test_gradient_scaler(self):
        plain, scaled = parameter(8, 8), parameter(8, 8)
        plain_optimizer, scaled_optimizer = GroupMuon([plain], lr=0.1), GroupMuon([scaled], lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        (plain**2).sum().backward()
        plain_optimizer.step()
        scaler.scale((scaled**2).sum()).backward()
        scaler.unscale_(scaled_optimizer)
        scaler.step(scaled_optimizer)
        scaler.update()
        assert torch.equal(plain, scaled)
        # An overflow skips the step.
        scaled.grad.fill_(float("inf"))
        before = scaled.detach().clone()
        scaler.step(scaled_optimizer)
        scaler.update()
        assert torch.equal(scaled, before)
        assert scaler.get_scale() == 512.0

    def test_closure(self):
        w = parameter(8, 8)
        optimizer = GroupMuon([w], lr=0.05)

        def closure():
            optimizer.zero_grad()
            loss = (w**2).sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        assert optimizer.step(closure) < first

    def test_param_groups_keep_their_own_options(self):
        a, b, c = parameter(12, 8), parameter(12, 8), parameter(12, 8)
        optimizer = GroupMuon(
            [{"params": [a], "layout": group_muon.separate(6, 2, "3")}, {"params": [b], "lr": 0.5}],
            lr=0.1,
        )
        optimizer.add_param_group({"params": [c], "nesterov": False})
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.5, 0.1]
        assert [g["nesterov"] for g in optimizer.param_groups] == [True, True, False]
        set_grads([a, b, c], 0)
        optimizer.step()

    def test_custom_coefficients(self):
        a, b = parameter(8, 8), parameter(8, 8)
        named = GroupMuon([a], lr=0.1, steps=3)
        listed = GroupMuon([b], lr=0.1, coefficients=[(3.4445, -4.7750, 2.0315)] * 3)
        set_grads([a], 0)
        b.grad = a.grad.clone()
        named.step()
        listed.step()
        assert torch.equal(a, b)

    def test_a_tail_is_added_to_custom_coefficients_too(self):
        x = torch.randn(6, 10)
        y = group_muon.orthogonalize(
            x, coefficients=[(3.4445, -4.7750, 2.0315)] * 5, tail_steps=10, precision="float32"
        )
        assert torch.allclose(torch.linalg.svdvals(y), torch.ones(6), atol=1e-5)

    @pytest.mark.parametrize(
        "options",
        [
            {"method": "gram", "restarts": [2]},
            {"method": "gram", "restarts": [1, 3]},
            {"method": "exact", "rank_tolerance": 0.5},
            {"tail_steps": 3},
            {"steps": 3},
            {"base_scale": "moonlight"},
            {"transfer": "mup"},
            {"transfer": "mup", "reference": "matrix"},
            {"transfer": "naive", "reference": "matrix"},
            {"relative_eps": False, "eps": 1.0},
        ],
    )
    def test_every_option_reaches_the_step(self, options):
        def stepped(**options):
            w = parameter(72, 16)
            w.grad = grad_like(w, 0)
            layout = group_muon.packed_qkv(12, 2, q=3, k=6)
            optimizer = GroupMuon([w], lr=0.1, layout=layout, precision="float32", **options)
            optimizer.step()
            return w.detach() - parameter(72, 16)

        plain = {key: value for key, value in options.items() if key == "method"}
        different = not torch.equal(stepped(**options), stepped(**plain))
        assert different
        if "transfer" in options or "base_scale" in options:
            # The direction is the same; the factor follows the formula, for Q in blocks of 6 × 16.
            out, reference = 6, 72 if options.get("reference") == "matrix" else 24
            alpha = {
                "naive": lambda m: 1.0,
                "mup": lambda m: (m / 16) ** 0.5,
                "moonlight": lambda m: 0.2 * max(m, 16) ** 0.5,
                "sqrt_max": lambda m: max(m, 16) ** 0.5,
            }
            base = alpha[options.get("base_scale", "sqrt_max")]
            transfer = alpha[options.get("transfer", options.get("base_scale", "sqrt_max"))]
            expected = (
                base(reference) * transfer(out) / transfer(reference) / alpha["sqrt_max"](out)
            )
            assert torch.allclose(stepped(**options)[:24], expected * stepped()[:24], atol=1e-6)

    def test_grouping_changes_in_mid_training_keep_the_momentum(self):
        w = parameter(24, 16)
        optimizer = GroupMuon([w], layout=group_muon.separate(12, 2, "1"))
        set_grads([w], 0)
        optimizer.step()
        before = optimizer.state[w]["momentum_buffer"].clone()
        optimizer.set_grouping("6:random", "heads")
        assert optimizer.param_groups[0]["layout"] == "rows heads=12x2@0+2/6:random"
        assert torch.equal(optimizer.state[w]["momentum_buffer"], before)
        set_grads([w], 1)
        optimizer.step()
        assert torch.allclose(optimizer.state[w]["momentum_buffer"], before * 0.95 + w.grad)
        with pytest.raises(ValueError, match="group size 5 does not divide 12 heads"):
            optimizer.set_grouping(5, "heads")
        assert optimizer.param_groups[0]["layout"] == "rows heads=12x2@0+2/6:random"
        with pytest.raises(
            ValueError, match="no parameter group has a segment 'q' to group; segments: heads"
        ):
            optimizer.set_grouping("2", "q")

    def test_a_schedule_equals_changing_by_hand(self):
        a, b = parameter(24, 16), parameter(24, 16)
        scheduled = GroupMuon([("w", a)], lr=0.1, layout=group_muon.separate(12, 2, "1,6:random@2"))
        by_hand = GroupMuon([("w", b)], lr=0.1, layout=group_muon.separate(12, 2, "1"))
        for step in range(4):
            if step == 2:
                by_hand.set_grouping("6:random", "heads")
            set_grads([a], step)
            b.grad = a.grad.clone()
            scheduled.step()
            by_hand.step()
        assert torch.equal(a, b)

    def test_weights_of_one_partition_name_draw_the_same(self):
        def steps_are_equal(partitions):
            q, k = parameter(24, 16), parameter(24, 16)
            q.grad = k.grad = grad_like(q, 0)
            layout = group_muon.separate(12, 2, "6:random")
            GroupMuon(
                [{"params": [q, k], "layout": layout, "partitions": partitions}], lr=0.1
            ).step()
            return torch.equal(q, k)

        assert steps_are_equal(["layer", "layer"])
        assert not steps_are_equal(None)
        with pytest.raises(ValueError, match="1 names are given for 2 parameters"):
            steps_are_equal(["layer"])

    def test_loading_into_another_dtype(self):
        a, b = parameter(24, 16), parameter(24, 16, dtype=torch.bfloat16)
        optimizer, other = GroupMuon([a]), GroupMuon([b])
        set_grads([a], 0)
        optimizer.step()
        other.load_state_dict(optimizer.state_dict())
        set_grads([b], 1)
        other.step()
        assert other.state[b]["momentum_buffer"].dtype == torch.bfloat16
        assert other.state[b]["step"] == 2


class TestMeta:
    def test_a_model_on_meta_is_stepped_without_data(self):
        w = nn.Parameter(torch.empty(72, 16, device="meta"))
        optimizer = GroupMuon([w], layout=PACKED)
        w.grad = torch.empty_like(w)
        optimizer.step()
        assert optimizer.state[w]["momentum_buffer"].is_meta

    def test_orthogonalize_knows_its_shape_and_type(self):
        for precision in ("bfloat16", "float32", "auto"):
            blocks = torch.empty(3, 8, 4, device="meta")
            y = group_muon.orthogonalize(blocks, precision=precision)
            real = group_muon.orthogonalize(torch.ones(3, 8, 4), precision=precision)
            assert y.shape == (3, 8, 4) and y.dtype == real.dtype and y.is_meta


class TestEngines:
    @pytest.mark.parametrize(
        ("shape", "layout"), [((72, 16), PACKED), ((1536, 384), "rows"), ((400, 1300), "rows")]
    )
    def test_all_engines_agree_in_fp32(self, shape, layout):
        grads = [torch.randn(shape) for _ in range(3)]
        results = []
        for engine in group_muon.engines():
            w = nn.Parameter(torch.zeros(shape))
            optimizer = GroupMuon(
                [w], lr=0.1, layout=layout, method="gram", precision="float32", engine=engine
            )
            for grad in grads:
                w.grad = grad.clone()
                optimizer.step()
            results.append(w.detach())
        for result in results[1:]:
            assert (result - results[0]).norm() < 1e-4 * results[0].norm()

    def test_the_first_step_says_what_auto_came_to_and_a_saved_state_keeps_it(self):
        w = nn.Parameter(torch.randn(8, 8))
        optimizer = GroupMuon([w])
        assert optimizer.param_groups[0]["precision"] == "auto"
        w.grad = torch.randn(8, 8)
        optimizer.step()
        came_to, *_ = torch.ops.group_muon.resolved("auto", "auto", "auto", w.device)
        assert optimizer.param_groups[0]["precision"] == came_to
        other = GroupMuon([w])
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["precision"] == came_to
        assert other.param_groups[0]["engine"] == "auto"

    def test_a_state_without_an_engine_loads(self):
        w = nn.Parameter(torch.randn(8, 8))
        state = GroupMuon([w]).state_dict()
        del state["param_groups"][0]["engine"]
        optimizer = GroupMuon([w])
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["engine"] == "auto"

    def test_an_engine_that_cannot_be_is_refused_at_once(self):
        w = nn.Parameter(torch.randn(8, 8))
        missing = "neon" if "neon" not in group_muon.engines() else "avx2"
        with pytest.raises(ValueError, match=f"engine {missing} does not run on this CPU"):
            GroupMuon([w], engine=missing)
        with pytest.raises(ValueError, match="unknown engine 'fast'"):
            GroupMuon([w], engine="fast")


class TestRefusals:
    @pytest.mark.parametrize(
        "options, message",
        [
            (dict(lr=-1.0), "lr should be 0 or more, not -1"),
            (dict(momentum=-0.1), r"momentum should be in \[0, 1\), not -0.1"),
            (dict(weight_decay=-0.1), "weight_decay should be 0 or more"),
            (dict(base_scale="big"), "unknown scale 'big': use naive, keller_jordan"),
            (dict(transfer="big"), "unknown scale 'big'"),
            (dict(reference="big"), "unknown reference 'big': use segment or matrix"),
            (
                dict(method="svd"),
                "unknown method 'svd': use auto, newton_schulz, gram, accurate_gram or exact",
            ),
            (dict(coefficients="cubic"), "unknown coefficients 'cubic'"),
            (dict(coefficients=[]), "a name or a list of at least one"),
            (dict(coefficients=(3.4, -4.7, 2.0)), "a name or a list of at least one"),
            (dict(method="exact", restarts=[2]), "restarts apply only to the methods gram"),
            (dict(coefficients=[(1.0, 2.0)]), "triples a, b, c, not 2 numbers"),
            (dict(precision="float16"), "unknown precision 'float16'"),
            (dict(steps=0), "at least one step"),
            (dict(eps=-1.0), "eps should be 0 or more"),
            (dict(layout="square"), "should start with 'rows' or 'columns'"),
            (
                dict(layout=group_muon.separate(6, 2, "4")),
                "parameter '0', segment 'heads': group size 4 does not divide 6 heads; use one of 1, 2, 3, 6",
            ),
            (
                dict(layout=group_muon.separate(6, 3)),
                "parameter '0' has 12 rows, but its layout declares 18",
            ),
            (dict(lr=torch.tensor([1.0, 2.0])), "Tensor lr must be 1-element, not 2"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            GroupMuon([parameter(12, 8)], **options)

    def test_unknown_rule(self):
        with pytest.raises(
            ValueError,
            match="unknown grouping rule 'randon' in '3:randon': use adjacent, interval, random",
        ):
            group_muon.separate(6, 2, "3:randon")

    @pytest.mark.parametrize(
        "weight, error, message",
        [
            (torch.ones(4, 4, dtype=torch.int64), TypeError, "parameter 'w' is Long"),
            (torch.zeros(4, 4, dtype=torch.complex64), TypeError, "parameter 'w' is ComplexFloat"),
            (torch.eye(4).to_sparse(), TypeError, "parameter 'w' is Sparse"),
            (
                torch.zeros(4, 4, dtype=torch.float16),
                TypeError,
                "in which summed momentum overflows",
            ),
            (torch.zeros(4), ValueError, r"'w' of shape \[4\] is not a matrix.*GroupMuon\(model"),
        ],
    )
    def test_weights(self, weight, error, message):
        with pytest.raises(error, match=message):
            GroupMuon([("w", weight)])

    def test_a_layout_that_is_no_text(self):
        with pytest.raises(TypeError, match="layout should be a string such as packed_qkv"):
            GroupMuon([parameter(4, 4)], layout=None)

    def test_a_negative_step(self):
        with pytest.raises(ValueError, match="a step should be 0 or more, not -1"):
            group_muon.head_order(12, "3:random", step=-1)

    def test_float16_with_averaged_momentum_is_fine(self):
        w = parameter(8, 8, dtype=torch.float16)
        optimizer = GroupMuon([w], lr=0.01, average=True)
        for _ in range(50):
            w.grad = torch.full_like(w, 4000)
            optimizer.step()
        assert w.isfinite().all()

    def test_sparse_gradient(self):
        w = parameter(4, 4)
        optimizer = GroupMuon([w])
        w.grad = torch.eye(4).to_sparse()
        with pytest.raises(TypeError, match="parameter '0' has a sparse gradient"):
            optimizer.step()

    def test_a_refused_group_is_not_added(self):
        optimizer = GroupMuon([parameter(4, 4)])
        with pytest.raises(ValueError, match="is not a matrix"):
            optimizer.add_param_group({"params": [parameter(4)]})
        assert len(optimizer.param_groups) == 1
