"""The results in docs/results are what the program computes from the runs packed there."""

import json
import re
import shutil
import sys
import tarfile

import pytest
from running import ROOT, program

RESULTS = ROOT / "docs/results"
TABLES = ("table.md", "table.csv", "table.tex", "differences.csv")
sys.path.append(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    place = tmp_path_factory.mktemp("results")
    with tarfile.open(RESULTS / "metrics.tar.xz") as archive:
        archive.extractall(place, filter="data")
    folder = place / "table1-small"
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
    assert report["counts"]["failed"] == 0 and report["counts"]["unreadable"] == 0
    assert all("runs differ in commit" in problem for problem in report["problems"])


def test_numbers_in_the_text_are_in_the_tables():
    def numbers(name):
        text = (RESULTS / name).read_text().replace("−", "-")
        return set(re.findall(r"[+-]?\b\d\.\d{4}\b", text))

    said, known = numbers("README.md"), numbers("table.md")
    assert len(said) > 10
    assert said - known - {number.lstrip("+-") for number in known} == set()


def test_a_study_that_is_at_work_can_be_packed(unpacked, tmp_path):
    import pack_study

    folder = shutil.copytree(unpacked, tmp_path / "checkpoints/table1-small")
    run = folder / "packed/seed-0"
    (run / "result.json").unlink()
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"step":4')
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "checkpoints/step-1/config.toml").write_text("")
    pack_study.pack(folder, tmp_path / "packed.tar.xz")
    with (
        tarfile.open(tmp_path / "packed.tar.xz") as archive,
        tarfile.open(RESULTS / "metrics.tar.xz") as before,
    ):
        assert {*before.getnames()} - {*archive.getnames()} == {
            "table1-small/packed/seed-0/result.json"
        }
        assert len(archive.getnames()) == len(before.getnames()) - 1
        assert (
            archive.extractfile("table1-small/packed/seed-0/metrics.jsonl").read().decode() == whole
        )


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
