"""Packs a study's results into one small file: pack_study.py FOLDER OUT.tar.xz

The archive unpacks into a folder with the study's name, from which `group-muon report` makes the same tables. It
leaves out checkpoints, logs, TensorBoard files, keys that the report does not read, incomplete lines and meaningless
digits. Paths of data and runs are cut to their last part.
"""

import io
import json
import os
import pathlib
import re
import sys
import tarfile

KEPT = ("machine.jsonl", "result.json", "error.txt")
CONFIGS = ("study.toml", "config.toml")
# The keys kept of each line of these files. DIGITS has the number of digits kept of some of them.
KEYS = {
    "metrics.jsonl": ("step", "loss", "seconds", "optimizer_seconds", "validation_loss"),
    "diagnostics.jsonl": (
        "step", "weight", "part", "of", "grouping", "rows", "cols", "ranks",
        "nuclear_norm", "first_order", "squared_norm",
    ),
}  # fmt: skip
DIGITS = dict.fromkeys(
    ("loss", "seconds", "optimizer_seconds", "nuclear_norm", "first_order", "squared_norm"), 6
)


def short(key: str, value):
    return float(f"{value:.{DIGITS[key]}g}") if key in DIGITS and value is not None else value


def thinned(text: str, keys: tuple) -> str:
    whole = text[: text.rfind("\n") + 1]
    lines = (json.loads(line) for line in whole.splitlines())
    kept = ({key: short(key, line[key]) for key in keys if key in line} for line in lines)
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept)


def without_places(text: str) -> str:
    """data = "/somewhere/wiki" becomes data = "wiki"."""

    def cut(match: re.Match) -> str:
        name = pathlib.PurePath(match[3]).name
        return match[1] + match[2] + name + match[2]

    return re.sub(r"^((?:data|out) = )([\"'])(.*?)\2", cut, text, flags=re.MULTILINE)


def content_of(path: pathlib.Path) -> bytes | None:
    if path.name in KEYS:
        return thinned(path.read_text(), KEYS[path.name]).encode()
    if path.name in CONFIGS:
        return without_places(path.read_text()).encode()
    return path.read_bytes() if path.name in KEPT else None


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Files of the study and its runs, without checkpoints. Sorted by name, so that similar files are adjacent."""
    runs = {path.parent for path in folder.rglob("seed-*/config.toml")}
    found = [folder / "study.toml", *(path for run in runs for path in run.iterdir())]
    return sorted(filter(pathlib.Path.is_file, found), key=lambda path: (path.name, str(path)))


def pack(folder: pathlib.Path, out: pathlib.Path) -> None:
    """The archive gets its name only when it is complete."""
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        with tarfile.open(unfinished, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
            for path in files_of(folder):
                if (content := content_of(path)) is None:
                    continue
                entry = tarfile.TarInfo(str(folder.name / path.relative_to(folder)))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    if len(sys.argv) != 3 or not (pathlib.Path(sys.argv[1]) / "study.toml").exists():
        sys.exit(__doc__)
    pack(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")


if __name__ == "__main__":
    main()
