"""Keeps what benchmarks print, with the machine, the engine and the commit, and puts it into documents.

record.py run TABLE COMMAND…     run a benchmark, show its output, write runs/bench/TABLE-ENGINE-COMMIT.json
record.py compare OLD NEW        every number of two such files side by side, where rows and columns are the same
record.py docs PAGE FILE…        replace the tables of a page that are marked <!-- table: FILE's name -->

A benchmark prints its results as Markdown tables; every other line it prints is kept as a note.
"""

import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
# Engines, best first, and the flags in /proc/cpuinfo that they need.
ENGINES = {
    "avx512_bf16": {"avx512_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma"},
    "neon": {"asimd"},
}


def cpu_fact(key: str) -> str:
    found = re.search(rf"^{key}\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return found[1].strip() if found else ""


def engine() -> str:
    """The best engine of this CPU, or the one that GROUP_MUON_CPU allows."""
    flags = set((cpu_fact("flags") or cpu_fact("Features")).split())
    best = next((name for name, needed in ENGINES.items() if needed <= flags), "portable")
    return os.environ.get("GROUP_MUON_CPU") or best


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def machine() -> dict:
    return {
        "processor": cpu_fact("model name") or platform.processor(),
        "cores": os.cpu_count(),
        "engine": engine(),
        "forbidden": bool(os.environ.get("GROUP_MUON_CPU")),  # a better engine may be there
        "commit": git("rev-parse", "--short", "HEAD"),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.date.today().isoformat(),
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read_tables(text: str) -> tuple[list[dict], list[str]]:
    """Markdown tables, and the other lines."""
    tables, notes, lines = [], [], text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            if line.strip():
                notes.append(line.replace(f"{ROOT}/", ""))
        elif re.fullmatch(r"[|:\- ]+", line):
            tables.append({"columns": cells(lines[number - 1]), "align": cells(line), "rows": []})
        elif tables and not (
            number + 1 < len(lines) and re.fullmatch(r"[|:\- ]+", lines[number + 1])
        ):
            tables[-1]["rows"].append(cells(line))
    return tables, notes


def write_table(table: dict) -> str:
    lines = [table["columns"], table["align"], *table["rows"]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def run(name: str, command: list[str]) -> None:
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            printed.append(line)
    if process.returncode or not any(line.startswith("|") for line in printed):
        sys.exit(process.returncode)
    tables, notes = read_tables("".join(printed))
    facts = machine()
    forbidden = f"GROUP_MUON_CPU={facts['engine']} " if facts["forbidden"] else ""
    own = shlex.join(shlex.split(os.environ.get("BENCH_WORDS", "")))
    words = f"{forbidden}./run bench {name} {own}".strip()
    result = {"table": name, "command": words, "machine": facts, "notes": notes, "tables": tables}
    folder = ROOT / "runs/bench"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{facts['engine']}-{facts['commit']}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"\nwrote {path.relative_to(ROOT)}")
    sys.exit(process.returncode)


def number(cell: str) -> float | None:
    found = re.match(r"[*]*([+-]?\d+(?:\.\d+)?)", cell)
    return float(found[1]) if found else None


def compare(old_path: str, new_path: str) -> None:
    old, new = (json.loads(pathlib.Path(path).read_text()) for path in (old_path, new_path))
    for name, result in (("old", old), ("new", new)):
        facts = result["machine"]
        print(
            f"{name}: {facts['commit']}, {facts['processor']}, {facts['engine']}, {facts['date']}"
        )
    same = 0
    print("\n| row | column | old | new | new / old |\n|---|---|---:|---:|---:|")
    for before, after in zip(old["tables"], new["tables"], strict=False):
        rows = {row[0]: row for row in before["rows"]}
        for row in after["rows"]:
            for i, column in enumerate(after["columns"][1:], start=1):
                other = rows.get(row[0], [])
                if before["columns"] != after["columns"] or i >= len(other):
                    continue
                a, b = number(other[i]), number(row[i])
                if a is None or b is None:
                    continue
                same += 1
                ratio = f"{b / a:.2f}" if a else "–"
                print(f"| {row[0]} | {column} | {other[i]} | {row[i]} | {ratio} |")
    if not same:
        sys.exit("compare: the files have no rows and columns in common")


def docs(page: str, paths: list[str]) -> None:
    path = pathlib.Path(page)
    text = path.read_text()
    for name in paths:
        result = json.loads(pathlib.Path(name).read_text())
        facts, mark = result["machine"], f"<!-- table: {pathlib.Path(name).stem} -->"
        if mark not in text:
            sys.exit(f"docs: {page} has no {mark}")
        forbidden = ", newer instructions disabled" if facts["forbidden"] else ""
        modified = " with changes" if facts["modified"] else ""
        source = (
            f"`{result['command']}`, {facts['processor']}, {facts['cores']} cores, "
            f"{facts['engine']}{forbidden}, commit {facts['commit']}{modified}, {facts['date']}:"
        )
        tables = "\n\n".join(write_table(table) for table in result["tables"])
        before, after = text.split(mark, 1)
        rest = after.split("<!-- end -->", 1)[1]
        text = f"{before}{mark}\n\n{source}\n\n{tables}\n\n<!-- end -->{rest}"
    path.write_text(text)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", name, *command]:
            run(name, command)
        case ["compare", old, new]:
            compare(old, new)
        case ["docs", page, *paths] if paths:
            docs(page, paths)
        case _:
            sys.exit(__doc__)
