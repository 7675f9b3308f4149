"""torches.py PAGE RELEASE …: writes what ./run torches found to the page, from the tests' XML files.

Keeps the rows of releases that did not run this time. Ends with an error if a test failed.
"""

import datetime
import pathlib
import re
import sys
from xml.etree import ElementTree

TEXT = """# Which versions of torch

This page lists the torch versions that Group Muon runs with. `./run torches` tests and writes it.

- The core is built once for each minor version of torch. It runs with all patch releases of that version: the C++
  headers of 2.12.0 and 2.12.1, and of 2.14.0 and 2.14.1, differ only in the version number.
- `cmake/torches.txt` lists the releases that it is built for. CMake and pip reject older ones, and warn about newer
  ones.
- A development version of torch needs a core of its own, built against exactly that version.

Both suites ran on {machine}. `library` has the C++ tests of the optimizer and of the model's kernels, `package` those
of the Python package. Tests of the program `group-muon` run with the pinned torch only.

| torch | library | package | date |
|---|---|---|---|
{rows}
"""


def counted(path: pathlib.Path) -> tuple[str, bool]:
    """The tests of a JUnit file in words, and whether all is well."""
    if not path.exists():
        return "did not run", False
    root = ElementTree.parse(path).getroot()
    suites = [root] if root.get("tests") else list(root.iter("testsuite"))

    def total(name: str) -> int:
        return sum(int(suite.get(name) or 0) for suite in suites)

    failed = total("failures") + total("errors")
    skipped = len(list(root.iter("skipped")))
    passed = total("tests") - failed - skipped
    words = [f"{passed} passed"]
    words += [f"**{failed} failed**"] if failed else []
    words += [f"{skipped} skipped"] if skipped else []
    return ", ".join(words), passed > 0 and failed == 0


def cpu() -> str:
    found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    return found[1] if found else "this CPU"


def main() -> None:
    page, releases = pathlib.Path(sys.argv[1]), sys.argv[2:]
    old = page.read_text() if page.exists() else ""
    rows = {row.split()[1]: row for row in re.findall(r"^\| \d+\..*\|$", old, re.MULTILINE)}
    fine = True
    for release in releases:
        folder = pathlib.Path(f"build/torches/{release}-build")
        results = [counted(folder / f"{suite}.xml") for suite in ("library", "package")]
        fine = fine and all(well for _, well in results)
        cells = [release, *(words for words, _ in results), str(datetime.date.today())]
        rows[release] = f"| {' | '.join(cells)} |"
        print(rows[release])
    ordered = sorted(rows, key=lambda release: [int(part) for part in release.split(".")])
    page.write_text(TEXT.format(machine=cpu(), rows="\n".join(rows[name] for name in ordered)))
    sys.exit(0 if fine else "torches: some tests failed")


if __name__ == "__main__":
    main()
