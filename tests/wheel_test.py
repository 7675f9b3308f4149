"""The package as users install it, in empty environments.

wheel_test.py source SOURCE WORK          README.md's command in a clone, and what it says where it cannot build
wheel_test.py joint SOURCE WORK WHEEL PYTHON …  the wheel of ./run wheel, beside the torch of each Python
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

USE = """
import pathlib, sys, torch, group_muon
assert pathlib.Path(group_muon.__file__).is_relative_to(sys.prefix), group_muon.__file__
model = torch.nn.MultiheadAttention(24, 6)
optimizer = group_muon.GroupMuon(model, group_size=3, rule="random", lr=0.01)
x = torch.randn(5, 2, 24)
before = model(x, x, x)[0].square().sum()
before.backward()
optimizer.step()
assert model(x, x, x)[0].square().sum() < before
print("group_muon", group_muon.__version__, "works with torch", torch.__version__)
"""
TORCH = "import torch; print(torch.__version__, torch.__file__)"


def run(*words, cwd, **more):
    """The command's exit code and all it prints. It sees nothing of the environment that runs this test."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=clean | {"PYTHONDONTWRITEBYTECODE": "1"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def succeeds(*words, cwd):
    code, printed = run(*words, cwd=cwd)
    assert code == 0, printed
    return printed


def refuses(*words, cwd, saying):
    """Checks that the command fails with these words before anything is compiled."""
    code, printed = run(*words, cwd=cwd)
    assert code != 0, printed
    assert all(word in " ".join(printed.split()) for word in saying), printed
    assert "Configuring CMake" not in printed, printed


def packages(python):
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return pathlib.Path(subprocess.check_output([python, "-c", code], text=True).strip())


def environment(folder, sees=None):
    """The Python of a new environment that sees the packages of another one."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    if sees:
        (packages(python) / "seen.pth").write_text(f"{packages(sees)}\n")
    return python


def fake_torch(folder, version):
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("")
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\n")


def readme_command(source):
    """The words after `pip` of README.md's line."""
    (line,) = re.findall(r"^pip (install .*?)(?:  #.*)?$", (source / "README.md").read_text(), re.M)
    return line.split()


def check_refusals(source, work):
    pip = ["-m", "pip", "--disable-pip-version-check"]
    python = environment(work / "no-torch")
    command = [python, *pip, *readme_command(source)]
    says = ("No torch is visible", "pip install -v --no-build-isolation .")
    refuses(*command, cwd=source, saying=says)
    fake_torch(packages(python), "2.5.1+cu121")
    refuses(*command, cwd=source, saying=("torch 2.5.1+cu121", "too old", "pip install 'torch>="))

    python = environment(work / "no-backend")
    fake_torch(packages(python), "2.13.0")
    says = ("Without build isolation", "pip install scikit-build-core")
    refuses(python, *pip, "install", "--no-build-isolation", ".", cwd=source, saying=says)


def check_source(source, work):
    python = environment(work / "venv", sees=sys.executable)
    torch = succeeds(python, "-c", TORCH, cwd=work)
    use = [python, "-c", "import group_muon"]
    code, printed = run(*use, cwd=source)
    assert code != 0 and f"-m pip install -v {source}" in printed, printed

    printed = succeeds(
        python, "-m", "pip", "--disable-pip-version-check", *readme_command(source), cwd=source
    )
    steps = ("group_muon: building for torch", "Configuring CMake", "[1/", "Building CXX object")
    assert all(step in printed for step in steps), printed
    assert succeeds(python, "-c", TORCH, cwd=work) == torch
    for place in (work, source):  # in the clone the C++ folder comes first
        print(succeeds(python, "-c", USE, cwd=place), end="")
    code, printed = run(
        python, "-c", "import torch; torch.__version__ = '9.8.7'; import group_muon", cwd=work
    )
    says = "but torch is 9.8.7. To build it for your torch: pip install -v ."
    assert code != 0 and says in printed.splitlines()[-1], printed


def check_joint(source, work, wheel, pythons):
    lines = (source / "cmake/torches.txt").read_text().splitlines()
    minors = [line.rpartition(".")[0] for line in lines if line and line[0] != "#"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        required = re.findall(r"^Requires-Dist: (.*)", archive.read(metadata).decode(), re.M)
    cores = sorted(name for name in names if name.endswith(".so"))
    assert cores == sorted(f"group_muon/libgroup_muon-torch{minor}.so" for minor in minors), cores
    assert required == ["torch"], required
    assert "-py3-none-linux_" in wheel.name, wheel.name
    for number, python in enumerate(pythons):
        code, printed = run(python, "-c", TORCH, cwd=work)
        if code != 0:
            print(f"not tried: {python} cannot import its torch: {printed.splitlines()[-1]}")
            continue
        python = environment(work / f"venv-{number}", sees=python)
        torch = succeeds(python, "-c", TORCH, cwd=work)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install"]
        succeeds(*pip, wheel, cwd=work)
        assert succeeds(python, "-c", TORCH, cwd=work) == torch
        print(succeeds(python, "-c", USE, cwd=work), end="")


def main() -> None:
    kind, source, work, *more = sys.argv[1:]
    source, work = pathlib.Path(source).resolve(), pathlib.Path(work).resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if kind == "source":
        check_refusals(source, work)
        check_source(source, work)
    else:
        wheel, *pythons = (pathlib.Path(path).absolute() for path in more)
        check_joint(source, work, wheel, pythons)


main()
