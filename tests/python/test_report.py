"""group-muon report: its numbers, what it leaves out, and the page in a real browser."""

import csv
import json
import os
import re
import shutil
import statistics

import pytest
from conftest import make_data
from page_checks import CHROMIUM, hover_curve, open_page
from running import as_of_an_older_version, program, values

STUDY = """
settings = ["packed", "three-way", "head-wise", "qk-1", "qk-6-random"]
seeds = 2

[options]
layers = 1
heads = 12
width = 48
context = 16
vocabulary = 64
batch = 8
steps = 12
warmdown = 4
validation-interval = 2
validation-tokens = 512
checkpoint-interval = 0
muon-lr = 1e-3

[[own-settings]]
name = "qk-growing"
options = { qk-group = "1@0,12@6" }

[noise]
setting = "packed"
seeds = 2

[[variants]]
name = "double-lr"
settings = ["packed", "three-way", "head-wise"]
options = { muon-lr = 2e-3 }

[[variants]]
name = "diagnosed"
settings = ["three-way"]
options = { diagnose-every = 4 }

[[variants]]
name = "exploding"
settings = ["packed"]
options = { muon-lr = 1e38 }
"""
FIGURES = ("figure1", "figure2", "differences", "effects", "steps", "variants", "gain")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    make_data(folder / "data")
    (folder / "study.toml").write_text(STUDY)
    out = folder / "study <b>&"
    words = ("study", folder / "study.toml", "--data", folder / "data", "--out", out)
    assert program(*words, check=False).returncode == 1  # one explodes
    program("report", out)
    return out


@pytest.fixture
def copy(study, tmp_path):
    return shutil.copytree(study, tmp_path / "copy")


def data_of(out):
    return json.loads((out / "report/report.json").read_text())


def setting(report, name):
    return next(item for item in report["settings"] if item["name"] == name)


def test_numbers_are_those_of_the_runs(study):
    report = data_of(study)
    last = {
        name: [values(study / name / f"seed-{seed}", "validation_loss")[-1] for seed in (0, 1)]
        for name in ("packed", "qk-6-random")
    }
    grouped = setting(report, "qk-6-random")
    assert grouped["mean"] == pytest.approx(statistics.mean(last["qk-6-random"]), abs=1e-12)
    assert grouped["deviation"] == pytest.approx(statistics.stdev(last["qk-6-random"]), abs=1e-12)
    differences = [a - b for a, b in zip(last["qk-6-random"], last["packed"])]
    assert grouped["against"]["packed"]["mean"] == pytest.approx(statistics.mean(differences))
    assert grouped["exploratory"] and report["noise"]["count"] == 2
    assert report["curves"]["packed"]["steps"] == [0, 2, 4, 6, 8, 10, 12]
    assert 0 < setting(report, "packed")["cost"]["optimizer_share"] < 1
    assert report["counts"] == {
        "planned": 19, "finished": 18, "running": 0, "failed": 1, "unreadable": 0, "waiting": 0
    }  # fmt: skip
    assert {run["run"] for run in report["diagnostics"]} == {"diagnosed/three-way/seed-0"}
    assert [claim["number"] for claim in report["claims"]] == list(range(1, 9))
    assert "/" not in report["common_config"]["data"]


def first_step_at(losses, target):
    """Of losses by step, joined by lines."""
    before = None
    for step, loss in losses:
        if loss <= target:
            if before is None:
                return step
            return before[0] + (before[1] - target) / (before[1] - loss) * (step - before[0])
        before = (step, loss)
    return None


def test_steps_to_a_baselines_loss_are_those_of_the_curves(study):
    report = data_of(study)
    checked = 0
    for name in ("three-way", "head-wise", "qk-1", "qk-6-random", "qk-growing"):
        fractions = []
        for seed in (0, 1):
            own, base = (
                list(zip(range(0, 13, 2), values(study / one / f"seed-{seed}", "validation_loss")))
                for one in (name, "packed")
            )
            fractions.append(first_step_at(own, base[-1][1]))
        there = sorted(step / 12 for step in fractions if step is not None)
        steps = setting(report, name)["against"]["packed"]["steps"]
        assert steps["seeds"] == 2 and steps["reached"] == len(there)
        if len(there) == 2:
            assert steps["mean"] == pytest.approx(sum(there) / 2, abs=1e-12)
            assert steps["median"] == pytest.approx(sum(there) / 2, abs=1e-12)
            assert steps["low"] < steps["mean"] < steps["high"] and steps["p"] in (0.5, 1)
            checked += 1
        else:
            assert "mean" not in steps and steps["median"] is None
            assert steps["words"].startswith("reached by 1 of 2" if there else "never")
    assert checked > 0


def test_curves_of_differences_are_a_table(study):
    report = data_of(study)
    rows = list(csv.DictReader((study / "report/differences.csv").open()))
    assert {row["variant"] for row in rows} == {"", "double-lr"}
    grouped = [r for r in rows if r["setting"] == "qk-1" and r["baseline"] == "packed"]
    band = report["differences"]["packed"]["qk-1"]
    assert [int(row["step"]) for row in grouped] == band["steps"] == list(range(0, 13, 2))
    assert [float(row["difference"]) for row in grouped] == pytest.approx(band["mean"], abs=1e-8)
    assert [float(row["high"]) for row in grouped] == pytest.approx(band["high"], rel=1e-8)
    assert {row["seeds"] for row in grouped} == {"2"}


def test_the_best_learning_rate_of_each_setting_is_in_the_tables(study):
    (best,) = data_of(study)["best_values"]
    assert best["key"] == "muon-lr"
    assert [one["name"] for one in best["settings"]] == ["packed", "three-way", "head-wise"]
    for one in best["settings"]:
        means = {tried["value"]: tried["mean"] for tried in one["tried"] if tried["count"]}
        assert set(means) == {"0.001", "0.002"} and one["at_edge"], "of two, any is at an edge"
        assert one["best"] == min(means, key=means.get)
    failed = best["settings"][0]["tried"][-1]
    assert float(failed["value"]) == 1e38 and failed["failed"] == 1 and failed["mean"] is None
    assert "# The best muon-lr of each setting" in (study / "report/table.md").read_text()


def test_tables_have_the_papers_layout(study):
    markdown = (study / "report/table.md").read_text()
    own = setting(data_of(study), "qk-6-random")["mean"]
    assert re.search(rf"\| QK \| rand\. \|.*{own:.4f} ± .*\(\*\*3\.2722\*\*\) \|\n", markdown)
    assert len(re.findall(r"\((?:\*\*)?3\.2\d{3}(?:\*\*)?\)", markdown)) == 37
    latex = (study / "report/table.tex").read_text()
    assert latex.count(r"\multirow{3}{*}{QK}") == 1 and latex.count("\\midrule") == 5
    rows = list(csv.reader((study / "report/table.csv").open()))
    assert len(rows) == 1 + 6 + 3 + 1 + 3  # the exploding one has no result
    assert [row[1] for row in rows if row[0] == "best muon-lr"] == [
        "packed",
        "three-way",
        "head-wise",
    ]
    assert {len(row) for row in rows} == {len(rows[0])}


def test_names_of_files_are_text_in_the_tables(copy, tmp_path):
    folder = shutil.move(copy, tmp_path / "a <b>|c")
    (folder / "packed/seed-0/config.toml").write_text("[model]\nlayers = '<i>x'\n")
    (folder / "qk-1/seed-0/config.toml").unlink()
    (folder / "qk-1/seed-0/config.toml").mkdir()
    program("report", folder, "--no-figures")
    markdown = (folder / "report/table.md").read_text()
    assert "<b>" not in markdown and "<i>" not in markdown
    assert "a &lt;b&gt;\\|c" in markdown and "&lt;i&gt;x" in markdown, markdown[:1000]


def test_figures_are_drawn_as_svg_and_png(study):
    for name in FIGURES:
        svg = (study / f"report/figures/{name}.svg").read_text()
        assert "<svg" in svg and (study / f"report/figures/{name}.png").stat().st_size > 5000


@pytest.mark.parametrize("damage", ["cut", "garbage", "shorter", "gap", "nan", "result", "config"])
def test_damaged_files_are_reported_and_left_out(copy, damage):
    run = copy / "qk-1/seed-1"
    metrics = run / "metrics.jsonl"
    text = metrics.read_text()
    lines = text.splitlines(keepends=True)
    if damage == "cut":
        metrics.write_text(text[:-20])
    elif damage == "garbage":
        metrics.write_text("".join([*lines[:5], "\x00\x00\x00\n", *lines[6:]]))
    elif damage == "shorter":
        metrics.write_text("".join(lines[:-4]))
    elif damage == "gap":
        metrics.write_text("".join(lines[:4] + lines[6:]))
    elif damage == "nan":
        metrics.write_text(re.sub(r'("validation_loss":)[\d.]+', r"\1null", text))
    elif damage == "config":
        (run / "config.toml").unlink()
    else:
        (run / "result.json").write_text("{")
    done = program("report", copy, "--no-figures")
    assert "note: qk-1/seed-1: " in done.stdout and "left out" in done.stdout
    report = data_of(copy)
    assert setting(report, "qk-1")["count"] == 1 and setting(report, "packed")["count"] == 2
    assert [run["state"] for run in report["runs"]].count("unreadable") == 1
    assert len(report["problems"]) == 1
    assert setting(report, "qk-1")["failed"] == 1


def test_runs_of_different_programs_are_noted(copy):
    machine = copy / "qk-1/seed-1/machine.jsonl"
    first = json.loads(machine.read_text())
    machine.write_text(machine.read_text() + json.dumps({**first, "torch": "1.0"}) + "\n")
    said = program("report", copy, "--no-figures").stdout
    assert "note: runs differ in torch: 1.0 (qk-1/seed-1), 2." in said


@pytest.mark.parametrize("key", ["engine", "precision", "muon-precision"])
def test_runs_of_another_engine_or_precision_are_named(copy, key):
    config = copy / "qk-1/seed-1/config.toml"
    other = {"engine": "neon", "precision": "fp16", "muon-precision": "float64"}[key]
    as_of_an_older_version(config.parent)
    text = re.sub(rf'^{key} = "\w+"', f'{key} = "{other}"', config.read_text(), flags=re.M)
    assert other in text
    config.write_text(text)
    said = program("report", copy, "--no-figures").stdout
    assert f"note: runs differ in {key}: " in said and f"{other} (qk-1/seed-1)" in said


@pytest.mark.parametrize("key", ["engine", "muon-engine"])
def test_a_run_whose_engine_changed_midway_is_named(copy, key):
    path = copy / "qk-1/seed-1/metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if "validation_loss" in line)
    lines[first] = re.sub(
        rf'"{key.replace("-", "_")}":"\w+"', f'"{key.replace("-", "_")}":"neon"', lines[first]
    )
    path.write_text("".join(lines))
    said = program("report", copy, "--no-figures").stdout
    assert f"note: runs differ in {key}: " in said and "neon (qk-1/seed-1)" in said


def test_figures_with_one_validation_have_no_empty_panels(copy):
    for path in copy.rglob("metrics.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        kept = (li for li in lines if "validation_loss" not in li or '"step":12,' in li)
        path.write_text("".join(kept))
    program("report", copy)
    svg = (copy / "report/figures/figure2.svg").read_text()
    assert "late: validation loss" in svg and "early: validation loss" not in svg
    if CHROMIUM:
        with open_page(copy / "report/report.html") as (page, problems):
            page.locator("#figure2 select").select_option(label="loss")
            assert page.locator("#figure2 h4").all_inner_texts() == ["Late: loss"]
            assert problems == []


def test_a_study_that_has_just_begun_has_a_report(copy, study):
    for path in copy.rglob("seed-*"):
        shutil.rmtree(path)
    program("report", copy)
    assert data_of(copy)["counts"]["waiting"] == 19
    assert "contains no study" in program("report", study / "packed", check=False).stderr


def test_without_matplotlib_the_page_is_written_and_the_figures_are_explained(copy):
    shutil.rmtree(copy / "report")
    killed = copy / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    reasons = {"/bin/false": "not drawn;", killed: "(killed by signal 9)", "/none": "cannot start"}
    for python, reason in reasons.items():
        done = program("report", copy, "--python", python, check=False)
        assert done.returncode == 1 and "plot.py study" in done.stderr and reason in done.stderr
    assert (copy / "report/report.html").exists()


browser = pytest.mark.skipif(
    CHROMIUM is None and "chromium" not in os.environ.get("GROUP_MUON_REQUIRE", ""),
    reason="needs Chromium",
)


@browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_opens_without_errors_or_requests(study, scheme, width, tmp_path):
    with open_page(study / "report/report.html", scheme, width) as (page, problems):
        assert page.locator("h1").inner_text() == "study <b>&"
        for section in ("table1", "claims", "figure1", "figure2", "differences", "effects"):
            assert page.locator(f"#{section}").is_visible()
        assert page.locator("#table1").inner_text().count("3.2722") == 1
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) <= 0
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        assert problems == []
    assert (tmp_path / "page.png").stat().st_size > 50_000


@browser
def test_hovering_a_curve_shows_its_value(study):
    report = data_of(study)
    with open_page(study / "report/report.html") as (page, problems):
        text = hover_curve(page, "#figure1", "packed")
        step = int(re.search(r"step (\d+)", text).group(1))
        at = report["curves"]["packed"]["steps"].index(step)
        assert f"{report['curves']['packed']['mean'][at]:.4f}" in text
        assert "packed" in text
        page.locator("#figure1 select").select_option(label="double-lr")
        text = hover_curve(page, "#figure1", "head-wise")
        step = int(re.search(r"step (\d+)", text).group(1))
        doubled = next(one for one in report["variants"] if one["name"] == "double-lr")
        band = doubled["curves"]["head-wise"]
        assert f"{band['mean'][band['steps'].index(step)]:.4f}" in text
        text = hover_curve(page, "#differences", "qk-6-random").replace("−", "-")
        step = int(re.search(r"step (\d+)", text).group(1))
        band = report["differences"]["packed"]["qk-6-random"]
        assert f"{band['mean'][band['steps'].index(step)]:.5f}" in text
        assert problems == []


@browser
def test_fingers_and_keys_reach_what_the_mouse_does(study):
    with open_page(study / "report/report.html", width=400, touch=True) as (page, problems):
        tip = page.locator(".tooltip")
        page.locator("#table1 td.result", has_text="3.2722").tap()
        assert "minus packed" in tip.inner_text() and "at once" in tip.inner_text()
        page.locator("#effects g.row").first.tap()
        assert tip.is_visible()
        page.locator("#figure1 svg[role=img]").first.tap()
        assert re.search(r"step \d+: \d\.\d{4}", tip.inner_text())
        page.locator("#table1 h2").tap()
        assert tip.is_hidden()
    with open_page(study / "report/report.html") as (page, problems):
        tip = page.locator(".tooltip")
        rows = page.locator("#effects g.row")
        assert "minus packed" in rows.first.get_attribute("aria-label")
        rows.first.focus()
        page.keyboard.press("Tab")
        assert tip.is_visible()
        page.keyboard.press("Escape")
        assert tip.is_hidden()
        page.locator("#figure1 svg[role=img]").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("+")
        page.get_by_role("button", name="whole range").press("Enter")
        assert page.evaluate("document.activeElement.tagName") == "svg"
        assert problems == []


@browser
def test_settings_of_the_studys_own_stand_beside_the_papers(study):
    assert [one["name"] for one in data_of(study)["settings"] if one["own"]] == ["qk-growing"]
    assert "| qk-growing ᵉ | 2 |" in (study / "report/table.md").read_text()
    assert "qk-growing" in (study / "report/figures/differences.svg").read_text()
    with open_page(study / "report/report.html") as (page, problems):
        assert "qk-growing: qk-group = 1@0,12@6" in page.locator("#table1").inner_text()
        chips = page.locator("#differences .chips", has_text="Own settings")
        assert chips.get_by_role("checkbox").is_checked()
        assert "qk-growing" in hover_curve(page, "#differences", "qk-growing")
        assert problems == []


@browser
def test_a_failed_run_shows_its_error_and_its_config(study):
    with open_page(study / "report/report.html") as (page, problems):
        runs = page.locator("#runs")
        assert "the run cannot continue" in runs.inner_text()
        runs.get_by_text("exploding/packed/seed-0").click()
        assert "1e+38" in runs.inner_text()
        assert problems == []
