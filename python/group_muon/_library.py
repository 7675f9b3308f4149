"""Loads the core: the library in this folder that was built for the torch that is running."""

import re
from pathlib import Path

import torch

from group_muon._build import REBUILD, VERSION

__all__ = ["VERSION", "core_name", "load"]
PREFIX = "libgroup_muon-torch"


def core_name(version: str) -> str:
    """The name of the core for a torch version. Releases that differ in the last number share one: PyTorch's patch
    releases keep their headers. Development versions do not share any."""
    public = version.split("+")[0]
    release = re.fullmatch(r"(\d+\.\d+)\.\d+", public)
    return f"{PREFIX}{release[1] if release else public}.so"


def load(folder: Path) -> None:
    """Loads the core in `folder` that fits this torch, or says how to build one."""
    path = folder / core_name(torch.__version__)
    if not path.exists():
        built = [core.stem.removeprefix(PREFIX) for core in folder.glob(f"{PREFIX}*.so")]
        built.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
        raise ImportError(
            f"this group_muon was built for torch {', '.join(built) or '(none)'}, but torch is {torch.__version__}. "
            f"To build it for your torch: {REBUILD}"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"{path.name} does not run with torch {torch.__version__} ({error}). "
            f"To build it for your torch: {REBUILD}"
        ) from error


load(Path(__file__).parent)
