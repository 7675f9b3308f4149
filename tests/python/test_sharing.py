"""Steps that processes share: real processes, real collectives over loopback, weights compared bit by bit."""

import io
import multiprocessing
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

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
        # Few key heads, a gate of its own for each query head, latent attention, more than two dimensions.
        "grouped": group_muon.packed_qkv(HEADS, 4, kv_heads=4, value_dim=6, q=grouping, k="2:random", v="1"),
        "gated": group_muon.pattern(HEADS, q=(1, 4, grouping), gate=(1, 4, "all")),
        "latent": group_muon.mla_key_value(HEADS, 3, 5, grouping, "2"),
        "convolution": group_muon.convolution(),
        "flattened": group_muon.flattened(group_muon.output_projection(HEADS, 4, grouping)),
    }  # fmt: skip


def shape_of(kind: str) -> list[int]:
    rows = HEADS * HEAD_DIM
    return {
        "packed": [3 * rows, WIDTH], "interleaved": [3 * rows, WIDTH], "separate": [rows, WIDTH],
        "projection": [WIDTH, rows], "conv1d": [WIDTH, rows], "experts": [5, rows, WIDTH], "plain": [40, 56],
        "grouped": [HEADS * 4 + 4 * 4 + 4 * 6, 20], "gated": [rows, 20], "latent": [rows, 10],
        "convolution": [6, 5, 3, 3], "flattened": [10, HEADS, 4],
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
    """One process that is given the mean gradients, with one thread, as the processes have."""
    torch.set_num_threads(1)
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


def start(processes: int, folder: Path, work: Callable[..., None], *args: Any) -> Any:
    """Starts work(rank, processes, folder, *args) in processes of their own. They are forked by a server that has imported
    torch, which takes each of them seconds."""
    multiprocessing.set_forkserver_preload(
        ["group_muon", "pytest", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
         "torch.distributed.checkpoint.state_dict"]
    )  # fmt: skip
    return mp.start_processes(
        _child, (processes, str(folder), work, args), processes, join=False, start_method="forkserver"
    )  # fmt: skip


def run(processes: int, folder: Path, work: Callable[..., None], *args: Any) -> None:
    started = start(processes, folder, work, *args)
    while not started.join():
        pass


def _steps(rank: int, processes: int, folder: str, steps: int) -> None:
    for number, (grouping, options) in enumerate(CASES):
        groups = weights_of(grouping, **options)
        weights = parameters(groups)
        optimizer = group_muon.GroupMuon(groups, process_group=dist.group.WORLD)
        for step in range(steps):
            set_rates(optimizer, step)
            for index, weight in enumerate(weights):
                weight.grad = gradient(weight, index, step, rank)
            optimizer.step()
        torch.save([weight.detach() for weight in weights], f"{folder}/{rank}-{number}.pt")


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_weights_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    run(processes, tmp_path, _steps, 20)
    for number, (grouping, options) in enumerate(CASES):
        expected = alone(grouping, processes, 20, **options)
        for rank in range(processes):
            weights = torch.load(tmp_path / f"{rank}-{number}.pt")
            for ours, theirs in zip(weights, expected, strict=True):
                assert torch.equal(ours, theirs), (grouping, options)


class _Linear(nn.Module):
    """A loss whose gradients are given: for DistributedDataParallel."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, grads: list[Tensor | None]) -> Tensor:
        return torch.stack(
            [(w * g).sum() for w, g in zip(self.weights, grads, strict=True) if g is not None]
        ).sum()


def _ddp(rank: int, processes: int, folder: str, steps: int) -> None:
    for grouping, options in CASES:
        ours, theirs = weights_of(grouping, **options), weights_of(grouping, **options)
        weights, others = parameters(ours), parameters(theirs)
        model = DistributedDataParallel(_Linear(weights), find_unused_parameters=True)
        optimizer = group_muon.GroupMuon(ours, process_group=dist.group.WORLD, gradients="averaged")
        reference = group_muon.GroupMuon(theirs)
        for step in range(steps):
            set_rates(optimizer, step)
            set_rates(reference, step)
            optimizer.zero_grad()
            if step % 4 == 3:  # accumulated, reduced once
                with model.no_sync():
                    model(
                        [gradient(w, i, step + 1000, rank) for i, w in enumerate(weights)]
                    ).backward()
            model([gradient(w, i, step, rank) for i, w in enumerate(weights)]).backward()
            if step % 4 == 2:
                norm = nn.utils.clip_grad_norm_(weights, 3.0)
                assert norm > 3
            if rank == 0:
                for one, other in zip(weights, others, strict=True):
                    other.grad = None if one.grad is None else one.grad.clone()
                reference.step()
            optimizer.step()
        expected = [weight.detach() for weight in others]
        dist.broadcast_object_list(holder := [expected], src=0)
        for one, other in zip(weights, holder[0], strict=True):
            assert torch.equal(one, other), (grouping, options)


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_under_ddp_weights_are_those_of_one_process(tmp_path: Path, processes: int) -> None:
    run(processes, tmp_path, _ddp, 20)


def _written() -> int:
    """Bytes that this process has written so far, to sockets, too, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def _bytes(rank: int, processes: int, folder: str, gradients: str) -> None:
    groups = weights_of("3:random")
    weights = parameters(groups)
    optimizer = group_muon.GroupMuon(groups, process_group=dist.group.WORLD, gradients=gradients)
    sent = []
    for step in (0, 2, 3):  # steps at which every weight has a gradient
        for index, weight in enumerate(weights):
            weight.grad = mean_gradient(weight, index, step, processes)
        before, written = optimizer.bytes_sent, _written()
        optimizer.step()
        written = _written() - written
        sent.append(optimizer.bytes_sent - before)
        # Nothing is sent but what is counted and the heads of messages: one of all flags, one of each way.
        assert sent[-1] < written < sent[-1] + 3 * 256 * (processes - 1), (sent[-1], written)
    torch.save(torch.tensor(sent), f"{folder}/{rank}.pt")


@pytest.mark.parametrize(("gradients", "passes"), [("local", 2), ("averaged", 1)])
def test_a_step_sends_no_more_than_an_all_reduce(
    tmp_path: Path, gradients: str, passes: int
) -> None:
    elements = sum(weight.numel() for weight in parameters(weights_of("3:random")))
    for processes in (2, 3, 4):
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


def _one_differs(rank: int, processes: int, folder: str) -> None:
    expected = {
        "seed": "options", "lr": "options", "full_lr": "options", "betas": "options", "partitions": "options",
        "gradients": "options",
        "layout": "packed", "name": "in weight 6", "shape": "plain", "weights": "13 weights, but others have 14",
    }  # fmt: skip
    for what, words in expected.items():
        groups = weights_of("3:random")
        options: dict[str, Any] = {}
        if rank == 1:
            match what:
                case "seed":
                    options["seed"] = 5
                case "lr":
                    groups[3]["lr"] = 0.021
                case "full_lr":
                    groups[0]["full_lr"] = 0.5
                case "betas":
                    groups[-1]["betas"] = (0.9, 0.96)
                case "partitions":
                    groups[2]["partitions"] = ["another"]
                case "gradients":
                    options["gradients"] = "averaged"
                case "layout":
                    groups[0]["layout"] = layouts("3")["packed"]
                case "name":
                    groups[6]["params"] = [("other", groups[6]["params"][0][1])]
                case "shape":
                    groups[6]["params"] = [("plain", nn.Parameter(torch.ones(56, 40)))]
                case "weights":
                    del groups[2]
        with pytest.raises(ValueError, match="process 1 of 3") as error:
            group_muon.GroupMuon(groups, process_group=dist.group.WORLD, **options)
        assert words in str(error.value), (what, str(error.value))
    _one_differs_later(rank)


def _one_differs_later(rank: int) -> None:
    """A schedule that follows a process's own loss, and a missing gradient, are found at the step."""
    for gradients, what in (("local", "lr"), ("averaged", "lr"), ("averaged", "gradient")):
        groups = weights_of("3:random")
        optimizer = group_muon.GroupMuon(
            groups, process_group=dist.group.WORLD, gradients=gradients
        )
        for step in range(2):
            for index, weight in enumerate(parameters(groups)):
                weight.grad = mean_gradient(weight, index, 2 * step, 3)
            if step == 0:
                optimizer.step()
        before = [weight.detach().clone() for weight in parameters(groups)]
        if rank == 1 and what == "lr":
            optimizer.param_groups[-1]["lr"] *= 0.5
        if rank == 1 and what == "gradient":
            parameters(groups)[6].grad = None
        with pytest.raises(ValueError, match="process 1 of 3") as error:
            optimizer.step()
        assert {"lr": "learning rates", "gradient": "plain"}[what] in str(error.value)
        for weight, old in zip(parameters(groups), before, strict=True):
            assert torch.equal(weight, old)


def test_a_process_that_differs_is_named_on_all(tmp_path: Path) -> None:
    run(3, tmp_path, _one_differs)


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


def _few(rank: int) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = [(6, 4), (1, 50), (50, 1), (2, 30)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def _few_blocks(rank: int, processes: int, folder: str) -> None:
    """One group of all processes for a few small weights; another of some of them; one weight is a process's own."""
    shared, paired, own = _few(0), _few(0), _few(0)
    everyone = group_muon.GroupMuon(shared, process_group=dist.group.WORLD)
    pair = dist.new_group([1, 3])
    some = group_muon.GroupMuon(paired, process_group=pair) if rank in (1, 3) else None
    private = group_muon.GroupMuon(own)
    for step in range(20):
        for weights, optimizer in ((shared, everyone), (paired, some), (own, private)):
            if optimizer is None:
                continue
            for index, weight in enumerate(weights):
                weight.grad = gradient(weight, index + 3, step, rank)
            optimizer.step()
    torch.save([shared, paired, own], f"{folder}/{rank}.pt")


def test_more_processes_than_blocks_and_weights_that_no_one_else_has(tmp_path: Path) -> None:
    run(4, tmp_path, _few_blocks)

    def expected(ranks: list[int]) -> list[Tensor]:
        weights = _few(0)
        optimizer = group_muon.GroupMuon(weights)
        for step in range(20):
            for index, weight in enumerate(weights):
                grads = [gradient(weight, index + 3, step, rank) for rank in ranks]
                weight.grad = sum_in_pairs(cast(list[Tensor], grads)) / len(ranks)
            optimizer.step()
        return weights

    everyone, pair = expected([0, 1, 2, 3]), expected([1, 3])
    for rank in range(4):
        shared, paired, own = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        wanted = [(shared, everyone), (own, expected([rank]))]
        for ours, theirs in [*wanted, *([(paired, pair)] if rank in (1, 3) else [])]:
            for one, other in zip(ours, theirs, strict=True):
                assert torch.equal(one, other), rank


MOMENTS = ["forward", "backward", "collective", "state", "file"]


class _Deadly(io.FileIO):
    """A file whose writer is killed in the middle."""

    def write(self, data: Any) -> int:
        super().write(bytes(data)[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


def _train(rank: int, processes: int, folder: str, last: int, moment: str) -> None:
    """Saves after every third step. One process is killed in step 4, or when it saves after it."""
    groups = weights_of("3:random")
    weights = parameters(groups)
    model = _Linear(weights)
    optimizer = group_muon.GroupMuon(groups, process_group=dist.group.WORLD)
    file, first = Path(folder, "saved.pt"), 0
    if file.exists():
        saved = torch.load(file)
        first = saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
        for weight, value in zip(weights, saved["weights"], strict=True):
            weight.data.copy_(value)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(first, last):
        victim = moment if rank == (0 if moment == "file" else 1) and step == 4 else ""
        set_rates(optimizer, step)
        optimizer.zero_grad()
        if victim == "forward":
            model.register_forward_hook(die)
        if victim == "backward":
            weights[4].register_hook(die)
        model([gradient(w, i, step, rank) for i, w in enumerate(weights)]).backward()
        if victim == "collective":  # gradients are on their way, new values are not
            optimizer._step_pieces = die  # type: ignore[method-assign]
        optimizer.step()
        if victim == "state":
            die()
        if step % 3 == 2 or step == 4:
            state = {"step": step + 1, "optimizer": optimizer.state_dict(), "weights": weights}
            if rank == 0:
                with (_Deadly if victim else open)(f"{file}.new", "wb") as new:
                    torch.save(state | {"weights": [w.detach() for w in weights]}, new)
                os.replace(f"{file}.new", file)
        if moment == "file" and step == 4:
            dist.barrier()
    torch.save([weight.detach() for weight in weights], f"{folder}/{rank}.pt")


def test_a_killed_process_ends_the_others_and_resuming_is_exact(tmp_path: Path) -> None:
    expected = alone("3:random", 3, 8)
    for moment in MOMENTS:
        folder = tmp_path / moment
        folder.mkdir()
        started = start(3, folder, _train, 8, moment)
        victim = 0 if moment == "file" else 1
        for rank, process in enumerate(started.processes):
            process.join(60)
            assert process.exitcode == (-signal.SIGKILL if rank == victim else 1), (moment, rank)
            if rank != victim and moment != "file":
                words = Path(started.error_files[rank]).read_bytes()
                assert b"another process ended or did not answer in time" in words, moment
        assert torch.load(folder / "saved.pt")["step"] == 3  # whole, and the one before
        (folder / "store").unlink()
        run(3, folder, _train, 8, "")
        for rank in range(3):
            for ours, theirs in zip(torch.load(folder / f"{rank}.pt"), expected, strict=True):
                assert torch.equal(ours, theirs), moment


def _weights_from_cpp(file: Path) -> dict[str, Tensor]:
    return {name: buffer.detach() for name, buffer in torch.jit.load(file).state_dict().items()}


def _doors(
    folder: Path, processes: int, gradients: str, *words: str
) -> list[subprocess.Popen[str]]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    children = []
    for rank in range(processes):
        where = {
            "RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port
        }  # fmt: skip
        command = [
            os.environ["SHARE_DOOR"],
            str(folder / f"{rank}.pt"),
            "9",
            gradients,
            str(processes),
            *words,
        ]
        environment = os.environ | {key: str(value) for key, value in where.items()}
        children.append(
            subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)
        )
    return children


@pytest.mark.skipif("SHARE_DOOR" not in os.environ, reason="the C++ program is not built here")
@pytest.mark.parametrize("gradients", ["local", "averaged"])
def test_from_cpp(tmp_path: Path, gradients: str) -> None:
    door = os.environ["SHARE_DOOR"]
    for processes in (2, 3):
        children = _doors(tmp_path, processes, gradients)
        assert [child.wait(timeout=100) for child in children] == [0] * processes
        alone_ = tmp_path / "alone.pt"
        subprocess.run([door, alone_, "9", gradients, str(processes)], check=True)
        expected = _weights_from_cpp(alone_)
        assert len(expected) == 5
        for rank in range(processes):
            for name, value in _weights_from_cpp(tmp_path / f"{rank}.pt").items():
                assert torch.equal(value, expected[name]), (rank, name)
    for start_ in ("-1", "3"):  # at construction, and later
        children = _doors(tmp_path, 3, gradients, start_)
        for child in children:
            _, text = child.communicate(timeout=100)
            assert child.returncode == 1
            assert "process 1 of 3 has other options than the others" in text


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
        # To a tenth; to nothing that fp32 could square; and not at all.
        limit = {1: 10.0, 2: 1e-25, 3: 1e9}.get(step)
        if limit is not None:
            norms = [each.clip_grad_norm_(limit) for each in (optimizer, reference)]
            assert torch.equal(norms[0], norms[1]) and norms[0] > 100
        if step == 5:  # clipped, but not stepped: it leaves nothing behind
            optimizer.clip_grad_norm_(1e-3)
            kept = [p.grad for p in parameters(ours)]
            optimizer.zero_grad()
            for parameter, grad in zip(parameters(ours), kept, strict=True):
                parameter.grad = grad
        if step == 6:
            optimizer.clip_grad_norm_(1e9)
            parameters(ours)[0].grad.mul_(1)
            with pytest.raises(ValueError, match="call it after the last backward"):
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            continue
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
