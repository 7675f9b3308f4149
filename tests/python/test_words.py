"""Wrong command lines and damaged files: every one ends with one line that names what is wrong, in our own words."""

import os
import re
import shutil
import subprocess

import pytest
from conftest import make_data
from running import PROGRAM, program, train

# What only the inside of a library says.
LEAKS = re.compile(
    r"json\.exception|filesystem error|basic_\w+|std::|c10|at::|\bCLI\b|iostream|bad_alloc|stoi|stoll|vector::|"
    r"Storage size|cannot be converted to type|probability tensor|Could not convert|not in range|"
    r"required but received|\d{40}|invalid argument|Traceback"
)
STUDY = """
settings = ["packed"]
[options]
layers = 1
heads = 2
width = 8
context = 8
vocabulary = 64
batch = 2
steps = 2
warmdown = 0
validation-tokens = 64
"""
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A finished run, its data, a study of one run, and files that are something else."""
    folder = tmp_path_factory.mktemp("words")
    data = make_data(folder / "data")
    train(data, folder / "run", steps=4)
    (folder / "study.toml").write_text(STUDY)
    program("study", folder / "study.toml", "--data", data, "--out", folder / "study")
    (folder / "empty").mkdir()
    (folder / "text").write_text("text\n")
    (folder / "broken.toml").write_text("[model\n")
    (folder / "list.toml").write_text("[model]\nlayers = [1]\n")
    (folder / "odd.toml").write_text(STUDY.replace('"packed"', '"qk-5-random"'))
    return folder


def error_of(place, *words):
    done = program(*words, check=False, cwd=place, timeout=60, env={**os.environ, "COLUMNS": "80"})
    said = done.stderr.strip()
    assert done.returncode in (1, 2, 75, 76), (words, done.returncode, said)
    assert len(said.splitlines()) == 1 and said.startswith("group-muon: "), said
    assert not LEAKS.search(said), said
    assert len(said) < 600, said
    return said


TRAIN = ("train", "--data", "data", "--out", "x", "--batch", "2", "--context", "8")
LONG = "a" * 300
ONE = ("--flops", "1", "--memory-bandwidth", "1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        # Values that are missing, empty or twice there.
        (("train", "--out"), "--out needs a value"),
        (("train", "--out", "--shuffle"), "--out needs a value"),
        (("train", "--data", ""), "--data is given an empty value"),
        (("train", "--data=", "--shuffle"), "--data is given an empty value"),
        (("train", "--resume", ""), "--resume is given an empty value"),
        (("train", "--resume", "run", "--resume", "run"), "--resume is given twice"),
        (("train", "--nesterov", ""), "--nesterov is given an empty value"),
        (("train", "--nesterov="), "--nesterov is given an empty value"),
        ((*TRAIN, "--nesterov", "yes"), "nesterov should be true or false, not 'yes'"),
        ((*TRAIN, "--layers="), "--layers is given an empty value"),
        (("sample", "run", "--vocabulary", ""), "--vocabulary is given an empty value"),
        (("analyze", "run", "--json="), "--json is given an empty value"),
        (("report", "study", "--out", ""), "--out is given an empty value"),
        (("study", "study.toml", "--data", "--list"), "--data needs a value"),
        # Names.
        (("train", "--lr", "0.1"), "there is no flag --lr; did you mean --muon-lr?"),
        (("sample",), "sample: no run given"),
        (("analyze",), "analyze: no run given"),
        (("report",), "report: no folder given"),
        (("study", "run", "study"), "run: no run given"),
        (("study",), "no study given"),
        (("study", "odd.toml", "--list"), "groups of 1, 2, 3, 4 and 6 heads; define others"),
        (("nothing",), "there is no command nothing"),
        # Places.
        (("train", "--resume", "nowhere"), "there is no folder 'nowhere'"),
        (("train", "--resume", "empty"), "'empty' contains no run"),
        (("train", "--resume", LONG), "File name too long"),
        (("train", "text"), "'text'"),
        (("train", "broken.toml"), "'broken.toml'"),
        (("train", "list.toml"), "layers should be a string, a number, true or false"),
        (("train", "--data", "nowhere", "--out", "x"), "nowhere"),
        ((*TRAIN, "--out", "text/x"), "'text/x' cannot be created"),
        ((*TRAIN, "--out", LONG), "File name too long"),
        (("sample", "nowhere"), "there is no folder 'nowhere'"),
        (("sample", "text"), "'text' contains no run"),
        (("analyze", "run", "--json", "nowhere/x"), "'nowhere/x"),
        (("analyze", "run", "--json", "empty"), "'empty' is a folder"),
        (("analyze", "run", "--data", "nowhere"), "nowhere"),
        (("report", "nowhere"), "'nowhere' contains no study"),
        (("report", "study", "--out", "text/x"), "'text/x' cannot be created"),
        (("study", "nowhere"), "there is no file or folder 'nowhere'"),
        (("study", "run", "study", "99"), "the study has no run 99"),
        (("study", "run", "study", "packd/seed-0"), "did you mean packed/seed-0?"),
        ((*TRAIN, "--init", "text"), "text' is damaged"),
        ((*TRAIN, "--init", "empty"), "empty' has no weights"),
        ((*TRAIN, "--init", "nowhere"), "nowhere"),
        # Numbers.
        ((*TRAIN, "--steps", "1e3"), "steps should be a whole number, not '1e3'"),
        ((*TRAIN, "--steps", "99999999999999999999"), "steps should be a whole number"),
        ((*TRAIN, "--steps", "-1"), "steps should be from 1 to"),
        ((*TRAIN, "--eps", "1e308"), "eps should be at most 1e+38, not 1e+308"),
        (("train", "\x1b[31mred\nfile"), "there is no file ' [31mred file'"),
        ((*TRAIN, "--eps", "nan"), "eps should be 0 or more, not nan"),
        ((*TRAIN, "--muon-lr", "-1"), "muon-lr should be 0 or more, not -1"),
        ((*TRAIN, "--iterations", "101"), "iterations should be from 0 to 100, not 101"),
        ((*TRAIN, "--heads", "1073741824"), "heads should be from 1 to 65536"),
        ((*TRAIN, "--vocabulary", "70000"), "vocabulary should be at most 65536"),
        ((*TRAIN, "--threads", "5000"), "threads should be from 0 to 1024"),
        ((*TRAIN, "--qk-group", ""), "--qk-group is given an empty value"),
        ((*TRAIN, "--qk-group", "5"), "qk-group = 5 does not fit"),
        ((*TRAIN, "--device", "tpu"), "device should be one of cpu, cuda, not 'tpu'"),
        (("sample", "run", "--seed", "-1"), "--seed should be a whole number, 0 or more, not '-1'"),
        (("sample", "run", "--tokens", "0"), "--tokens should be a whole number, 1 or more"),
        (("sample", "run", "--top-k", "x"), "--top-k should be a whole number, 0 or more, not 'x'"),
        (("sample", "run", "--temperature", "x"), "--temperature should be a number, not 'x'"),
        (("sample", "run", "--temperature", "nan", "--vocabulary", "gpt2"), ""),
        (("analyze", "run", "--lr", "-1"), "--lr should be above 0, not '-1'"),
        (("analyze", "run", "--lr", "nan"), "--lr should be above 0, not 'nan'"),
        (("analyze", "run", "--factors", "1,x"), "--factors should be above 0, not 'x'"),
        (("analyze", "run", "--layers", "9"), "layers should be from 0 to 1, not 9"),
        (("analyze", "run", "--sequences", "1000000000"), "sequences should be at most"),
        (("analyze", "run", "--threads", "0"), "--threads should be a whole number from 1 to 1024"),
        (("analyze", "run", "--groups", "x"), "x"),
        (("study", "study", "--seeds", "0"), "--seeds should be a whole number from 1 to 1000"),
        (("study", "study", "--jobs", "-1"), "--jobs should be a whole number from 0 to 4096"),
        (("study", "study", "--device", "tpu"), "--device should be cpu or cuda, not 'tpu'"),
        # Plans.
        (("plan", "--model", "gpt2-smal"), "did you mean gpt2-small?"),
        (("plan", "--model", "nowhere"), "there is no file 'nowhere'"),
        (("plan", "--model", "broken.toml"), "'broken.toml'"),
        (("plan", "--model", "list.toml"), "layers should be a string, a number, true or false"),
        (("plan", "--model"), "--model needs a value"),
        (("plan", "--processes", "0"), "--processes should be a whole number from 1 to 65536, not '0'"),
        (("plan", "--bandwidth", "fast"), "--bandwidth should be above 0, not 'fast'"),
        (("plan", "--flops", "-1"), "--flops should be above 0, not '-1'"),
        (("plan", "--layers", "x"), "layers should be a whole number from 1 to 10000, not 'x'"),
        (("plan", "--gated", "yes"), "gated should be true or false, not 'yes'"),
        (("plan", "--heads", "7"), "width = 768 should be a multiple of heads = 7"),
        (("plan", *ONE, "--qk-group", "5"), "group size 5"),
        (("plan", *ONE, "--qk-group", "x"), "qk-group = x"),
        (("plan", *ONE, "--qkv", "packed", "--v-group", "1"), "qkv = packed has no head groups"),
        (("plan", "--qkv", "whole"), "--qkv should be split or packed, not 'whole'"),
        (("plan", "--sharing", "ddp"), "--sharing should be local or averaged or fsdp"),
        (("plan", *ONE, "--method", "exact"), "the cost of method exact cannot be estimated"),
        (("plan", *ONE, "--method", "fast"), "unknown method 'fast'"),
        (("plan", *ONE, "--json", "nowhere/x"), "'nowhere/x"),
        (("plan", "--procesess", "2"), "did you mean --processes?"),
        # Sizes.
        (("plan", "--width", "16777216", "--heads", "1", "--layers", "10000"), "too large to plan with"),
        ((*TRAIN, "--layers", "1000000"), "training needs at least "),
        ((*TRAIN, "--width", "2147483648", "--heads", "8", "--qk-group", "1"), "training needs at least "),
        ((*TRAIN, "--context", "2147483648"), " GB are available here"),
        ((*TRAIN, "--micro-batch", "2147483648", "--batch", "2147483648"), "micro-batch = 2147483648"),
    ],
)  # fmt: skip
def test_wrong_command_lines_get_one_line_in_words(place, words, says):
    assert says in error_of(place, *words)
    assert not (place / "x").exists() and not (place / "true").exists()


def test_empty_is_a_value_where_the_help_says_what_it_means(place):
    out = place / "emptied"
    words = ("--data", place / "data", "--out", out, "--steps", 1, "--warmdown", 0)
    tiny = ("--layers", 1, "--heads", 2, "--width", 8, "--context", 8, "--batch", 2, "--k-group=")
    tiny += ("--qk-group", 1, "--validation-tokens", 64)
    program("train", *words, *tiny, "--init", "", "--diagnose-groups", "", "--shuffle")
    config = (out / "config.toml").read_text()
    assert 'k-group = ""' in config and 'init = ""' in config and "shuffle = true" in config
    shutil.rmtree(out)


def test_a_run_that_fails_says_why_in_words(place, tmp_path):
    for key, value in {"muon-lr": 1e38, "eps": 1e38, "muon-weight-decay": 1e38}.items():
        out = tmp_path / key
        done = train(place / "data", out, check=False, engine="portable", **{key: value})
        assert not LEAKS.search(done.stderr), done.stderr


def harmed(place, tmp_path, path, text):
    """A copy of the run and the study in which one file has another text."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run", "study"):
        shutil.copytree(place / name, copy / name)
    (copy / "data").symlink_to(place / "data")
    file = copy / path
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return copy


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "[]", "", "\x00", '{"version":1}'])
def test_a_damaged_state_is_one_line(place, tmp_path, text):
    copy = harmed(place, tmp_path, "run/checkpoints/step-000004/state.json", text)
    for words in (("train", "--resume", "run"), ("sample", "run"), ("analyze", "run")):
        assert "step-000004" in error_of(copy, *words)


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, '{"step":"x"}', '{"step":1e999}'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "machine.jsonl", "result.json", "data.json"])
def test_damaged_json_never_ends_a_study_or_its_report(place, tmp_path, name, text):
    run = "study" if name == "data.json" else "study/packed/seed-0"
    copy = harmed(place, tmp_path, f"{run}/{name}", text + "\n")
    for words in (("study", "study", "--list"), ("report", "study", "--no-figures")):
        done = program(*words, cwd=copy)
        assert not LEAKS.search(done.stdout + done.stderr)
    if name != "machine.jsonl":
        done = program("study", "study", cwd=copy, check=False)
        assert done.returncode == 1 and not LEAKS.search(done.stdout + done.stderr), done


def header(text):
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        header(DEEP),
        header('{"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,6]}}') + bytes(6),
        header('{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}'),
        b"\xff" * 8,
        b"",
    ],
)
def test_damaged_weights_are_one_line(place, tmp_path, content):
    (tmp_path / "weights").write_bytes(content)
    said = error_of(place, *TRAIN, "--init", tmp_path / "weights")
    assert f"'{tmp_path}/weights' is damaged" in said


@pytest.mark.parametrize(
    "name", ["checkpoints/step-000004/model.safetensors", "config.toml", "metrics.jsonl"]
)
def test_a_folder_in_the_place_of_a_file_is_one_line(place, tmp_path, name):
    copy = harmed(place, tmp_path, f"run/{name}", "")
    (copy / "run" / name).unlink()
    (copy / "run" / name).mkdir()
    for words in (("train", "--resume", "run"), ("sample", "run"), ("analyze", "run")):
        if name != "metrics.jsonl":
            error_of(copy, *words)
    program("report", "study", "--no-figures", cwd=copy)


def test_the_memory_of_a_container_counts(place, tmp_path):
    """The program sees cgroup files of ours in a mount namespace of its own."""
    with open("/proc/self/cgroup") as file:
        first = ":memory:" in file.read()  # version 1 of cgroups
    files = tmp_path / "cgroup"
    folder = files / "memory" if first else files
    folder.mkdir(parents=True)
    names = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
    for name, value in zip(names, (600 << 20, 100 << 20)):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs mount namespaces")
    inside = ["sh", "-c", 'mount --bind "$0" /sys/fs/cgroup && exec "$@"', str(files)]
    words = ["train", "--data", str(place / "data"), "--out", str(tmp_path / "x"), "--batch", "8"]
    done = subprocess.run(
        [*unshare, *inside, PROGRAM, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "training needs at least 2.1 GB of memory" in done.stderr, done.stderr
    assert " and 0.5 GB are available here" in done.stderr
