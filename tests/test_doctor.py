"""``python -m vtrace_plugins doctor`` on a healthy machine and on a sick one."""

import subprocess
import sys
from importlib.metadata import version

import pytest
import torch

from vtrace_plugins import __main__ as cli
from vtrace_plugins import doctor


def test_a_healthy_machine(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert 'backend="auto" means "torch"' in out and "all is well" in out
    assert f"torch              {version('torch')}" in out
    assert out.count("right: error") >= 2


@pytest.mark.parametrize("sick", ["wrong numbers", "an error"])
def test_a_sick_machine(capsys, monkeypatch, sick):
    real = doctor.error_of

    def error_of(backend, device):
        if backend == "torch":
            if sick == "an error":
                raise RuntimeError("no compiler\nand more")
            return 0.1
        return real(backend, device)

    monkeypatch.setattr(doctor, "error_of", error_of)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    wanted = (
        "torch      FAILED: RuntimeError: no compiler\n" if sick == "an error" else "WRONG, above 2e-06: error 1.0e-01"
    )
    assert wanted in out and "something is wrong" in out


def test_a_wrong_backend_has_a_large_error(monkeypatch):
    real = doctor.vtrace
    off = lambda **call: real(**call | {"gamma": 0.98 if call["backend"] == "torch" else 0.99})  # noqa: E731
    monkeypatch.setattr(doctor, "vtrace", off)
    assert doctor.error_of("torch", torch.device("cpu")) > 1e-3


def test_without_triton_and_as_a_command():
    code = """
import sys
sys.modules["triton"] = None
from vtrace_plugins.__main__ import main
sys.exit(main(["doctor"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "triton     not here: it needs triton to be installed" in result.stdout
    nothing = subprocess.run([sys.executable, "-m", "vtrace_plugins"], capture_output=True, text=True, check=False)
    assert nothing.returncode == 2 and "doctor" in nothing.stderr


@pytest.mark.gpu
def test_a_gpu_is_described_and_checked(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.cuda.get_device_name() in out and 'backend="auto" means "triton": one fused kernel' in out
