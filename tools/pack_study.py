"""A study's results in one small file: pack_study.py FOLDER OUT.tar.xz

Unpacked, `group-muon report` makes the same tables of it. Left out are checkpoints, logs, TensorBoard's files, what the report does not
read of a line, and digits that say nothing; paths are cut to their last part.
"""

import io
import json
import pathlib
import re
import sys
import tarfile

KEPT = ("study.toml", "config.toml", "machine.jsonl", "result.json", "error.txt")
# Of the lines of these files, the keys that are kept; and to how many digits their numbers are, if not to all.
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
    return float(f"{value:.{DIGITS[key]}g}") if key in DIGITS else value


def thinned(text: str, keys: tuple) -> str:
    lines = (json.loads(line) for line in text.splitlines())
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
    if path.name in ("study.toml", "config.toml"):
        return without_places(path.read_text()).encode()
    return path.read_bytes() if path.name in KEPT else None


def main() -> None:
    if len(sys.argv) != 3 or not (pathlib.Path(sys.argv[1]) / "study.toml").exists():
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    with tarfile.open(sys.argv[2], "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        # By kind, so that files that are alike stand together.
        for path in sorted(folder.rglob("*"), key=lambda path: (path.name, str(path))):
            content = content_of(path) if path.is_file() else None
            if content is None or "checkpoints" in path.parts:
                continue
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    print(f"wrote {sys.argv[2]}")


if __name__ == "__main__":
    main()
