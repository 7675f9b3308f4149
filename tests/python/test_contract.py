"""What users of torch.optim expect of an optimizer, for Muon's groups, AdamW's groups and both in one object."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

import group_muon
from group_muon import GroupMuon, param_groups

KINDS = ["muon", "adamw", "both"]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Fit:
    """A matrix W and a bias b such that W·x + b becomes 0, and their optimizer."""

    def __init__(self, kind, contiguous=True, names=False, **options):
        self.kind, self.names = kind, names
        matrix, bias = random(10, 5, 2), random(10, 2, seed=1)
        if contiguous:
            matrix, bias = matrix[..., 0].contiguous(), bias[..., 0].contiguous()
        else:
            matrix, bias = matrix[..., 0], bias[..., 0]
        self.matrix, self.bias = nn.Parameter(matrix), nn.Parameter(bias)
        self.optimizer = GroupMuon(self.groups(), **{"lr": 0.01, "adamw_lr": 0.01, **options})

    @property
    def params(self):
        return {
            "muon": [self.matrix],
            "adamw": [self.matrix, self.bias],
            "both": [self.matrix, self.bias],
        }[self.kind]

    def groups(self):
        matrix = [("matrix", self.matrix)] if self.names else [self.matrix]
        bias = [("bias", self.bias)] if self.names else [self.bias]
        adamw = {"algorithm": "adamw"}
        return {
            "muon": [{"params": matrix}],
            "adamw": [{"params": matrix + bias, **adamw}],
            "both": [{"params": matrix}, {"params": bias, **adamw}],
        }[self.kind]

    def loss(self):
        self.optimizer.zero_grad()
        loss = (self.matrix @ random(5, seed=2) + self.bias).square().sum()
        loss.backward()
        return loss

    def train(self, steps, *schedulers):
        for _ in range(steps):
            loss = self.optimizer.step(self.loss)
            for scheduler in schedulers:
                scheduler.step(loss) if isinstance(
                    scheduler, ReduceLROnPlateau
                ) else scheduler.step()
        return self

    def copy_of_weights(self):
        return [p.detach().clone() for p in self.params]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
class TestDirection:
    @pytest.mark.parametrize("contiguous", [True, False])
    @pytest.mark.parametrize("maximize", [False, True])
    def test_the_loss_falls_or_rises(self, kind, contiguous, maximize):
        fit = Fit(kind, contiguous, maximize=maximize)
        before = fit.loss().item()
        after = fit.train(20).loss().item()
        assert after > before if maximize else after < before

    @pytest.mark.parametrize(
        "make",
        [
            lambda o: StepLR(o, step_size=3, gamma=0.9),
            lambda o: LinearLR(o, start_factor=0.4, total_iters=40),
            lambda o: ExponentialLR(o, gamma=0.99),
            lambda o: ReduceLROnPlateau(o, threshold=1, patience=0),
            lambda o: OneCycleLR(o, max_lr=0.02, total_steps=30),
        ],
    )
    def test_with_a_scheduler(self, kind, make):
        fit = Fit(kind)
        before = fit.loss().item()
        scheduler = make(fit.optimizer)
        fit.train(20, scheduler)
        assert fit.loss().item() < before
        assert all(group["lr"] != 0.01 for group in fit.optimizer.param_groups)

    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_a_tensor_as_lr_equals_its_value(self, kind, shape):
        lr = torch.full(
            shape, 0.0125
        )  # exact in fp32 would be 1/80; both sides get the same number
        number = lr.item()
        tensors = Fit(kind, lr=lr, adamw_lr=lr).train(3)
        numbers = Fit(kind, lr=number, adamw_lr=number).train(3)
        for a, b in zip(tensors.params, numbers.params):
            assert torch.allclose(a, b, atol=1e-7)
        assert all(group["lr"] is lr for group in tensors.optimizer.param_groups)

    def test_a_group_has_its_own_lr_and_decay(self, kind):
        still = Fit(kind)
        before = still.copy_of_weights()
        for group in still.optimizer.param_groups:
            group["lr"] = 0.0
        still.train(2)
        assert_same(before, still.params)
        plain, decayed = Fit(kind).train(1), Fit(kind, weight_decay=0.5, adamw_weight_decay=0.5)
        decayed.train(1)
        for a, b, start in zip(plain.params, decayed.params, before):
            assert torch.allclose(a - b, 0.01 * 0.5 * start, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
class TestStep:
    def test_without_gradients_nothing_happens(self, kind):
        fit = Fit(kind, weight_decay=0.1, adamw_weight_decay=0.1)
        before = fit.copy_of_weights()
        fit.optimizer.step()
        assert_same(before, fit.params)
        assert not fit.optimizer.state

    def test_zero_gradients_change_nothing(self, kind):
        fit = Fit(kind)
        before = fit.copy_of_weights()
        for p in fit.params:
            p.grad = torch.zeros_like(p)
        fit.optimizer.step()
        assert_same(before, fit.params)

    @pytest.mark.parametrize("maximize", [False, True])
    def test_gradients_are_not_written(self, kind, maximize):
        fit = Fit(kind, weight_decay=0.1, adamw_weight_decay=0.1, maximize=maximize)
        fit.loss()
        before = [p.grad.clone() for p in fit.params]
        versions = [p.grad._version for p in fit.params]
        fit.optimizer.step()
        assert_same(before, [p.grad for p in fit.params])
        assert versions == [p.grad._version for p in fit.params]

    def test_hooks_run_in_order_and_may_replace_arguments(self, kind):
        fit, calls = Fit(kind), []
        optimizer = fit.optimizer
        handles = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        ]
        fit.loss()
        optimizer.step()
        assert calls == ["before", "after"]
        for handle in handles:
            handle.remove()
        optimizer.step()
        assert len(calls) == 2

    def test_the_state_says_how_many_steps(self, kind):
        fit = Fit(kind).train(3)
        for group in fit.optimizer.param_groups:
            for p in group["params"]:
                state = fit.optimizer.state[p]
                assert float(state["step"]) == 3
                assert isinstance(state["step"], torch.Tensor) == (group["algorithm"] == "adamw")
                keys = {"muon": ["step", "momentum_buffer"]}.get(
                    group["algorithm"], ["step", "exp_avg", "exp_avg_sq"]
                )
                assert list(state) == keys


@pytest.mark.parametrize("kind", KINDS)
class TestState:
    def test_printing(self, kind):
        assert f"algorithm: {'muon' if kind == 'both' else kind}" in repr(Fit(kind).optimizer)

    @pytest.mark.parametrize("names", [(False, False), (True, True), (False, True), (True, False)])
    def test_a_loaded_optimizer_goes_on_as_the_saved_one(self, kind, names):
        here = Fit(kind, names=names[0]).train(3)
        saved = here.optimizer.state_dict()
        there = Fit(kind, names=names[1], lr=7.0, adamw_lr=7.0)
        for p, q in zip(there.params, here.params):
            p.data.copy_(q.data)
        there.optimizer.load_state_dict(copy.deepcopy(saved))  # loading may alias tensors
        here.train(3)
        there.train(3)
        assert_same(here.params, there.params)
        mine, other = here.optimizer.state_dict(), there.optimizer.state_dict()
        if names[0] == names[1]:
            assert repr(mine) == repr(other)
        assert ("param_names" in other["param_groups"][0]) == any(names)

    def test_through_a_file_that_holds_only_weights(self, kind):
        fit = Fit(kind).train(2)
        file = io.BytesIO()
        torch.save(fit.optimizer.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert repr(loaded) == repr(fit.optimizer.state_dict())

    @pytest.mark.parametrize("how", ["load_state_dict", "deepcopy", "pickle"])
    def test_groups_keep_their_keys(self, kind, how):
        fit = Fit(kind).train(1)
        keys = [list(group) for group in fit.optimizer.param_groups]
        other = fit.optimizer
        if how == "load_state_dict":
            other.load_state_dict(other.state_dict())
        else:
            other = copy.deepcopy(other) if how == "deepcopy" else pickle.loads(pickle.dumps(other))
        assert [sorted(group) for group in other.param_groups] == [sorted(k) for k in keys]
        assert [sorted(group) for group in other.param_groups[1:]] == [
            sorted(other.param_groups[0]) for _ in other.param_groups[1:]
        ]
        assert other.defaults.keys() == GroupMuon([nn.Parameter(torch.eye(2))]).defaults.keys()
        public = [key for key in vars(fit.optimizer) if not key.startswith("_")]
        assert sorted(public) == sorted(key for key in vars(other) if not key.startswith("_"))
        other.add_param_group({"params": [nn.Parameter(random(4, 4))]})
        assert sorted(other.param_groups[-1]) == sorted(keys[0])

    def test_hooks_of_state_dict(self, kind):
        fit, calls = Fit(kind).train(1), []
        optimizer = fit.optimizer
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("before"))
        optimizer.register_state_dict_post_hook(lambda o, state: {**state, "note": "mine"})
        assert optimizer.state_dict()["note"] == "mine" and calls == ["before"]

    def test_hooks_of_load_state_dict_run_before_our_checks(self, kind):
        """A hook may turn any file into a state; here the state is one level down."""
        fit, calls = Fit(kind).train(1), []
        optimizer = fit.optimizer
        optimizer.register_load_state_dict_pre_hook(
            lambda o, file: calls.append("second") or file["inner"]
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda o, file: calls.append("first"), prepend=True
        )
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("after"))
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = 0.5
        optimizer.load_state_dict({"inner": state})
        assert calls == ["first", "second", "after"]
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}

    def test_step_counts_of_any_type_load(self, kind):
        here, there = Fit(kind).train(2), Fit(kind).train(2)
        state = there.optimizer.state_dict()
        for own in state["state"].values():
            own["step"] = int(own["step"])
        there.optimizer.load_state_dict(state)
        assert_same(here.train(2).params, there.train(2).params)

    def test_a_distributed_checkpoint_can_be_loaded_twice(self, kind, tmp_path):
        def started():
            model = nn.Linear(5, 10)
            if kind == "adamw":
                groups = [{"params": model.named_parameters(), "algorithm": "adamw"}]
            elif kind == "muon":
                model.bias.requires_grad_(False)
                groups = [("weight", model.weight)]
            else:
                groups = param_groups(model, verbose=False)
            return model, GroupMuon(groups, lr=0.01)

        def step(model, optimizer, seed):
            for p in model.parameters():
                p.grad = random(*p.shape, seed=seed)
            optimizer.step()
            optimizer.zero_grad()

        model, optimizer = started()
        step(model, optimizer, 3)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "x", no_dist=True)
        other, fresh = started()
        for _ in range(2):
            weights, state = get_state_dict(other, fresh)
            dcp.load(
                {"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "x", no_dist=True
            )
            set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
        step(model, optimizer, 4)
        step(other, fresh, 4)
        assert_same(model.parameters(), other.parameters())


class TestAdamW:
    def twins(self):
        shapes = [(64, 16), (16,), (3, 4, 5), ()]
        return [
            [nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate(shapes)] for _ in "ab"
        ]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("options", [{}, {"maximize": True}, {"lr": torch.tensor(0.02)}])
    def test_is_torchs_bit_for_bit(self, dtype, options):
        ours, theirs = ([nn.Parameter(p.data.to(dtype)) for p in twin] for twin in self.twins())
        common = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, **options}
        a = GroupMuon([{"params": ours, "algorithm": "adamw", **common}])
        b = torch.optim.AdamW(theirs, fused=True, **common)
        for step in range(5):
            for p, q in zip(ours, theirs):
                p.grad = random(*p.shape, seed=10 + step).to(dtype)
                q.grad = p.grad.clone()
            a.step()
            b.step()
        assert_same(ours, theirs)
        for p, q in zip(ours, theirs):
            assert a.state[p].keys() == b.state[q].keys()
            for key, value in b.state[q].items():
                assert torch.equal(a.state[p][key], value) and a.state[p][key].dtype == value.dtype

    def test_the_constructors_defaults_are_its_own(self):
        w, b = nn.Parameter(random(4, 4)), nn.Parameter(random(4))
        groups = [{"params": [w]}, {"params": [b], "algorithm": "adamw", "role": "bias"}]
        optimizer = GroupMuon(
            groups, lr=1.0, weight_decay=0.3, adamw_lr=2.0, adamw_betas=(0.5, 0.6)
        )
        muon, adamw = optimizer.param_groups
        assert (muon["lr"], muon["weight_decay"], muon["eps"]) == (1.0, 0.3, 1e-7)
        assert (adamw["lr"], adamw["weight_decay"], adamw["eps"]) == (2.0, 0.0, 1e-8)
        assert adamw["betas"] == (0.5, 0.6) and adamw["role"] == "bias" and "role" not in muon
        twin = pickle.loads(pickle.dumps(optimizer))
        twin.add_param_group({"params": [nn.Parameter(random(3))], "algorithm": "adamw"})
        assert twin.param_groups[-1]["lr"] == 2.0

    def test_strides_are_followed(self):
        """torch's fused kernel ignores strides, so weights and gradients with unusual ones need care."""
        plain = [nn.Parameter(random(6, 4)) for _ in range(3)]
        odd = [
            nn.Parameter(random(6, 4)),
            nn.Parameter(random(6, 4).t().contiguous().t()),
            nn.Parameter(torch.stack([random(6, 4)] * 2, -1)[..., 0]),
        ]
        a, b = (GroupMuon([{"params": ps, "algorithm": "adamw"}]) for ps in (plain, odd))
        for step in range(3):
            grad = random(6, 4, seed=step + 5)
            for p in plain:
                p.grad = grad.clone()
            odd[0].grad = grad.t().contiguous().t()
            odd[1].grad = grad.clone()
            odd[2].grad = grad.clone()
            a.step()
            b.step()
        for p, q in zip(plain, odd):
            assert torch.allclose(p, q, atol=1e-6)

    def test_steps_before_muon(self):
        calls = []

        class Spy(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                calls.append(str(function))
                return function(*args, **(kwargs or {}))

        fit = Fit("both")
        fit.loss()
        with Spy():
            fit.optimizer.step()
        adamw, muon = (
            next(i for i, call in enumerate(calls) if name in call)
            for name in ("_fused_adamw_", "group_muon.step_")
        )
        assert adamw < muon

    def test_on_meta(self):
        b = nn.Parameter(torch.empty(4, device="meta"))
        optimizer = GroupMuon([{"params": [b], "algorithm": "adamw"}])
        b.grad = torch.empty_like(b)
        optimizer.step()
        assert optimizer.state[b]["exp_avg"].is_meta

    @pytest.mark.parametrize(
        "change, error, message",
        [
            ({"lr": -1.0}, ValueError, "lr should be 0 or more, not -1"),
            ({"betas": (0.9, 1.0)}, ValueError, r"betas should be two numbers in \[0, 1\)"),
            ({"betas": (0.9,)}, ValueError, "betas should be two numbers"),
            ({"eps": -1.0}, ValueError, "eps should be 0 or more"),
            ({"weight_decay": -1.0}, ValueError, "weight_decay should be 0 or more"),
            ({"params": [torch.ones(3, dtype=torch.int64)]}, TypeError, "parameter '0' is .*int64"),
        ],
    )
    def test_refusals(self, change, error, message):
        with pytest.raises(error, match=message):
            GroupMuon([{"params": [nn.Parameter(random(3))], "algorithm": "adamw", **change}])

    def test_a_sparse_gradient_is_refused_before_anything_is_written(self):
        fit = Fit("both")
        fit.loss()
        before = fit.copy_of_weights()
        fit.bias.grad = fit.bias.grad.to_sparse()
        with pytest.raises(TypeError, match="parameter '1' has a sparse gradient.*sparse=False"):
            fit.optimizer.step()
        assert_same(before, fit.params)
        assert not fit.optimizer.state


class TestConstructor:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 24)
            self.attention = nn.MultiheadAttention(24, 6)
            self.norm = nn.LayerNorm(24)

    def test_a_model_is_param_groups_of_it(self, capsys):
        model = self.Net()
        groups = param_groups(model, 3, "interval", segments=("q",))
        table = capsys.readouterr().out
        one = GroupMuon(groups, lr=0.5)
        other = GroupMuon(model, group_size=3, rule="interval", segments=("q",), lr=0.5)
        assert capsys.readouterr().out == table
        assert repr(one) == repr(other) and "3:interval" in repr(one)
        assert "model_weights" not in one.param_groups[0] and groups[0]["model_weights"] == 7
        GroupMuon(groups)  # the list can be used again

    def test_arguments_for_a_model_need_one(self):
        with pytest.raises(
            TypeError, match=r"group_size is for a model: use GroupMuon\(model, group_"
        ):
            GroupMuon([nn.Parameter(random(4, 4))], group_size=3)

    def test_missing_weights_are_an_error(self):
        groups = param_groups(self.Net(), verbose=False)
        with pytest.raises(ValueError, match="have 6 of the model's 7 trainable weights"):
            GroupMuon([g for g in groups if g["role"] != "embedding"])
        GroupMuon([g for g in groups if g["role"] != "embedding"], partial=True)

    @pytest.mark.parametrize(
        "options, message",
        [
            (dict(ns_steps=6), "use steps"),
            (dict(ns_coefficients=(3.4, -4.7, 2.0)), r"use coefficients=\[\(a, b, c\)\] \* 5"),
            (dict(adjust_lr_fn="original"), 'use base_scale: "keller_jordan"'),
            (dict(foreach=False), "all weights are stepped together"),
            (dict(fused=False), "fused kernel"),
            (dict(capturable=True), "call step.. outside the graph"),
            (dict(differentiable=True), "cannot be differentiated"),
            (dict(amsgrad=True), "no amsgrad"),
            (
                dict(momentun=0.9),
                "unknown option 'momentun' of GroupMuon; did you mean 'momentum'?",
            ),
            (dict(zzzzz=6), "unknown option 'zzzzz' of GroupMuon$"),
        ],
    )
    def test_options_of_others_are_refused_with_what_to_use(self, options, message):
        with pytest.raises(TypeError, match=message):
            GroupMuon([nn.Parameter(random(4, 4))], **options)
        with pytest.raises(ValueError, match=message.replace("GroupMuon", "a parameter group")):
            GroupMuon([{"params": [nn.Parameter(random(4, 4))], **options}])

    def test_values_that_change_nothing_are_accepted(self):
        harmless = dict(
            foreach=None, fused=True, capturable=False, differentiable=False, amsgrad=False
        )
        optimizer = GroupMuon([nn.Parameter(random(4, 4))], **harmless)
        assert not harmless.keys() & optimizer.param_groups[0].keys()
        group = {"params": [nn.Parameter(random(4, 4))], **harmless}
        assert not harmless.keys() & GroupMuon([group]).param_groups[0].keys()

    def test_unknown_keys_of_a_group_are_an_error_and_nothing_is_added(self):
        optimizer = GroupMuon([nn.Parameter(random(4, 4))])
        for key, near in (("layouts", "layout"), ("learning_rate", None), ("beta", "betas")):
            words = f"unknown option '{key}' of a parameter group" + (near or "") * 0
            with pytest.raises(
                ValueError, match=words + (f"; did you mean '{near}'" if near else "")
            ):
                optimizer.add_param_group({"params": [nn.Parameter(random(4, 4))], key: 1})
        with pytest.raises(ValueError, match="unknown algorithm 'adam' .* use muon or adamw"):
            optimizer.add_param_group({"params": [nn.Parameter(random(4))], "algorithm": "adam"})
        assert len(optimizer.param_groups) == 1

    def test_keys_of_schedulers_are_known(self):
        names = [
            "initial_lr",
            "max_lr",
            "min_lr",
            "base_momentum",
            "max_momentum",
            "swa_lr",
            "name",
        ]
        group = {"params": [nn.Parameter(random(4, 4))], **dict.fromkeys(names, 0.1)}
        optimizer = GroupMuon([group])
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(optimizer.param_groups[0][name] == 0.1 for name in names)

    @pytest.mark.parametrize(
        "params, options, error, message",
        [
            (nn.Parameter(torch.eye(2)), {}, TypeError, "should be an iterable of Tensors or dicts"),
            (None, {"lr": torch.tensor([0.1, 0.1])}, ValueError, "Tensor lr must be 1-element"),
            (None, {"lr": -1.0}, ValueError, "lr should be 0 or more"),
            (None, {"adamw_lr": float("nan")}, ValueError, "adamw_lr should be 0 or more, not nan"),
            (None, {"method": "fast"}, ValueError, "unknown method"),
            ([], {}, ValueError, "empty parameter list"),
            ([("a", torch.eye(2)), torch.eye(3)], {}, ValueError, "Some param names are missing"),
            ([{"params": [torch.eye(2)]}, {"params": [("a", torch.eye(3))]}], {}, ValueError, "with/without names"),
        ],
    )  # fmt: skip
    def test_options_are_checked_before_parameters(self, params, options, error, message):
        with pytest.raises(error, match=message):
            GroupMuon(params, **options)

    def test_a_weight_given_twice(self):
        w = nn.Parameter(torch.eye(2))
        with pytest.warns(UserWarning, match="duplicate parameters"):
            GroupMuon([w, w])
        with pytest.raises(ValueError, match="appear in more than one parameter group"):
            GroupMuon([{"params": [w]}, {"params": [w]}])


class TestLoading:
    def test_another_algorithm_is_refused(self):
        muon, adamw = Fit("muon"), Fit("muon")
        adamw.optimizer = GroupMuon([{"params": [adamw.matrix], "algorithm": "adamw"}])
        with pytest.raises(ValueError, match="group 0 is stepped by adamw, but by muon in"):
            adamw.optimizer.load_state_dict(muon.optimizer.state_dict())

    def test_what_a_newer_version_saved_is_said(self):
        fit = Fit("muon").train(1)
        state = fit.optimizer.state_dict()
        state["param_groups"][0]["of_tomorrow"] = 1
        with pytest.warns(UserWarning, match="does not know 'of_tomorrow'"):
            fit.optimizer.load_state_dict(state)

    def test_a_state_from_before_adamw_loads_in_silence(self):
        fit = Fit("muon").train(1)
        state = fit.optimizer.state_dict()
        for key in ("algorithm", "betas", "maximize"):
            del state["param_groups"][0][key]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit.optimizer.load_state_dict(state)
        assert fit.optimizer.param_groups[0]["algorithm"] == "muon"
        fit.train(1)


class TestTakingOverMuon:
    """What load_muon's documentation says differs."""

    def updates(self, x, precision="bfloat16"):
        ours, theirs = nn.Parameter(torch.zeros_like(x)), nn.Parameter(torch.zeros_like(x))
        ours.grad, theirs.grad = x.clone(), x.clone()
        options = dict(average=True, base_scale="keller_jordan", precision=precision)
        GroupMuon([ours], lr=1.0, nesterov=False, method="newton_schulz", **options).step()
        torch.optim.Muon([theirs], lr=1.0, weight_decay=0, nesterov=False).step()
        return ours.detach(), theirs.detach()

    def test_tiny_matrices_are_not_shrunk(self):
        ours, theirs = self.updates(random(16, 32) * 1e-12)
        assert theirs.norm() < 0.5 * ours.norm()
        same, _ = self.updates(random(16, 32))
        assert torch.allclose(ours.norm(), same.norm(), rtol=0.05)

    def test_ill_conditioned_matrices_differ_in_bf16_where_both_round(self):
        u, v = torch.linalg.qr(random(32, 32))[0], torch.linalg.qr(random(32, 32, seed=1))[0]

        def difference(condition):
            x = u @ torch.diag(torch.logspace(0, -condition, 32)) @ v
            ours, theirs = self.updates(x)
            return ((ours - theirs).norm() / theirs.norm()).item()

        assert difference(1) < 0.06
        assert difference(6) > 0.06


def test_only_muons_groups_take_part_in_load_muon_and_set_grouping():
    fit = Fit("both")
    fit.loss()
    muon = torch.optim.Muon([fit.matrix], lr=0.0)
    muon.step()
    fit.optimizer.load_muon(muon.state_dict())
    assert list(fit.optimizer.state) == [fit.matrix]
    fit.optimizer.param_groups[0]["layout"] = group_muon.separate(5, 2)
    fit.optimizer.set_grouping(1, "")
    assert [g["layout"] for g in fit.optimizer.param_groups] == [
        group_muon.separate(5, 2, 1),
        "rows",
    ]
