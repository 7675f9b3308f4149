"""Not the Python package: this folder has the C++ library.

When Python is started in the root of a clone, it finds this file first. If the package is installed elsewhere, that one
is loaded instead. If not, the error says how to install it.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

_root = Path(__file__).resolve().parent.parent
_elsewhere = [entry for entry in sys.path if Path(entry).resolve() != _root]
_package = PathFinder.find_spec("group_muon", _elsewhere)
if _package is None or _package.loader is None or _package.origin is None:
    raise ImportError(
        f"{_root / 'group_muon'} has the C++ library; the Python package is not installed. "
        f"Install it with: {sys.executable} -m pip install -v {_root}"
    )

__spec__ = _package
__file__ = _package.origin
__path__ = _package.submodule_search_locations
__loader__ = _package.loader
__cached__ = _package.cached
_package.loader.exec_module(sys.modules["group_muon"])
