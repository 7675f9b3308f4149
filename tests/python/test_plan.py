"""Plans on paper: their numbers are those of real processes and of formulas, and any model can be planned with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from running import program
from test_sharing import layouts, mean_gradient, parameters, run, shape_of, weights_of

import group_muon

PAPER = ("--memory-bandwidth", 1, "--flops", 1)


def plan(folder: Path, *words: object) -> dict[str, Any]:
    file = folder / "plan.json"
    program("plan", *PAPER, *words, "--json", file)
    return json.loads(file.read_text())


def row(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [one for one in rows if one["name"] == name]
    return found


def weights_file(folder: Path, grouping: str) -> Path:
    """The weights of test_sharing as a file."""
    text = "".join(
        f'[[weight]]\nname = "{kind}"\nshape = {shape_of(kind)}\nlayout = "{layout}"\n'
        for kind, layout in layouts(grouping).items()
    )
    for name, shape in (("embedding", [71, 13]), ("gain", [5])):
        text += f'[[weight]]\nname = "{name}"\nshape = {shape}\nlayout = "adamw"\n'
    path = folder / "weights.toml"
    path.write_text(text)
    return path


CASES = [(gradients, groups) for gradients in ("local", "averaged") for groups in ("3:random", "1")]


def _really(rank: int, processes: int, folder: str) -> None:
    """What this process sends in a step, and the bytes of its state, in each case."""
    counted = []
    for gradients, grouping in CASES:
        groups = weights_of(grouping)
        weights = parameters(groups)
        optimizer = group_muon.GroupMuon(
            groups, process_group=dist.group.WORLD, gradients=gradients
        )
        for index, weight in enumerate(weights):
            weight.grad = mean_gradient(weight, index, 0, processes)
        before = optimizer.bytes_sent
        optimizer.step()
        state = sum(
            value.nbytes
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        )
        counted.append((optimizer.bytes_sent - before, state))
    torch.save(counted, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("processes", [2, 4])
def test_bytes_and_state_are_those_of_real_processes(tmp_path: Path, processes: int) -> None:
    run(processes, tmp_path, _really)
    counted = [torch.load(tmp_path / f"{rank}.pt") for rank in range(processes)]
    for i, (gradients, grouping) in enumerate(CASES):
        words = ("--processes", processes, "--sharing", gradients)
        planned = plan(tmp_path, "--model", weights_file(tmp_path, grouping), *words)
        shares = row(planned["optimizers"], "own")["processes"]
        assert [(share["sent"], share["state"]) for share in shares] == [own[i] for own in counted]


def test_a_plan_of_gpt2_small_has_the_numbers_of_the_formulas(tmp_path: Path) -> None:
    words = ("--method", "newton_schulz", "--processes", 4, "--bandwidth", 2, "--tokens", 1024)
    planned = plan(tmp_path, *words, "--qk-group", 6, "--precision", "float32")
    width = 768

    def block(m: int, n: int) -> float:
        return 5 * (4 * m * m * n + 2 * m**3)

    mlp = 2 * block(width, 4 * width)
    expected = {
        "own": 4 * block(width // 2, width) + 2 * block(width, width),
        "three-way": 4 * block(width, width),
        "packed": block(width, 3 * width) + block(width, width),
        "head-wise": 36 * block(64, width) + block(width, width),
        "adamw": -mlp,
    }
    assert [one["name"] for one in planned["optimizers"]] == list(expected)
    elements = 50257 * width + 12 * 12 * width**2
    for name, attention in expected.items():
        shares = row(planned["optimizers"], name)["processes"]
        assert len(shares) == 4
        flops = sum(share["flops"] for share in shares)
        assert flops == pytest.approx(12 * (attention + mlp))
        assert sum(share["sent"] for share in shares) == pytest.approx(24 * elements, rel=1e-4)
        seconds = max(
            share["flops"] / 1e12 + share["memory"] / 1e9 + share["sent"] / 2e9 for share in shares
        )
        assert row(planned["optimizers"], name)["seconds"] == pytest.approx(seconds)
    assert planned["model_flops"] == pytest.approx(
        1024 * 6 * (elements + 12 * width * 1024)
    )  # attention: 6·layers·width·context
    names = [one["name"] for one in planned["sharings"]]
    assert names == ["local", "averaged", "fsdp", "gathered", "redundant"]
    local, averaged = planned["sharings"][:2]
    assert local["framework_sent"] == 0
    assert averaged["framework_sent"] == pytest.approx(2 * 3 / 4 * 4 * elements)


def test_virtual_shards_send_nothing_for_q_k_and_v(tmp_path: Path) -> None:
    file = tmp_path / "qkv.toml"
    layout = group_muon.packed_qkv(12, 8)
    file.write_text(f'[[weight]]\nshape = [288, 96]\nlayout = "{layout}"\n')
    words = ("--model", file, "--processes", 4, "--sharing", "fsdp")
    sent = {}
    for groups in ("3:random:4", "3:random"):
        planned = plan(tmp_path, *words, "--qk-group", groups, "--v-group", groups)
        sent[groups] = sum(s["sent"] for s in row(planned["optimizers"], "own")["processes"])
    assert sent["3:random:4"] == 0
    # 2(N-1)/N² of all bytes, for each of 4 processes.
    assert sent["3:random"] == 4 * 2 * 3 / 16 * 4 * 288 * 96


def test_a_model_of_a_trillion_weights_is_planned_with(tmp_path: Path) -> None:
    planned = plan(tmp_path, "--model", "kimi-k2", "--processes", 4096)
    own, packed = (row(planned["optimizers"], name) for name in ("own", "packed"))
    assert len(own["processes"]) == 4096
    assert own["seconds"] > 0 and 0 < own["share"] < 1
    state = sum(share["state"] for share in own["processes"])
    adamw = sum(share["state"] for share in row(planned["optimizers"], "adamw")["processes"])
    assert 4.1e12 < state < 4.2e12 and adamw == pytest.approx(2 * 4 * 1.0264e12, rel=1e-3)
    assert sum(share["flops"] for share in packed["processes"]) > 0


def test_a_plan_is_printed_in_plain_words(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nlayers = 2\nwidth = 96\n\n[muon]\nqk-group = "3"\n'
    )
    words = ("--model", tmp_path / "run.toml", "--layers", 1, "--processes", 2)
    printed = program("plan", *PAPER, *words).stdout
    assert printed.startswith("run (")
    for said in ("2 processes, each with: 1.00 TFLOP/s", "Q, K 6:random, V all", "packed",
                 "head-wise", "AdamW", "way to share it", "FSDP2"):  # fmt: skip
        assert said in printed, printed
    assert "(measured here)" in program("plan", "--layers", 1, "--threads", 1).stdout
    alone = program("plan", *PAPER, "--layers", 1).stdout
    assert "1 process: " in alone and "way to share it" not in alone
