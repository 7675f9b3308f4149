"""wheel_test.py SOURCE WORK: `pip install` of the project into an empty environment, then use it there."""

import pathlib
import shutil
import subprocess
import sys
import sysconfig

USE = """
import pathlib, sys, torch, group_muon
assert sys.prefix in str(pathlib.Path(group_muon.__file__)), group_muon.__file__
model = torch.nn.MultiheadAttention(24, 6)
muon, adamw = group_muon.param_groups(model, group_size=3, rule="random")
optimizer = group_muon.GroupMuon(muon, lr=0.01)
x = torch.randn(5, 2, 24)
model(x, x, x)[0].square().sum().backward()
optimizer.step()
print("group_muon", group_muon.__version__, "works from", pathlib.Path(group_muon.__file__).parent)
"""


def main() -> None:
    source, work = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(work, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
    python = work / "venv/bin/python"
    # The environment sees the torch that is already here; all else about it is new.
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    (pathlib.Path(site) / "torch_of_the_tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, str(source)], check=True, cwd=work)
    subprocess.run([python, "-c", USE], check=True, cwd=work)


main()
