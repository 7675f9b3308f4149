"""The results in docs/results are what the program makes of the runs that are packed beside them."""

import json
import re
import sys
import tarfile

import pytest
from running import ROOT, program

RESULTS = ROOT / "docs/results"
TABLES = ("table.md", "table.csv", "table.tex")
sys.path.append(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "table1-small"
    with tarfile.open(RESULTS / "metrics.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    program("report", folder, "--no-figures")
    return folder


def test_the_tables_follow_from_the_packed_runs(unpacked):
    for name in TABLES:
        assert (unpacked / "report" / name).read_text() == (RESULTS / name).read_text()


def test_the_page_has_the_same_data(unpacked):
    page = (RESULTS / "report.html").read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[1]
    assert json.loads(data) == json.loads((unpacked / "report/report.json").read_text())
    assert "/work" not in page and "/home" not in page


def test_headline_settings_have_eight_seeds_and_nothing_was_left_out(unpacked):
    report = json.loads((unpacked / "report/report.json").read_text())
    counts = {setting["name"]: setting["count"] for setting in report["settings"]}
    for name in ("packed", "three-way", "head-wise", "qk-1", "qk-6-random"):
        assert counts[name] >= 8
    assert report["counts"]["failed"] == 0 and report["problems"] == []


def test_numbers_in_the_text_are_in_the_tables():
    text = (RESULTS / "README.md").read_text().replace("−", "-")
    tables = (RESULTS / "table.md").read_text()
    numbers = set(re.findall(r"[+-]?\d\.\d{4}\b", text))
    assert len(numbers) > 10
    assert {number for number in numbers if number not in tables} == set()


def test_packing_again_gives_the_same_bytes(unpacked, tmp_path):
    import pack_study

    for name in ("first", "second"):
        sys.argv = ["pack_study.py", str(unpacked), str(tmp_path / name)]
        pack_study.main()
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    with (
        tarfile.open(tmp_path / "first") as again,
        tarfile.open(RESULTS / "metrics.tar.xz") as before,
    ):
        assert sorted(again.getnames()) == sorted(before.getnames())
        for name in again.getnames():
            assert again.extractfile(name).read() == before.extractfile(name).read()
