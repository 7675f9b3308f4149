"""What README.md and docs/ say is what the code does."""

import inspect
import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest
import torch
import transformers
from running import PROGRAM, program

from group_muon import GroupMuon

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    *sorted(ROOT.glob("docs/*.md")),
    *(ROOT / name for name in ("docs/results/README.md", "bench/README.md", "CONTRIBUTING.md")),
    ROOT / "ARCHITECTURE.md",
]


def page(name):
    return (ROOT / name).read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text):
    """Lines of sh blocks: continued lines joined, comments dropped."""
    for block in blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=12)
    return transformers.GPT2LMHeadModel(config)


def test_the_readme_has_two_screens_and_names_the_paper():
    assert len(README.read_text().splitlines()) <= 150
    for words in ("arXiv 2605.08933", "Hongtao Zhang", "./run demo", "![", "CPU build"):
        assert words in README.read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]


def test_every_page_is_in_the_index():
    index = page("docs/README.md")
    for path in ROOT.glob("docs/*.md"):
        assert path.name == "README.md" or f"({path.name})" in index


@pytest.mark.parametrize(
    "name", ["README.md", *(f"docs/{n}.md" for n in ("python", "layouts", "theory"))]
)
def test_python_blocks_run(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:  # as torchrun sets them
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    where = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for key, value in where.items():
        monkeypatch.setenv(key, str(value))
    found = blocks(page(name), "python")
    assert found
    for block in found:
        tokens = torch.randint(64, (2, 8))
        exec(block, {"model": gpt2(), "batch": {"input_ids": tokens, "labels": tokens}})


def test_the_readmes_python_trains_and_prints_the_table(capsys):
    scope = {"model": gpt2()}
    exec(blocks(README.read_text(), "python")[0], scope)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    table = re.search(r"```\n(weight  .*?)```", page("docs/python.md"), re.DOTALL)[1]
    shown = [" ".join(line.split()) for line in table.splitlines()]
    assert len(shown) > 3
    assert all(line in printed for line in shown)
    tokens = torch.randint(64, (2, 8))
    loss = scope["model"](input_ids=tokens, labels=tokens).loss
    loss.backward()
    scope["optimizer"].step()
    assert scope["model"](input_ids=tokens, labels=tokens).loss < loss


@pytest.mark.parametrize("name", ["README.md", "docs/cpp.md"])
def test_the_cpp_example_is_part_of_a_program_that_is_built_and_run(name):
    example = {line.strip() for line in (ROOT / "examples/minimal.cpp").read_text().splitlines()}
    lines = [line.strip() for line in blocks(page(name), "cpp")[0].splitlines() if line.strip()]
    assert len(lines) >= 10
    own = ["auto optimizer = group_muon::assemble(model, options);  // any torch::nn::Module"]
    own.append("// in the loop, after computing the loss of a batch:")
    assert [line for line in lines if line not in example] == own


def test_the_table_of_options_is_complete_and_has_the_right_defaults():
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page("docs/options.md"), re.MULTILINE))
    signature = inspect.signature(GroupMuon).parameters
    assert list(table) == [n for n in signature if n not in ("params", "model_options")]
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
    (text,) = [block for block in blocks(page("docs/studies.md"), "toml") if "base =" in block]
    (tmp_path / "study.toml").write_text(text)
    shutil.copy(ROOT / "configs/small.toml", tmp_path)
    listed = program("study", tmp_path / "study.toml", "--list").stdout
    assert "36 runs, 5 settings" in listed  # 8 + 2 + 2 + 8 + 2, noise 8, half-lr 2 × 3
    every = program("study", ROOT / "configs/table1.toml", "--list").stdout
    for name in ("qk-4-interval", "v-2-adjacent", "fixed-qk-v-6-random"):
        assert name in every


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_flags_exist(path):
    help_of = {}
    run_help = subprocess.check_output([ROOT / "run", "help"], text=True)
    for words in commands(path.read_text()):
        words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if words[0] == "group-muon":
            name = " ".join(words[1:3]) if words[1:3] == ["study", "run"] else words[1]
            if name not in help_of:
                help_of[name] = program(*name.split(), "--help").stdout
            for word in words:
                if re.fullmatch(r"--[\w-]+", word):
                    assert re.search(rf"{word}\b", help_of[name]), words
            assert all((ROOT / word).exists() for word in words if word.startswith("configs/"))
        elif words[0] == "./run":
            assert re.search(rf"^\./run {words[1]}\b", run_help, re.MULTILINE), words
            assert words[1] != "bench" or len(words) < 3 or words[2] in run_help, words
        for word in words:
            if word.endswith(".py"):
                assert (ROOT / word).exists(), words


# Runs shorter than the pages' own, as a wrapper that comes first in PATH.
SHORT = """#!{python}
import os, sys
words = sys.argv[1:]
if words[:1] == ["train"] and "--resume" not in words:
    words += "--steps 4 --warmdown 1 --batch 2 --micro-batch 2 --context 16 --layers 2".split()
    words += "--validation-tokens 512 --validation-interval 2 --checkpoint-interval 2 --threads 1".split()
    if "--diagnose-every" in words:
        words[words.index("--diagnose-every") + 1] = "1"
if "--learn" in words:
    words[words.index("--learn") + 1] = "300"
os.execv("{program}", ["group-muon", *words])
"""


@pytest.fixture
def place(tmp_path):
    """A folder in which the commands of a page can be typed, and its environment."""
    for name in ("configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "my-texts").mkdir()
    for number, path in enumerate(PAGES):
        shutil.copy(path, tmp_path / f"my-texts/{number}.txt")
    wrapper = tmp_path / "bin/group-muon"
    wrapper.parent.mkdir()
    wrapper.write_text(SHORT.format(python=sys.executable, program=PROGRAM))
    wrapper.chmod(0o755)
    return tmp_path, os.environ | {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}


def test_the_pages_commands_take_text_to_text_and_measurements(place):
    folder, environment = place
    training = blocks(page("docs/training.md"), "sh")[0]
    measuring = blocks(page("docs/theory.md"), "sh")[0]
    for line in (training + measuring).splitlines():
        if line.startswith("export PATH"):
            continue  # the wrapper's folder is first
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
    sample = [PROGRAM, "sample", folder / "runs/first", "--prompt", "Once upon a time"]
    assert b"Once upon a time" in subprocess.run(sample, capture_output=True, check=True).stdout
    assert (folder / "runs/measured/diagnostics.jsonl").stat().st_size > 1000
    assert (folder / "pictures/gain.png").read_bytes().startswith(b"\x89PNG")


def test_versions_are_said_once_or_agree():
    (torch_version,) = re.findall(r"^torch==(\S+)", page("requirements.txt"), re.MULTILINE)
    for name in ("pyproject.toml", "README.md", "docs/python.md", "docs/cpp.md"):
        for said in re.findall(r"torch(?:==| )(\d+\.\d+\.\d+)", page(name)):
            assert said == torch_version, name
    (version,) = re.findall(r"project\(group_muon VERSION (\S+)", page("CMakeLists.txt"))
    assert version in program("--version").stdout
    for name in ("pyproject.toml", "python/group_muon/__init__.py"):
        assert version not in page(name)
