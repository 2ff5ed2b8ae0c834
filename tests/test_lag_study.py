"""The lag study on a budget: it runs, resumes where it was, and gives the same figures again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[1] / "benchmarks" / "lag_study.py"
ONE_TASK = ["--tasks", "CartPole-v1", "--seeds", "0", "--lags", "0", "4", "--steps", "6400", "--commit", "test"]


def study(out, *arguments):
    command = [sys.executable, STUDY, "--out", out, *ONE_TASK, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {(r["method"], r["lag"]): r for r in json.loads(out.read_text())["rows"]}


@pytest.mark.slow
def test_it_resumes_and_repeats(tmp_path):
    pytest.importorskip("gymnasium")
    pytest.importorskip("tqdm")
    first = study(tmp_path / "a.json", "--methods", "V-trace")
    both = study(tmp_path / "a.json", "--methods", "V-trace", "no correction")
    assert set(first) == {("V-trace", 0), ("V-trace", 4)}
    assert set(both) == {*first, ("no correction", 0), ("no correction", 4)}
    assert both["no correction", 0]["return"] == both["V-trace", 0]["return"], "on-policy there is nothing to correct"
    assert both["no correction", 4]["return"] != both["V-trace", 4]["return"]
    assert study(tmp_path / "b.json", "--methods", "V-trace") == first
