"""./run release: version, changelog and tag in one go, tried in a clone."""

import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FILES = ("run", "CMakeLists.txt")


@pytest.fixture
def clone(tmp_path):
    """A repository with the files that a release touches."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n### Optimizer\n\n- New.\n\n## 0.0.1 (2020-01-01)\n\n- Old.\n"
    )
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        git(tmp_path, *words)
    return tmp_path


def git(folder, *words):
    person = ["-c", "user.name=A", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *person, *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def release(folder, *words):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "A", f"GIT_{role}_EMAIL": "a@b"}
    command = [folder / "run", "release", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_release_is_a_version_a_dated_section_and_a_tag(clone):
    done = release(clone, "9.8.7")
    assert done.returncode == 0, done.stderr
    assert "project(group_muon VERSION 9.8.7" in (clone / "CMakeLists.txt").read_text()
    changelog = (clone / "CHANGELOG.md").read_text()
    assert re.search(r"^## Unreleased\n\n## 9\.8\.7 \(\d{4}-\d\d-\d\d\)\n", changelog, re.M)
    text = git(clone, "tag", "-l", "--format=%(contents)", "v9.8.7")
    assert text.startswith("Group Muon 9.8.7") and "- New." in text and "- Old." not in text
    assert git(clone, "status", "--porcelain") == ""
    assert "nothing under" in release(clone, "9.8.8").stderr


def test_a_release_wants_a_version_and_a_clean_tree(clone):
    assert "give a version" in release(clone, "next").stderr
    (clone / "new").write_text("")
    assert "commit or stash" in release(clone, "9.8.7").stderr
    assert git(clone, "tag") == ""
