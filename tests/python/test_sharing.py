"""Steps that processes share: real processes, real collectives over loopback, weights compared bit by bit."""

import os
import socket
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import group_muon

HEADS, HEAD_DIM, WIDTH = 12, 8, 48
GROUPINGS = [
    "all", "1", "3", "4:interval", "3:random", "2:random:3", "2:0-5-1-4-2-3-6-7-8-11-10-9", "2,6:random@4",
    "2*0.5", "1~3:interval*1.5/3", "1*2,3:random~2/2@0.75lr",
]  # fmt: skip
# Groupings with options of their groups.
CASES: list[tuple[str, dict[str, Any]]] = [(grouping, {}) for grouping in GROUPINGS] + [
    ("1", {"match_spectral": True}),
    ("3:interval", {"row_balance": True}),
    ("3:random", {"match_spectral": True, "row_balance": True}),
]


def layouts(grouping: str) -> dict[str, str]:
    """A weight of each kind of layout."""
    return {
        "packed": group_muon.packed_qkv(HEADS, HEAD_DIM, q=grouping, k=grouping, v="all"),
        "interleaved": group_muon.interleaved_qkv(HEADS, HEAD_DIM, q=grouping, k="3", v=grouping),
        "separate": group_muon.separate(HEADS, HEAD_DIM, grouping),
        "projection": group_muon.output_projection(HEADS, HEAD_DIM, grouping),
        "conv1d": group_muon.transposed(group_muon.separate(HEADS, HEAD_DIM, grouping)),
        "experts": group_muon.stacked(group_muon.separate(HEADS, HEAD_DIM, grouping)),
        "plain": group_muon.plain(),
    }


def shape_of(kind: str) -> list[int]:
    rows = HEADS * HEAD_DIM
    return {
        "packed": [3 * rows, WIDTH], "interleaved": [3 * rows, WIDTH], "separate": [rows, WIDTH],
        "projection": [WIDTH, rows], "conv1d": [WIDTH, rows], "experts": [5, rows, WIDTH], "plain": [40, 56],
    }[kind]  # fmt: skip


def weights_of(grouping: str, **options: Any) -> list[dict[str, Any]]:
    """Groups with the same start on every process: a weight of each layout, and AdamW's. Options are Muon's."""
    torch.manual_seed(1)
    groups: list[dict[str, Any]] = []
    for kind, layout in layouts(grouping).items():
        weight = nn.Parameter(torch.randn(shape_of(kind)))
        groups.append(
            {
                "params": [(kind, weight)],
                "layout": layout,
                "lr": 0.02,
                "weight_decay": 0.1,
                **options,
            }
        )
    others = [
        ("embedding", nn.Parameter(torch.randn(71, 13))),
        ("gain", nn.Parameter(torch.ones(5))),
    ]
    groups.append({"params": others, "algorithm": "adamw", "lr": 0.01, "weight_decay": 0.01})
    return groups


def parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for _, parameter in group["params"]]


def set_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Learning rates go up and down, which some groupings follow."""
    for group in optimizer.param_groups:
        if group["algorithm"] == "muon":
            group["lr"] = group["full_lr"] * (0.5, 1, 0.75, 0.25)[step % 4]


def gradient(parameter: Tensor, index: int, step: int, rank: int) -> Tensor | None:
    """What a process's own batch gives: some weights have none at some steps, or on one process only."""
    if index == 1 and step % 3 == 1:
        return None
    if index == 2 and step % 2 == 1 and rank > 0:
        return None
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    return torch.randn(parameter.shape, generator=generator)


def sum_in_pairs(tensors: list[Tensor]) -> Tensor:
    """The first half, plus the others."""
    half = (len(tensors) + 1) // 2
    if len(tensors) == 1:
        return tensors[0]
    return sum_in_pairs(tensors[:half]) + sum_in_pairs(tensors[half:])


def mean_gradient(parameter: Tensor, index: int, step: int, processes: int) -> Tensor | None:
    """The mean over processes, summed in the order in which they are."""
    all_ = [gradient(parameter, index, step, rank) for rank in range(processes)]
    if all(own is None for own in all_):
        return None
    zeros = torch.zeros_like(parameter)
    return sum_in_pairs([zeros if own is None else own for own in all_]) / processes


def alone(grouping: str, processes: int, steps: int, **options: Any) -> list[Tensor]:
    """One process that is given the mean gradients."""
    groups = weights_of(grouping, **options)
    optimizer = group_muon.GroupMuon(groups)
    weights = parameters(groups)
    for step in range(steps):
        set_rates(optimizer, step)
        for index, weight in enumerate(weights):
            weight.grad = mean_gradient(weight, index, step, processes)
        optimizer.step()
    return [weight.detach() for weight in weights]


def _child(
    rank: int, processes: int, folder: str, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=60),
    )
    try:
        work(rank, processes, folder, *args)
    finally:
        dist.destroy_process_group()


def run(processes: int, folder: Path, work: Callable[..., None], *args: Any) -> None:
    """Runs work(rank, processes, folder, *args) in processes of their own."""
    mp.spawn(_child, (processes, str(folder), work, args), nprocs=processes)


def _steps(rank: int, processes: int, folder: str, gradients: str, steps: int) -> None:
    for number, (grouping, options) in enumerate(CASES):
        groups = weights_of(grouping, **options)
        weights = parameters(groups)
        optimizer = group_muon.GroupMuon(
            groups, process_group=dist.group.WORLD, gradients=gradients
        )
        for step in range(steps):
            set_rates(optimizer, step)
            for index, weight in enumerate(weights):
                weight.grad = (
                    gradient(weight, index, step, rank)
                    if gradients == "local"
                    else mean_gradient(weight, index, step, processes)
                )
            optimizer.step()
        torch.save([weight.detach() for weight in weights], f"{folder}/{rank}-{number}.pt")


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("gradients", ["local", "averaged"])
def test_weights_are_those_of_one_process(tmp_path: Path, processes: int, gradients: str) -> None:
    run(processes, tmp_path, _steps, gradients, 20)
    for number, (grouping, options) in enumerate(CASES):
        expected = alone(grouping, processes, 20, **options)
        for rank in range(processes):
            weights = torch.load(tmp_path / f"{rank}-{number}.pt")
            for ours, theirs in zip(weights, expected, strict=True):
                assert torch.equal(ours, theirs), (grouping, options)


def _bytes(rank: int, processes: int, folder: str, gradients: str) -> None:
    groups = weights_of("3:random")
    weights = parameters(groups)
    optimizer = group_muon.GroupMuon(groups, process_group=dist.group.WORLD, gradients=gradients)
    sent = []
    for step in (0, 2, 4):  # steps at which every weight has a gradient
        for index, weight in enumerate(weights):
            weight.grad = mean_gradient(weight, index, step, processes)
        before = optimizer.bytes_sent
        optimizer.step()
        sent.append(optimizer.bytes_sent - before)
    torch.save(torch.tensor(sent), f"{folder}/{rank}.pt")


@pytest.mark.parametrize(("gradients", "passes"), [("local", 2), ("averaged", 1)])
def test_a_step_sends_no_more_than_an_all_reduce(
    tmp_path: Path, gradients: str, passes: int
) -> None:
    elements = sum(weight.numel() for weight in parameters(weights_of("3:random")))
    for processes in (2, 4):
        folder = tmp_path / str(processes)
        folder.mkdir()
        run(processes, folder, _bytes, gradients)
        sent = torch.stack([torch.load(folder / f"{rank}.pt") for rank in range(processes)])
        # An all-reduce sends 2(N-1)/N elements for each; here half of it is for gradients, half for new values.
        allowed = passes * (processes - 1) / processes * elements * 4
        assert 0.9 * allowed < sent.double().mean() <= 1.02 * allowed, (sent, allowed)
        assert sent.max() <= 1.15 * allowed, (sent, allowed)


def _few_large(rank: int, processes: int, folder: str) -> None:
    """Fewer pieces than a step of this size has rounds."""
    weight = nn.Parameter(torch.zeros(1 << 24))
    weight.grad = torch.full_like(weight, rank + 1.0)
    small = nn.Parameter(torch.zeros(4, 4))
    small.grad = torch.eye(4)
    groups: list[dict[str, Any]] = [
        {"params": [("large", weight)], "algorithm": "adamw", "lr": 0.5},
        {"params": [("small", small)], "lr": 0.5},
    ]
    optimizer = group_muon.GroupMuon(groups, process_group=dist.group.WORLD)
    optimizer.step()
    assert torch.allclose(weight, torch.full_like(weight, -0.5))
    assert small.abs().sum() > 0


def test_a_few_large_pieces_are_exchanged(tmp_path: Path) -> None:
    run(2, tmp_path, _few_large)


def _saved(rank: int, processes: int, folder: str, first: int, last: int, file: str) -> None:
    groups = weights_of("2:random:3")
    weights = parameters(groups)
    optimizer = group_muon.GroupMuon(groups, process_group=dist.group.WORLD, gradients="averaged")
    if first > 0:
        saved = torch.load(file)
        optimizer.load_state_dict(saved["optimizer"])
        for weight, value in zip(weights, saved["weights"], strict=True):
            weight.data.copy_(value)
    for step in range(first, last):
        set_rates(optimizer, step)
        for index, weight in enumerate(weights):
            weight.grad = mean_gradient(weight, index, step, 4)
        optimizer.step()
    state = optimizer.state_dict()
    if rank == 0:
        torch.save({"optimizer": state, "weights": [weight.detach() for weight in weights]}, file)


def test_a_state_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    file = str(tmp_path / "saved.pt")
    for i, (processes, first, last) in enumerate([(4, 0, 6), (2, 6, 9), (1, 9, 12), (3, 12, 15)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        run(processes, folder, _saved, first, last, file)
    saved = torch.load(file)
    for ours, theirs in zip(saved["weights"], alone("2:random:3", 4, 15), strict=True):
        assert torch.equal(ours, theirs)
    # The state is that of one process, too.
    groups = weights_of("2:random:3")
    weights = parameters(groups)
    optimizer = group_muon.GroupMuon(groups)
    optimizer.load_state_dict(saved["optimizer"])
    set_rates(optimizer, 15)
    for index, weight in enumerate(weights):
        weight.data.copy_(saved["weights"][index])
        weight.grad = mean_gradient(weight, index, 15, 4)
    optimizer.step()
    for ours, theirs in zip(weights, alone("2:random:3", 4, 16), strict=True):
        assert torch.equal(ours, theirs)


def _one_differs(rank: int, processes: int, folder: str, what: str) -> None:
    groups = weights_of("3:random")
    options: dict[str, Any] = {}
    if rank == 1 and what == "seed":
        options["seed"] = 5
    if rank == 1 and what == "layout":
        groups[0]["layout"] = layouts("3")["packed"]
    if rank == 1 and what == "full_lr":
        groups[0]["full_lr"] = 0.5
    if rank == 1 and what == "weights":
        del groups[2]
    with pytest.raises(ValueError, match="process 1 of 3") as error:
        group_muon.GroupMuon(groups, process_group=dist.group.WORLD, **options)
    expected = {
        "seed": "options",
        "full_lr": "options",
        "layout": "packed",
        "weights": "8 weights, but others have 9",
    }
    assert expected[what] in str(error.value)


@pytest.mark.parametrize("what", ["seed", "full_lr", "layout", "weights"])
def test_a_process_that_differs_is_named_on_all(tmp_path: Path, what: str) -> None:
    run(3, tmp_path, _one_differs, what)


def _other_grouping(rank: int, processes: int, folder: str) -> None:
    ours, theirs = weights_of("3"), weights_of("3")
    optimizer = group_muon.GroupMuon(ours, process_group=dist.group.WORLD, gradients="averaged")
    reference = group_muon.GroupMuon(theirs)
    for step in range(6):
        if step == 3:  # random groups need other pieces
            optimizer.set_grouping("6:random", "q")
            reference.set_grouping("6:random", "q")
        for groups in (ours, theirs):
            for index, weight in enumerate(parameters(groups)):
                weight.grad = mean_gradient(weight, index, step, processes)
        optimizer.step()
        reference.step()
    for one, other in zip(parameters(ours), parameters(theirs), strict=True):
        assert torch.equal(one, other)
    optimizer.param_groups[0]["layout"] = layouts("4")["packed"]
    with pytest.raises(ValueError, match="use set_grouping"):
        optimizer.step()
    optimizer.param_groups[0]["layout"] = reference.param_groups[0]["layout"]
    optimizer.param_groups[1]["match_spectral"] = True  # its pieces are cut between heads
    with pytest.raises(ValueError, match="match_spectral of a group was edited"):
        optimizer.step()


def test_a_new_grouping_changes_the_pieces(tmp_path: Path) -> None:
    run(3, tmp_path, _other_grouping)


def _few_blocks(rank: int, processes: int, folder: str) -> None:
    weight = nn.Parameter(torch.ones(6, 4))
    optimizer = group_muon.GroupMuon([weight], process_group=dist.group.WORLD)
    weight.grad = torch.arange(24.0).view(6, 4) * (rank + 1)
    optimizer.step()
    torch.save(weight.detach(), f"{folder}/{rank}.pt")


def test_more_processes_than_blocks(tmp_path: Path) -> None:
    run(4, tmp_path, _few_blocks)
    weight = nn.Parameter(torch.ones(6, 4))
    weight.grad = torch.arange(24.0).view(6, 4) * 2.5
    group_muon.GroupMuon([weight]).step()
    for rank in range(4):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), weight)


def _ddp(rank: int, processes: int, folder: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6)))
    optimizer = group_muon.GroupMuon(model, process_group=dist.group.WORLD, gradients="averaged")
    alone_ = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6))
    alone_.load_state_dict(model.module.state_dict())
    reference = group_muon.GroupMuon(alone_)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(7, 12, generator=generator)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), alone_.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for ours, theirs in zip(model.parameters(), alone_.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_under_ddp(tmp_path: Path) -> None:
    run(2, tmp_path, _ddp)


def _weights_from_cpp(file: Path) -> dict[str, Tensor]:
    return {name: buffer.detach() for name, buffer in torch.jit.load(file).state_dict().items()}


@pytest.mark.skipif("SHARE_DOOR" not in os.environ, reason="the C++ program is not built here")
@pytest.mark.parametrize("gradients", ["local", "averaged"])
def test_from_cpp(tmp_path: Path, gradients: str) -> None:
    door = os.environ["SHARE_DOOR"]
    for processes in (2, 3):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        children = []
        for rank in range(processes):
            where = {
                "RANK": rank,
                "WORLD_SIZE": processes,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            command = [door, str(tmp_path / f"{rank}.pt"), "9", gradients, str(processes)]
            environment = os.environ | {key: str(value) for key, value in where.items()}
            children.append(subprocess.Popen(command, env=environment))
        assert [child.wait(timeout=100) for child in children] == [0] * processes
        alone_ = tmp_path / "alone.pt"
        subprocess.run([door, alone_, "9", gradients, str(processes)], check=True)
        expected = _weights_from_cpp(alone_)
        assert len(expected) == 5
        for rank in range(processes):
            for name, value in _weights_from_cpp(tmp_path / f"{rank}.pt").items():
                assert torch.equal(value, expected[name]), (rank, name)


def _everyday(rank: int, processes: int, folder: str) -> None:
    """A schedule, gradient accumulation, clipping, a frozen weight and a state loaded in another dtype."""
    ours, theirs = weights_of("3:random"), weights_of("3:random")
    optimizer = group_muon.GroupMuon(ours, process_group=dist.group.WORLD)
    reference = group_muon.GroupMuon(theirs)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, reference)
    ]  # fmt: skip
    frozen = 3
    for groups in (ours, theirs):
        parameters(groups)[frozen].requires_grad_(False)
    before = parameters(ours)[frozen].clone()
    for step in range(8):
        if step == 4:  # as a file in another precision would give it
            for each in (optimizer, reference):
                state = each.state_dict()
                for own in state["state"].values():
                    own.update({k: v.to(torch.bfloat16) for k, v in own.items() if k != "step"})
                each.load_state_dict(state)
        for index, (one, other) in enumerate(
            zip(parameters(ours), parameters(theirs), strict=True)
        ):
            if index == frozen:
                continue
            own = [gradient(one, index, 2 * step + micro, rank) for micro in range(2)]
            all_ = [
                [gradient(one, index, 2 * step + micro, other_rank) for micro in range(2)]
                for other_rank in range(processes)
            ]

            def added(parts: list[Tensor | None], like: Tensor) -> Tensor:
                total = torch.zeros_like(like)
                for part in parts:
                    total = total if part is None else total + part
                return total

            one.grad = added(own, one)
            other.grad = sum_in_pairs([added(parts, other) for parts in all_]) / processes
        # The whole gradient's norm, which each process can compute here.
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in parameters(theirs) if p.grad is not None]
        )
        for groups in (ours, theirs):
            for parameter in parameters(groups):
                if parameter.grad is not None:
                    parameter.grad *= 2.0 ** -int(norm.log2())  # exact, so that both round alike
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for one, other in zip(parameters(ours), parameters(theirs), strict=True):
            assert torch.equal(one, other), step
    assert torch.equal(parameters(ours)[frozen], before)


def test_schedules_accumulation_clipping_frozen_weights_and_loaded_states(tmp_path: Path) -> None:
    run(3, tmp_path, _everyday)
