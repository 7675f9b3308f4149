"""The build backend: scikit-build-core, building against the torch of the environment that pip installs into.

torch is not a build requirement: pip would fetch another one into the isolated build environment, and a library runs
only with the torch it was built for. pip hides the environment's packages from an isolated build, but runs it with that
environment's Python, so that Python can still be asked where its torch is.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
GIGABYTES_PER_JOB = 2
FIND_TORCH = """
import importlib.util
spec = importlib.util.find_spec("torch")
print(spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else "")
"""


def stop(*lines):
    print("\ngroup_muon:", *lines, sep="\n  ", file=sys.stderr, flush=True)
    raise SystemExit(1)


def torch_of(environment):
    """The torch folder that this Python finds with the given environment variables, or None."""
    found = subprocess.run(
        [sys.executable, "-c", FIND_TORCH],
        env=environment,
        cwd=sys.prefix,  # the working folder is in Python's path
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return pathlib.Path(found) if found and (pathlib.Path(found) / "version.py").exists() else None


def find_torch():
    """The torch folder of the environment that is installed into, or None."""
    seen = torch_of(dict(os.environ))
    if seen and not any(part.startswith("pip-build-env-") for part in seen.parts):
        return seen
    # pip isolates a build by these two variables.
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE")
    return torch_of({name: value for name, value in os.environ.items() if name not in hidden})


def version_of(torch):
    return re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())[1]


def minor(version):
    return tuple(map(int, re.match(r"(\d+)\.(\d+)", version).groups()))


def tested():
    """Releases in torches.txt, the oldest first."""
    lines = (HERE / "torches.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def jobs(cores, free_bytes):
    return max(1, min(cores, int(free_bytes / 1e9 / GIGABYTES_PER_JOB)))


def free_memory():
    """Bytes of memory that are free: the machine's, or a container's if it has less."""
    text = pathlib.Path("/proc/meminfo").read_text()
    free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1])
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" if there is none
        free = min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return free


def prepared_torch(settings):
    """The torch folder to build against. Stops if there is none, or one that is too old."""
    given = settings.get("cmake.define.TORCH_WHEEL_DIR")
    torch = pathlib.Path(given) if given else find_torch()
    if torch is None:
        stop(
            f"No torch is visible to {sys.executable}, and the core is built for the torch it will run with.",
            "Install torch into your environment first, then group_muon without build isolation:",
            "  pip install torch scikit-build-core",
            "  pip install -v --no-build-isolation .",
        )
    version, releases = version_of(torch), tested()
    if minor(version) < minor(releases[0]):
        oldest = ".".join(map(str, minor(releases[0])))
        stop(
            f"torch {version} at {torch} is too old: group_muon needs {oldest} or newer.",
            f"To replace it: {sys.executable} -m pip install 'torch>={oldest}'",
        )
    return torch


def prepared(config_settings, compiles=False):
    """The settings with the torch to build against. Says what will be built, and stops if it cannot be."""
    settings = dict(config_settings or {})
    torch = prepared_torch(settings)
    if importlib.util.find_spec("scikit_build_core") is None:
        stop(
            "Without build isolation pip installs nothing for the build.",
            f"Run: {sys.executable} -m pip install scikit-build-core",
            "then this command again.",
        )
    settings["cmake.define.TORCH_WHEEL_DIR"] = str(torch)
    if compiles:
        number = jobs(len(os.sched_getaffinity(0)), free_memory())
        number = os.environ.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(number))
        print(
            f"group_muon: building for torch {version_of(torch)} at {torch}, {number} jobs",
            flush=True,
        )
    return settings


def backend():
    import scikit_build_core.build

    return scikit_build_core.build


def get_requires_for_build_wheel(config_settings=None):
    return backend().get_requires_for_build_wheel(prepared(config_settings))


def get_requires_for_build_editable(config_settings=None):
    return backend().get_requires_for_build_editable(prepared(config_settings))


def get_requires_for_build_sdist(config_settings=None):
    return backend().get_requires_for_build_sdist(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    settings = prepared(config_settings)
    return backend().prepare_metadata_for_build_wheel(metadata_directory, settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    settings = prepared(config_settings)
    return backend().prepare_metadata_for_build_editable(metadata_directory, settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    settings = prepared(config_settings, compiles=True)
    return backend().build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    settings = prepared(config_settings, compiles=True)
    return backend().build_editable(wheel_directory, settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    return backend().build_sdist(sdist_directory, config_settings)
