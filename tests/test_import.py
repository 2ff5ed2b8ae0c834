"""Importing the package is cheap and needs no RL library and no triton."""

import json
import subprocess
import sys

import pytest


def python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_brings_in_no_rl_library_and_no_triton():
    loaded = python("import sys, vtrace_plugins; print(*sys.modules)").split()
    assert {"torchrl", "tensordict", "stable_baselines3", "sb3_contrib", "gymnasium", "triton"}.isdisjoint(loaded)


@pytest.mark.parametrize("missing", ["triton", "torchrl"])
def test_works_where_it_is_missing(missing):
    out = python(
        f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import torch
from vtrace_plugins import VTraceError, vtrace
x = torch.ones(2, 3)
data = dict(log_pi=x, log_mu=x, values=x, rewards=x, terminated=x.bool(), last_value=x[:, 0], gamma=0.9)
print(vtrace(**data).targets.sum().item(), vtrace(**data, backend="torch").targets.sum().item())
try:
    vtrace(**data, backend="triton")
except VTraceError as error:
    print(error)
"""
    )
    assert out.startswith("6.0 6.0")
    if missing == "triton":
        assert "backend: expected triton to be installed for 'triton', got No module named 'triton'" in out


WITHOUT = [
    ("torchrl", "tensordict", "torchrl"),
    ("torchrl", "torchrl", "torchrl"),
    ("sb3", "gymnasium", "sb3"),
    ("sb3", "stable_baselines3", "sb3"),
    ("sb3_contrib", "sb3_contrib", "sb3"),
    ("torchrl.hydra", "hydra", "torchrl,examples"),
]


def test_an_adapter_without_its_library_names_the_extra():
    """All in one process of their own, as each would import torch once more."""
    for _, missing, _ in WITHOUT:
        pytest.importorskip(missing)
    out = python(
        f"""
import importlib, json, sys
found = []
for module, missing, _ in {WITHOUT!r}:
    for name in list(sys.modules):
        if name.startswith(("vtrace_plugins.torchrl", "vtrace_plugins.sb3", missing + ".")):
            del sys.modules[name]
    sys.modules[missing] = None
    try:
        importlib.import_module("vtrace_plugins." + module)
    except ImportError as error:
        found.append(str(error))
    else:
        found.append("")
    del sys.modules[missing]
print(json.dumps(found))
"""
    )
    for (module, missing, extra), said in zip(WITHOUT, json.loads(out.splitlines()[-1]), strict=True):
        assert f"pip install 'vtrace-plugins[{extra}]'" in said and missing in said, module
