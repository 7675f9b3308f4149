"""A sample of what hardships.py does in full: faults at calls on files, and kill -9 at any moment."""

import subprocess

import hardships
import pytest
from running import PROGRAM

# How many calls of each kind to try, spread over all of them.
SAMPLES = {
    hardships.Tokenize: {"full": 3, "broken": 3, "short": 2, "killed": 4, "blind": 3},
    hardships.Train: {"full": 2, "broken": 3, "short": 1, "killed": 4, "blind": 3},
    hardships.Resume: {"killed": 3, "blind": 2},
    hardships.Study: {"full": 1, "broken": 1, "killed": 2},
    hardships.Report: {"broken": 2, "killed": 2, "blind": 1},
    hardships.Analyze: {"full": 1, "killed": 2, "blind": 1},
    hardships.Sample: {"blind": 1},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("hardships")


@pytest.fixture(scope="module")
def library(base):
    library = hardships.build_library(base)
    if library is None:
        pytest.skip("there is no C compiler")
    return library


@pytest.mark.parametrize("scenario", SAMPLES, ids=lambda scenario: scenario.name)
def test_faults_are_survived_or_refused_and_nothing_is_lost(base, library, scenario):
    made = scenario(base)
    outcomes = set()
    for kind, count in SAMPLES[scenario].items():
        faults = hardships.Faults(made, kind, library)
        calls = len(faults.calls())
        assert calls >= count
        outcomes |= {
            faults.trial(1 + calls * i // count + calls // (2 * count)) for i in range(count)
        }
    assert outcomes - {"survived", "missed"}


def test_a_killed_report_leaves_whole_files(base):
    kills, ends = hardships.run_kills(hardships.Report(base), 2)
    assert kills >= 2 and ends >= 1


@pytest.mark.parametrize("words", [["sample"], ["analyze"], ["--help"], ["--version"]])
def test_a_full_disk_behind_standard_output_is_an_error(base, words):
    run = hardships.Sample(base).run
    more = {"sample": [run, "--tokens", "3"], "analyze": [run, "--groups", "1"]}.get(words[0], [])
    with open("/dev/full", "w") as full:
        command = [PROGRAM, *words, *map(str, more)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("group-muon: standard output cannot be written")
