"""``python -m vtrace_plugins bench``, on a budget."""

import json

import pytest

from vtrace_plugins import __main__ as cli


def test_it_times_what_is_here(capsys, tmp_path):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    options = ["--device", "cpu", "--shapes", "2x5", "3x2049", "--seconds", "0.001"]
    outputs = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert cli.main(["bench", *options, *outputs]) == 0
    written = json.loads((tmp_path / "a.json").read_text())
    short, long = written["rows"]
    assert (short["envs"], short["steps"], long["steps"]) == (2, 5, 2049)
    assert short["torch"] > 0 and "TorchRL" not in long
    out = capsys.readouterr().out
    assert "3 x 2049" in out and f"{long['torch']:,}" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_missing_is_named(capsys, monkeypatch):
    from vtrace_plugins import bench

    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert cli.main(["bench", "--plot", "a.png"]) == 2
    assert capsys.readouterr().err == "bench needs rich and matplotlib: pip install rich matplotlib\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--shapes", "64", "expected ENVSxSTEPS, as in 64x128, got '64'"),
        ("--device", "abacus", "expected a device that torch has here, got 'abacus'"),
        ("--device", "meta", "expected a device that computes, got 'meta'"),
        ("--seconds", "nan", "expected a positive number, got 'nan'"),
        ("--json", "missing/a.json", "expected a file in a folder that exists, got 'missing/a.json'"),
        ("--plot", "a.foo", "expected a name that ends in one of .png"),
    ],
)
def test_wrong_options(capsys, option, value, message):
    """Before anything is timed."""
    with pytest.raises(SystemExit):
        cli.main(["bench", option, value])
    assert message in capsys.readouterr().err
