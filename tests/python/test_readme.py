"""What the README says is what the code does."""

import inspect
import pathlib
import re
import shutil

import torch
import transformers
from running import program

from group_muon import GroupMuon

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL).group(1)


def test_the_python_example_runs_and_prints_the_table(capsys):
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=12)
    scope = {"model": transformers.GPT2LMHeadModel(config)}
    exec(block("python"), scope)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    shown = [
        " ".join(line.split())
        for line in re.search(r"```\n(weight  .*?)```", README, re.DOTALL)[1].splitlines()
    ]
    assert len(shown) > 3
    assert all(line in printed for line in shown)
    tokens = torch.randint(64, (2, 8))
    loss = scope["model"](input_ids=tokens, labels=tokens).loss
    loss.backward()
    for optimizer in scope["optimizers"]:
        optimizer.step()
    assert scope["model"](input_ids=tokens, labels=tokens).loss < loss


def test_the_cpp_example_is_part_of_a_program_that_is_built_and_run():
    program = {line.strip() for line in (ROOT / "examples/minimal.cpp").read_text().splitlines()}
    lines = [line.strip() for line in block("cpp").splitlines() if line.strip()]
    assert len(lines) >= 10
    own = ["auto optimizers = group_muon::assemble(model, options);  // any torch::nn::Module"]
    own.append("// and in the loop, after the loss of a batch:")
    assert [line for line in lines if line not in program] == own


def test_the_table_of_options_is_complete_and_has_the_right_defaults():
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", README, re.MULTILINE))
    signature = inspect.signature(GroupMuon).parameters
    assert list(table) == [name for name in signature if name != "params"]
    words = {
        "true": "True",
        "false": "False",
        "none": "None",
        "plain": "rows",
        "chosen": "()",
        "by precision": "0.0",
    }
    for name, shown in table.items():
        default = signature[name].default
        shown = words.get(shown.strip(), shown.strip())
        assert shown == str(default) or float(shown) == default, name


def test_the_study_file_is_one(tmp_path):
    (tmp_path / "study.toml").write_text(
        re.search(r'```\n(base = "small.toml".*?)```', README, re.DOTALL)[1]
    )
    shutil.copy(ROOT / "configs/small.toml", tmp_path)
    listed = program("study", tmp_path / "study.toml", "--list").stdout
    assert "36 runs, 5 settings" in listed  # 8 + 2 + 2 + 8 + 2, noise 8, half-lr 2 × 3
    every = program("study", ROOT / "configs/table1.toml", "--list").stdout
    for name in ("qk-4-interval", "v-2-adjacent", "fixed-qk-v-6-random"):
        assert name in every
