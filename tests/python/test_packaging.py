"""Which torch a build takes, which core an import loads, and what both say when there is none."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

import group_muon
from group_muon._library import core_name

ROOT = pathlib.Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("backend", ROOT / "cmake/group_muon_build.py")
backend = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backend)


def python(code, cwd, path=""):
    """The last line that this Python prints."""
    environment = os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()[-1]


def make_torch(folder, version):
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("")
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    return folder / "torch"


def built():
    """The folder of the package that these tests use."""
    return pathlib.Path(group_muon.__file__).parent


def test_torch_is_required_without_a_version_so_that_pip_never_replaces_it():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"^dependencies = (.*)", text, re.MULTILINE) == ['["torch"]']
    assert "torch" not in re.search(r"^requires = (.*)", text, re.MULTILINE)[1]


def test_the_pinned_torch_is_one_of_those_that_are_tested():
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    releases = backend.tested()
    assert pinned in releases
    assert releases == sorted(releases, key=backend.minor)
    minors = [".".join(map(str, backend.minor(release))) for release in releases]
    for name in ("README.md", "docs/cpp.md", "CHANGELOG.md"):
        assert f"torch {minors[0]} to {minors[-1]}" in (ROOT / name).read_text(), name


def test_an_isolated_build_takes_the_torch_of_the_environment(tmp_path, monkeypatch):
    real = pathlib.Path(torch.__file__).parent
    other = make_torch(tmp_path / "pip-build-env-x/overlay", "9.8.7")
    monkeypatch.setenv("PYTHONPATH", str(other.parent))  # as pip isolates a build
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    assert backend.find_torch().resolve() == real.resolve()
    assert backend.prepared_torch({}).resolve() == real.resolve()


def test_without_isolation_a_torch_in_pythonpath_counts(tmp_path, monkeypatch):
    own = make_torch(tmp_path / "own", "2.13.0")
    monkeypatch.setenv("PYTHONPATH", str(own.parent))
    assert backend.find_torch() == own


def test_a_build_that_is_given_a_torch_takes_that_one(tmp_path):
    given = make_torch(tmp_path, "2.14.9+cu130")
    assert backend.prepared_torch({"cmake.define.TORCH_WHEEL_DIR": str(given)}) == given


def test_a_build_stops_at_a_torch_that_is_too_old(tmp_path, capsys):
    given = make_torch(tmp_path, "2.4.1")
    with pytest.raises(SystemExit):
        backend.prepared_torch({"cmake.define.TORCH_WHEEL_DIR": str(given)})
    said = capsys.readouterr().err
    assert "torch 2.4.1" in said and "too old" in said and "pip install 'torch>=" in said


def test_a_build_has_as_many_jobs_as_cores_and_memory_allow():
    assert backend.jobs(cores=64, free_bytes=1e12) == 64
    assert backend.jobs(cores=64, free_bytes=9e9) == 4
    assert backend.jobs(cores=2, free_bytes=1e9) == 1
    assert backend.free_memory() > 1e8


def test_patch_releases_share_a_core_and_development_versions_do_not():
    assert core_name("2.14.0") == core_name("2.14.1+cu130") == "libgroup_muon-torch2.14.so"
    assert core_name("2.14.0") != core_name("2.15.0") != core_name("2.1.5")
    assert core_name("2.16.0.dev20261101+cpu") == "libgroup_muon-torch2.16.0.dev20261101.so"
    assert core_name("2.16.0a0+git12") != core_name("2.16.0")
    assert (built() / core_name(torch.__version__)).exists()


@pytest.mark.parametrize("version", ["2.1.0", "9.8.7+cpu", "9.8.0.dev20300101"])
def test_another_torch_gets_one_line_with_the_command(version, tmp_path):
    code = f"import torch; torch.__version__ = '{version}'; import group_muon"
    said = python(code, tmp_path, built().parent)
    assert said.startswith("ImportError: this group_muon was built for torch ")
    assert f"but torch is {version}. To build it for your torch: ./run build" in said


def test_a_core_that_does_not_load_is_said_with_the_command(tmp_path):
    package = tmp_path / "group_muon"
    package.mkdir()
    for path in built().glob("*.py"):
        (package / path.name).write_text(path.read_text())
    (package / core_name(torch.__version__)).write_text("not a library")
    said = python("import group_muon", tmp_path)
    assert "does not run with torch" in said and "To build it for your torch: " in said


def test_in_a_clone_without_the_package_the_import_says_how_to_install_it():
    said = python("import group_muon", ROOT)
    assert said.startswith("ImportError: ") and "C++ library" in said
    assert f"-m pip install -v {ROOT}" in said


def test_in_a_clone_with_the_package_the_import_takes_the_package():
    code = """
import group_muon, group_muon.diagnostics
from group_muon import GroupMuon
print(group_muon.__file__, group_muon.__spec__.origin, GroupMuon.__module__)"""
    file = str(built() / "__init__.py")
    assert python(code, ROOT, built().parent).split() == [file, file, "group_muon.optimizer"]
