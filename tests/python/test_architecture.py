"""ARCHITECTURE.md lists all files in the order in which they may include each other. These tests check the list."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("group_muon", "gpt", "train", "study", "cli")


def listed():
    """Room and file names in the order of ARCHITECTURE.md's list."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    block = re.search(r"```\n(group_muon/ .*?)```", text, re.DOTALL)[1]
    names, room = [], None
    for line in block.splitlines():
        if not line.startswith(" "):
            room = line.split("/")[0]
        elif room in ROOMS and re.match(r"  \w", line):
            names += [f"{room}/{name}" for name in re.split(r",\s*", line[2:].split("  ")[0])]
    return names


def files():
    """Every source file with its name in the list. A header, its source and its kernels share one."""
    for room in ROOMS:
        for path in sorted((ROOT / room).glob("*.*")):
            if path.suffix in (".h", ".cpp"):
                yield f"{room}/{path.stem.removesuffix('_kernel')}", path


def test_every_file_is_listed_once_and_nothing_else():
    names = listed()
    assert len(names) == len(set(names))
    assert sorted(names) == sorted({name for name, _ in files()})


def test_files_include_only_what_is_listed_before_them():
    place = {name: i for i, name in enumerate(listed())}
    wrong = []
    for name, path in files():
        for included in re.findall(r'^#include "(.+)\.h"', path.read_text(), re.MULTILINE):
            target = included.removesuffix("_kernel")
            if target in place and place[target] > place[name]:
                wrong.append(f"{path.relative_to(ROOT)} includes {included}.h")
    assert wrong == []


def test_the_rule_is_checked_against_real_includes():
    count = sum(
        len(re.findall(r'^#include "\w+/', path.read_text(), re.MULTILINE)) for _, path in files()
    )
    assert count > 200
