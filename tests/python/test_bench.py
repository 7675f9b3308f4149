"""Benchmarks keep their history: what they print, where it was measured, and how two files compare."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PRINTED = """A benchmark, 2 threads

| work | ms | times faster |
|---|---:|---:|
| step, packed | 100.5 (20 GF/s) | **2.50** |
| step, head-wise | 80 | – |

| other | value |
|---|---|
| x | 1 |

A note at the end.
"""


def record(*words, **options):
    command = [sys.executable, ROOT / "bench/record.py", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def result(tmp_path):
    """A result file of a made-up benchmark."""
    (tmp_path / "printed").write_text(PRINTED)
    done = record("run", "made-up", "cat", tmp_path / "printed")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(PRINTED)
    path = ROOT / done.stdout.strip().splitlines()[-1].removeprefix("wrote ")
    return path.rename(tmp_path / "made-up.json")


def test_a_run_is_kept_with_its_machine(result):
    kept = json.loads(result.read_text())
    assert [table["columns"] for table in kept["tables"]] == [
        ["work", "ms", "times faster"],
        ["other", "value"],
    ]
    assert kept["tables"][0]["rows"][0] == ["step, packed", "100.5 (20 GF/s)", "**2.50**"]
    assert kept["notes"] == ["A benchmark, 2 threads", "A note at the end."]
    assert kept["command"].endswith("./run bench made-up")
    assert kept["machine"]["cores"] > 0 and kept["machine"]["engine"]


def test_a_failed_benchmark_fails_and_writes_nothing(tmp_path):
    done = record("run", "made-up", "sh", "-c", "echo no table; exit 3")
    assert done.returncode == 3 and "wrote" not in done.stdout
    (tmp_path / "printed").write_text(PRINTED)
    done = record("run", "made-up", "sh", "-c", f"cat {tmp_path}/printed; exit 4")
    assert done.returncode == 4 and "wrote" not in done.stdout


def test_two_files_are_compared_number_by_number(result, tmp_path):
    newer = tmp_path / "newer.json"
    newer.write_text(result.read_text().replace("100.5 (20", "50.25 (40").replace("2.50", "5.00"))
    lines = record("compare", result, newer).stdout
    assert "| step, packed | ms | 100.5 (20 GF/s) | 50.25 (40 GF/s) | 0.50 |" in lines
    assert "| step, packed | times faster | **2.50** | **5.00** | 2.00 |" in lines
    assert "head-wise | times faster" not in lines  # no number
    other = tmp_path / "other.json"
    other.write_text(result.read_text().replace("work", "labour").replace("other", "another"))
    assert record("compare", result, other).returncode != 0


def test_tables_of_a_page_are_replaced_where_they_are_marked(result, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Before.\n\n<!-- table: made-up -->\n\n| old |\n|---|\n\n<!-- end -->\n\nAfter.\n"
    )
    assert record("docs", page, result).returncode == 0
    text = page.read_text()
    assert text.startswith("Before.") and text.endswith("After.\n") and "| old |" not in text
    assert "| step, packed | 100.5 (20 GF/s) | **2.50** |" in text and "./run bench made-up" in text
    again = record("docs", page, result)
    assert again.returncode == 0 and page.read_text() == text
    page.write_text("no mark")
    assert "has no <!-- table: made-up -->" in record("docs", page, result).stderr


def test_speed_tables_are_those_of_the_kept_files(tmp_path):
    kept = sorted(ROOT.glob("docs/speed/*.json"))
    assert len(kept) >= 8
    page = tmp_path / "speed.md"
    page.write_text((ROOT / "docs/speed.md").read_text())
    assert record("docs", page, *kept).returncode == 0
    text = (ROOT / "docs/speed.md").read_text()
    assert page.read_text() == text
    assert sorted(re.findall(r"<!-- table: (.*) -->", text)) == [path.stem for path in kept]
