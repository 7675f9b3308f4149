"""Weights in shards (DTensor): FSDP2, HSDP and tensor parallelism, with real processes; weights compared bit by bit."""

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_sharing import CASES, gradient, layouts, parameters, run, set_rates, weights_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import group_muon

# Shapes of a mesh and placements of the weights on it, by the number of processes.
MESHES: dict[int, dict[str, tuple[tuple[int, ...], tuple[Any, ...]]]] = {
    2: {
        "fsdp": ((2,), (Shard(0),)),
        "columns": ((2,), (Shard(1),)),
        "replicated": ((2,), (Replicate(),)),
    },
    3: {"fsdp": ((3,), (Shard(0),)), "columns": ((3,), (Shard(1),))},
    4: {
        "fsdp": ((4,), (Shard(0),)),
        "columns": ((4,), (Shard(1),)),
        "hsdp": ((2, 2), (Replicate(), Shard(0))),
        "fsdp and rows": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        "fsdp and columns": ((2, 2), (Shard(0), Shard(1))),
    },
}


def sharded(tensor: Tensor, mesh: Any, placements: tuple[Any, ...]) -> DTensor:
    """The same on all processes → its shards. A vector is cut along its only dimension."""
    fitting = [
        Replicate() if not isinstance(p, Replicate) and p.dim >= tensor.dim() else p
        for p in placements
    ]
    if isinstance(fitting[0], _StridedShard) and not isinstance(fitting[1], Shard):
        fitting[0] = Shard(0)
    return distribute_tensor(tensor, mesh, fitting, src_data_rank=None)


def every_case() -> list[dict[str, Any]]:
    """Every layout with every grouping, some with options, and AdamW's weights."""
    groups = []
    for grouping, options in CASES:
        for group in weights_of(grouping, **options):
            what = " ".join([grouping, *options])
            named = [(f"{name} {what}", weight) for name, weight in group["params"]]
            groups.append({**group, "params": named})
    return groups


def in_shards(
    groups: list[dict[str, Any]], mesh: Any, placements: tuple[Any, ...]
) -> list[dict[str, Any]]:
    return [
        {
            **group,
            "params": [
                (name, nn.Parameter(sharded(weight.detach(), mesh, placements)))
                for name, weight in group["params"]
            ],
        }
        for group in groups
    ]


def set_gradients(weights: list[Any], step: int, scale: float = 1) -> None:
    """The same on all processes; the second weight has none at some steps."""
    for index, weight in enumerate(weights):
        grad = gradient(torch.empty(weight.shape), index, step, 0)
        if grad is not None:
            grad = grad.to(weight.dtype) * scale
            if isinstance(weight, DTensor):
                grad = sharded(grad, weight.device_mesh, weight.placements)
        weight.grad = grad


def take_steps(groups: list[dict[str, Any]], optimizer: Any, steps: range) -> None:
    for step in steps:
        set_rates(optimizer, step)
        set_gradients(parameters(groups), step)
        optimizer.step()


def of_one(groups: list[dict[str, Any]], steps: int, **options: Any) -> list[Tensor]:
    """The weights of one process after some steps. With one thread, as the processes have: products of torch's, of which
    match_spectral has some, may depend on their number."""
    torch.set_num_threads(1)
    take_steps(groups, group_muon.GroupMuon(groups, **options), range(steps))
    return [weight.detach() for weight in parameters(groups)]


def assert_same(groups: list[dict[str, Any]], expected: list[Tensor], what: str = "") -> None:
    names = [name for group in groups for name, _ in group["params"]]
    for name, weight, whole in zip(names, parameters(groups), expected, strict=True):
        ours: Any = weight.detach()
        own = sharded(whole, ours.device_mesh, ours.placements).to_local()
        assert torch.equal(ours.to_local(), own), f"{what}: {name}"


def _every_case(rank: int, processes: int, folder: str, steps: int) -> None:
    expected = torch.load(f"{folder}/expected.pt")
    for kind, (shape, placements) in MESHES[processes].items():
        groups = in_shards(every_case(), init_device_mesh("cpu", shape), placements)
        take_steps(groups, group_muon.GroupMuon(groups), range(steps))
        assert_same(groups, expected, kind)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_weights_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    torch.save(of_one(every_case(), 20), tmp_path / "expected.pt")
    run(processes, tmp_path, _every_case, 20)


# Shapes that do not divide: heads across shards, a process without rows, one row, more processes than blocks.
ODD = {
    "72 rows": ([72, 8], group_muon.separate(9, 8, "3:random")),
    "5 rows": ([5, 12], group_muon.plain()),
    "2 rows": ([2, 30], group_muon.plain()),
    "1 row": ([1, 50], group_muon.plain()),
    "1 column": ([50, 1], group_muon.plain()),
    "3 of 3": ([9, 14], group_muon.separate(3, 3, "1")),
    "10 columns": ([14, 10], group_muon.output_projection(5, 2, "1")),
    "stack": ([3, 7, 10], group_muon.stacked(group_muon.plain())),
    "convolution": ([6, 5, 3, 3], group_muon.convolution()),
    "flattened": ([10, 6, 4], group_muon.flattened(group_muon.output_projection(6, 4, "2"))),
}  # fmt: skip


def odd() -> list[dict[str, Any]]:
    torch.manual_seed(2)
    groups: list[dict[str, Any]] = [
        {"params": [(name, nn.Parameter(torch.randn(shape)))], "layout": layout, "lr": 0.03}
        for name, (shape, layout) in ODD.items()
    ]
    others = [[1], [3], [63], [64], [65], [130, 3], [7, 5, 3], [1, 1]]
    named = [(f"other {shape}", nn.Parameter(torch.randn(shape))) for shape in others]
    groups.append({"params": named, "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.1})
    return groups


# Options and types of weights; what is computed where depends on them.
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum": {"nesterov": False},
    "average": {"average": True},
    "portable": {"engine": "portable"},
    "newton_schulz": {"method": "newton_schulz", "maximize": True, "base_scale": "moonlight"},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16 average": {"dtype": torch.bfloat16, "average": True, "engine": "portable"},
    "float16": {"dtype": torch.float16, "average": True},
    "in bfloat16": {"precision": "bfloat16", "engine": "portable"},
}


def variant(grouping: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    groups = weights_of(grouping)
    for parameter in parameters(groups):
        parameter.data = parameter.data.to(dtype)
    return groups


def _odd(rank: int, processes: int, folder: str) -> None:
    expected = torch.load(f"{folder}/odd.pt")
    for kind, (shape, placements) in MESHES[processes].items():
        if kind == "fsdp and rows":
            continue  # DTensor cannot cut these shapes so
        groups = in_shards(odd(), init_device_mesh("cpu", shape), placements)
        take_steps(groups, group_muon.GroupMuon(groups), range(20))
        assert_same(groups, expected, kind)
    _not_everyone_s(rank, processes)
    shape, placements = MESHES[processes]["columns" if processes == 3 else "fsdp"]
    mesh = init_device_mesh("cpu", shape)
    for name, values in VARIANTS.items():
        options = dict(values)
        groups = in_shards(
            variant("2:random:3", options.pop("dtype", torch.float32)), mesh, placements
        )
        take_steps(groups, group_muon.GroupMuon(groups, **options), range(3))
        assert_same(groups, torch.load(f"{folder}/{name}.pt"), name)


def _not_everyone_s(rank: int, processes: int) -> None:
    """One optimizer, in which the processes do not have the same weights: some are in shards on two of them, some in shards
    on a mesh of one, some whole and private."""
    meshes = [[*range(processes)], [0, 1], [2]]
    pairs = [(DeviceMesh("cpu", ranks), ranks) for ranks in meshes]
    ours, theirs = [], []
    for number, (mesh, ranks) in enumerate(pairs):
        if rank not in ranks:
            continue
        named = [
            {**group, "lr": 0.02 / (1 + number), "params": [(f"{number} {n}", p) for n, p in group["params"]]}
            for group in weights_of("2:random:3")
        ]  # fmt: skip
        theirs += named
        ours += in_shards(named, mesh, (Shard(0),))
    for algorithm in ("muon", "adamw"):  # of this process alone, with a learning rate of its own
        for groups in (ours, theirs):
            torch.manual_seed(rank)
            own = [(f"own {algorithm}", nn.Parameter(torch.randn(9, 14)))]
            groups.insert(rank, {"params": own, "algorithm": algorithm, "lr": 0.1 / (1 + rank)})
    optimizer, reference = group_muon.GroupMuon(ours), group_muon.GroupMuon(theirs)
    for step in range(20):
        for groups, each in ((ours, optimizer), (theirs, reference)):
            for group in groups:
                for index, (_, weight) in enumerate(group["params"]):
                    grad = gradient(torch.empty(weight.shape), index + 3, step, 0)
                    if isinstance(weight, DTensor):
                        grad = sharded(grad, weight.device_mesh, weight.placements)
                    weight.grad = grad
            each.step()
    for one, other in zip(parameters(ours), parameters(theirs), strict=True):
        if isinstance(one, DTensor):
            other = sharded(other.detach(), one.device_mesh, one.placements).to_local()
        assert torch.equal(getattr(one.detach(), "_local_tensor", one.detach()), other)


def _many(rank: int, processes: int, folder: str) -> None:
    expected = torch.load(f"{folder}/odd.pt")
    groups = in_shards(odd(), init_device_mesh("cpu", (processes,)), (Shard(0),))
    take_steps(groups, group_muon.GroupMuon(groups), range(4))
    assert_same(groups, expected)


def test_72_rows_on_16_processes(tmp_path: Path) -> None:
    torch.save(of_one(odd(), 4), tmp_path / "odd.pt")
    run(16, tmp_path, _many)


@pytest.mark.parametrize("processes", [3, 4])
def test_uneven_shards_and_other_options(tmp_path: Path, processes: int) -> None:
    torch.save(of_one(odd(), 20), tmp_path / "odd.pt")
    for name, values in VARIANTS.items():
        options = dict(values)
        groups = variant("2:random:3", options.pop("dtype", torch.float32))
        torch.save(of_one(groups, 3, **options), tmp_path / f"{name}.pt")
    run(processes, tmp_path, _odd)


def _bytes(rank: int, processes: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (processes,))
    sent = []
    for grouping, placements in (
        ("3:random:4", Shard(0)),
        ("3:random", Shard(0)),
        ("all", Shard(1)),
    ):
        weights = {name: nn.Parameter(torch.randn(96, 64)) for name in "qkv"}
        layout = group_muon.separate(12, 8, grouping)
        groups = [{"params": list(weights.items()), "layout": layout}]
        groups = in_shards(groups, mesh, (placements,))
        # In bf16, updates come back as such, in half as many bytes.
        optimizer = group_muon.GroupMuon(groups, precision="float32")
        before = optimizer.bytes_sent
        take_steps(groups, optimizer, range(2, 3))
        sent.append(optimizer.bytes_sent - before)
    torch.save(torch.tensor(sent), f"{folder}/{rank}.pt")


def test_virtual_shards_exchange_nothing_and_others_no_more_than_they_must(tmp_path: Path) -> None:
    for processes in (2, 4):
        folder = tmp_path / str(processes)
        folder.mkdir()
        run(processes, folder, _bytes)
        sent = torch.stack([torch.load(folder / f"{rank}.pt") for rank in range(processes)])
        assert (sent[:, 0] == 0).all()  # Q, K and V under virtual shards
        allowed = 2 * (processes - 1) / processes**2 * (3 * 96 * 64) * 4
        mean = sent.double().mean(0)
        assert ((mean[1:] > 0.9 * allowed) & (mean[1:] <= 1.02 * allowed)).all(), (sent, allowed)


def _agreement(rank: int, processes: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (processes,))

    def build(grouping: str = "3:random") -> list[dict[str, Any]]:
        return in_shards(weights_of(grouping), mesh, (Shard(0),))

    for what, expected in {
        "seed": "options", "layout": "packed", "weights": "13 weights, but others have 14", "placements": "separate",
    }.items():  # fmt: skip
        groups, options = build(), {}
        if rank == 1 and what == "seed":
            options["seed"] = 5
        if rank == 1 and what == "layout":
            groups[0]["layout"] = layouts("3")["packed"]
        if rank == 1 and what == "weights":
            del groups[2]
        if rank == 1 and what == "placements":
            groups[2] = in_shards(weights_of("3:random"), mesh, (Shard(1),))[2]
        with pytest.raises(ValueError, match="process 1 of 3") as error:
            group_muon.GroupMuon(groups, **options)
        assert expected in str(error.value), (what, str(error.value))
    for what, expected in {"grouping": "packed", "lr": "options", "gradient": "plain"}.items():
        groups = build()
        optimizer = group_muon.GroupMuon(groups)
        take_steps(groups, optimizer, range(1))
        before = [weight.detach().clone() for weight in parameters(groups)]
        set_gradients(parameters(groups), 2)
        if rank == 1 and what == "grouping":
            optimizer.set_grouping("4", "q")
        if rank == 1 and what == "lr":
            optimizer.param_groups[3]["lr"] = 1.0
        if rank == 1 and what == "gradient":
            parameters(groups)[6].grad = None
        with pytest.raises(ValueError, match="process 1 of 3") as error:
            optimizer.step()
        assert expected in str(error.value), (what, str(error.value))
        for weight, old in zip(parameters(groups), before, strict=True):
            assert torch.equal(weight.detach().to_local(), old.to_local())  # type: ignore[attr-defined]
    _go_on_together(build())
    _refusals(mesh)


def _go_on_together(groups: list[dict[str, Any]]) -> None:
    """After one process alone had another grouping, the others get it, too."""
    optimizer, alone = group_muon.GroupMuon(groups), weights_of("3:random")
    reference = group_muon.GroupMuon(alone)
    for own_groups, own in ((alone, reference), (groups, optimizer)):
        set_gradients(parameters(own_groups), 0)
        if own is reference or dist.get_rank() == 1:
            own.set_grouping("6:interval", "q")
    with pytest.raises(ValueError, match="process 1 of 3"):
        optimizer.step()
    if dist.get_rank() != 1:
        optimizer.set_grouping("6:interval", "q")
    optimizer.step()
    reference.step()
    assert_same(groups, [weight.detach() for weight in parameters(alone)])


def _refusals(mesh: Any) -> None:
    groups = in_shards(weights_of("3"), mesh, (Shard(0),))
    with pytest.raises(ValueError, match="remove process_group"):
        group_muon.GroupMuon(groups, process_group=dist.group.WORLD)
    partial = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    with pytest.raises(ValueError, match="'0' has the placements .* should not be a sum"):
        group_muon.GroupMuon([nn.Parameter(partial)])
    local = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)], shape=(12, 4), stride=(4, 1))
    with pytest.raises(ValueError, match="has 12 elements here, but its placements .* give it 16"):
        group_muon.GroupMuon([nn.Parameter(local)])


def test_a_process_that_differs_is_named_on_all(tmp_path: Path) -> None:
    run(3, tmp_path, _agreement)


def _training(rank: int, processes: int, folder: str) -> None:
    """What people do with optimizers, beside one process that does the same."""
    mesh = init_device_mesh("cpu", (processes,))
    ours, theirs = in_shards(weights_of("3:random"), mesh, (Shard(0),)), weights_of("3:random")
    optimizer, reference = group_muon.GroupMuon(ours), group_muon.GroupMuon(theirs)
    both = ((ours, optimizer), (theirs, reference))
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 6) for _, o in both]
    for step in range(12):
        for groups, own in both:
            weights = parameters(groups)
            if step == 4:
                own.set_grouping("6:interval", "q")
            if step == 5:
                own.set_grouping("2:random", "k")
            set_gradients(weights, step)
            if step == 6:  # accumulated
                first = [None if w.grad is None else w.grad.clone() for w in weights]
                set_gradients(weights, step + 100)
                for weight, grad in zip(weights, first, strict=True):
                    weight.grad = grad if weight.grad is None else weight.grad + grad
            if step == 7:  # a state that was saved in another type
                state = own.state_dict()
                for values in state["state"].values():
                    for key, value in values.items():
                        if isinstance(value, Tensor) and value.dim() > 0:
                            values[key] = value.to(torch.bfloat16)
                own.load_state_dict(state)
            if step == 8:  # frozen
                weights[3].requires_grad_(False)
                weights[3].grad = None
            own.step()
        for schedule in schedules:
            schedule.step()
        assert_same(ours, [weight.detach() for weight in parameters(theirs)], f"step {step}")
    # The state of whole weights can be loaded, and the other way round.
    whole = {
        key: {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in values.items()}
        for key, values in optimizer.state_dict()["state"].items()
    }
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key, values in reference.state_dict()["state"].items():
        for name, value in values.items():
            assert value.__class__ in (Tensor, int) and torch.equal(
                torch.as_tensor(value), torch.as_tensor(whole[key][name])
            )
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    for groups, own in both:
        take_steps(groups, own, range(12, 14))
    assert_same(ours, [weight.detach() for weight in parameters(theirs)], "after loading")
    _clipping(mesh)
    _other_placements(mesh)


def _clipping(mesh: Any) -> None:
    """By our function: bit for bit as in one process; by torch's, whose norms are rounded otherwise: nearly so."""
    for limit in (3.0, 1e-25, 1e9):
        for ours_ in (True, False):
            ours, theirs = in_shards(weights_of("3"), mesh, (Shard(0),)), weights_of("3")
            norms = []
            for groups in (ours, theirs):
                optimizer, weights = group_muon.GroupMuon(groups), parameters(groups)
                set_gradients(weights, 0)
                clip = (
                    optimizer.clip_grad_norm_
                    if ours_
                    else partial(nn.utils.clip_grad_norm_, weights)
                )
                norms.append(_whole(clip(limit)))
                optimizer.step()
            torch.testing.assert_close(norms[0], norms[1])
            assert norms[0] > 100
            if ours_:
                assert torch.equal(norms[0], norms[1])
                assert_same(ours, [weight.detach() for weight in parameters(theirs)], "clipped")
            for one, other in zip(parameters(ours), parameters(theirs), strict=True):
                torch.testing.assert_close(_whole(one), other, atol=1e-4, rtol=1e-4)


def _other_placements(mesh: Any) -> None:
    """Gradients that do not lie as their weights do."""
    processes = mesh.size()
    for placement in (Replicate(), Shard(1), Partial()):
        ours, theirs = in_shards(weights_of("3"), mesh, (Shard(0),)), weights_of("3")
        set_gradients(parameters(theirs), 0)
        for weight, whole in zip(parameters(ours), parameters(theirs), strict=True):
            grad = whole.grad
            if grad is None:
                continue
            if isinstance(placement, Partial):  # summed: zeros but on one process
                own = grad if dist.get_rank() == processes - 1 else torch.zeros_like(grad)
                weight.grad = DTensor.from_local(own, mesh, [placement])
            else:
                weight.grad = sharded(grad, mesh, (placement,))
        optimizer = group_muon.GroupMuon(ours)
        if isinstance(placement, Partial):
            with pytest.raises(ValueError, match="redistribute it before its norm"):
                optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        group_muon.GroupMuon(theirs).step()
        assert_same(ours, [weight.detach() for weight in parameters(theirs)], str(placement))


def test_schedules_accumulation_clipping_frozen_weights_and_loaded_states(tmp_path: Path) -> None:
    run(2, tmp_path, _training)


def _model(kind: str) -> nn.Module:
    import transformers  # takes seconds, in every process

    torch.manual_seed(5)
    if kind == "gpt2":
        sizes = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=12, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(sizes)
    if kind == "phi3":  # Q, K and V in one weight, gate and up-projection in another
        return transformers.Phi3ForCausalLM(
            transformers.Phi3Config(
                vocab_size=63, hidden_size=48, intermediate_size=100, num_hidden_layers=1, num_attention_heads=12,
                num_key_value_heads=6, pad_token_id=0, tie_word_embeddings=False,
            )
        )  # fmt: skip
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=63, hidden_size=48, intermediate_size=100, num_hidden_layers=2, num_attention_heads=12,
            num_key_value_heads=6, tie_word_embeddings=False,
        )
    )  # fmt: skip


def _cut_model(model: nn.Module, how: str) -> None:
    if how == "fsdp":
        kinds = ("GPT2Block", "GPT2Attention", "Conv1D", "Phi3DecoderLayer")
        for module in reversed([m for m in model.modules() if type(m).__name__ in kinds]):
            fully_shard(module)
        fully_shard(model)
        return
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    else:
        sizes = (2, 2) if how == "2-D" else (1, dist.get_world_size())
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        for layer in model.model.layers:  # type: ignore[union-attr]
            parallelize_module(layer, mesh["tensor"], plan)
        if how == "tensor":  # norms and embeddings stay plain tensors
            return
        mesh = mesh["data"]
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _real_model(rank: int, processes: int, folder: str) -> None:
    for kind, how in (
        [("gpt2", "fsdp"), ("phi3", "fsdp"), ("llama", "tensor")]
        if processes == 2
        else [("llama", "hsdp"), ("llama", "2-D")]
    ):
        model, alone = _model(kind), _model(kind)
        options: Any = {
            "group_size": {"q": "3:random", "k": "3:random", "o": "2"},
            "lr": 0.01,
            "adamw_weight_decay": 0.1,
        }
        text, expected_text = io.StringIO(), io.StringIO()
        _cut_model(model, how)
        groups = group_muon.param_groups(model, options["group_size"], file=text)
        group_muon.param_groups(alone, options["group_size"], file=expected_text)
        assert (
            text.getvalue() == expected_text.getvalue()
        )  # heads and roles are those of the whole model
        assert "0 guessed, 0 unresolved" in text.getvalue()
        if kind == "phi3":
            (line,) = [line for line in text.getvalue().splitlines() if "gate_up_proj" in line]
            assert "muon" in line
        del groups
        optimizer = group_muon.GroupMuon(model, **options, verbose=False)
        reference = group_muon.GroupMuon(alone, **options, verbose=False)
        # Processes of a tensor-parallel group see the same data.
        replica = {"2-D": rank // 2, "tensor": 0}.get(how, rank)
        for step in range(20):
            micro_batches = 2 if step % 4 == 3 else 1  # accumulated, reduced once
            for micro in range(micro_batches):
                if how != "tensor":
                    model.set_requires_gradient_sync(micro == micro_batches - 1)  # type: ignore[operator]
                generator = torch.Generator().manual_seed(100 * step + 10 * micro + replica)
                tokens = torch.randint(60, (2, 9), generator=generator)
                model(input_ids=tokens, labels=tokens).loss.backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                theirs.grad = _whole(ours.grad).clone()  # averaged by FSDP
            optimizer.step()
            reference.step()
            optimizer.zero_grad()
            for (name, ours), theirs in zip(
                model.named_parameters(), alone.parameters(), strict=True
            ):
                assert torch.equal(_whole(ours.detach()), theirs), (
                    f"{kind}, {how}, step {step}: {name}"
                )
        assert any(
            isinstance(weight, DTensor) and weight.to_local().numel() < weight.numel()
            for weight in model.parameters()
        )


@pytest.mark.parametrize("processes", [2, 4])
def test_a_real_model_under_fully_shard(tmp_path: Path, processes: int) -> None:
    run(processes, tmp_path, _real_model)


class _Net(nn.Module):
    """Weights of every kind, for checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        for number, (_, weight) in enumerate(self.start()):
            self.register_parameter(f"w{number}", weight)

    @staticmethod
    def start() -> list[tuple[str, nn.Parameter]]:
        return [item for group in weights_of("2:random:3") for item in group["params"]]


def _net_groups(net: nn.Module) -> list[dict[str, Any]]:
    named = iter(net.named_parameters())
    return [
        {**group, "params": [next(named) for _ in group["params"]]}
        for group in weights_of("2:random:3")
    ]


def _checkpoint(
    rank: int, processes: int, folder: str, first: int, last: int, old: str, new: str
) -> None:
    for how in ("of a model", "plain", "process group"):
        if not old:  # before the first step there is a state already
            _save_and_load(how, processes, 0, 0, "", f"{folder}/empty {how}")
        before = f"{old or folder + '/empty'} {how}"
        _save_and_load(how, processes, first, last, before, f"{new} {how}")


def _save_and_load(how: str, processes: int, first: int, last: int, old: str, new: str) -> None:
    net = _Net()
    shared: Any = {}
    if how == "process group":
        shared = {"process_group": dist.group.WORLD, "gradients": "averaged"}
    elif processes > 1:
        shape, names = ((2, 2), ("replicas", "shards")) if processes == 4 else ((processes,), None)
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    groups = _net_groups(net)
    optimizer = group_muon.GroupMuon(groups, **shared)

    def state() -> dict[str, Any]:
        own = optimizer.state_dict() if how == "plain" else get_optimizer_state_dict(net, optimizer)
        return {"model": net.state_dict(), "optimizer": own}

    if old:
        if how == "plain" and processes == 1:  # torch's way to have state before it is loaded
            get_optimizer_state_dict(net, optimizer)
        saved = state()
        dcp.load(saved, checkpoint_id=old)
        net.load_state_dict(saved["model"])
        if how == "plain":
            optimizer.load_state_dict(saved["optimizer"])
        else:
            set_optimizer_state_dict(net, optimizer, saved["optimizer"])
        assert optimizer.param_groups[0]["layout"] == layouts("2:random:3")["packed"]
    take_steps(groups, optimizer, range(first, last))
    dcp.save(state(), checkpoint_id=new)  # does not change anything, even before the first step
    whole = [_whole(weight.detach()) for weight in net.parameters()]
    if dist.get_rank() == 0:
        torch.save(whole, f"{new}.pt")


def test_distributed_checkpoints_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    # Processes, and where they go on: saved on 4, loaded on 2 and on 1, and back.
    runs = {"a": (4, ""), "b": (2, "a"), "c": (1, "a"), "d": (4, "c"), "e": (3, "b")}
    reached = {"": 0}
    for name, (processes, old) in runs.items():
        folder = tmp_path / name
        folder.mkdir()
        first, last = reached[old], reached[old] + 3
        reached[name] = last
        new = str(folder / "saved")
        run(processes, folder, _checkpoint, first, last, old and str(tmp_path / old / "saved"), new)
        expected = of_one(_net_groups(_Net()), last)
        for how in ("of a model", "plain", "process group"):
            for ours, theirs in zip(torch.load(f"{new} {how}.pt"), expected, strict=True):
                assert torch.equal(ours, theirs), f"{how}: {processes} processes, step {last}"
