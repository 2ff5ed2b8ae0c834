"""The examples, and a benchmark like them, run on a budget; what they reach with a whole one is in their docstrings."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["torchrl_impala.py", "--frames", "2000"], ""),
        pytest.param(["torchrl_impala_async.py", "--frames", "3000"], "updates on average", marks=pytest.mark.slow),
        pytest.param(["torchrl_appo.py", "--frames", "3000"], "updates on average", marks=pytest.mark.slow),
        pytest.param(["torchrl_impala_ray.py", "--frames", "3000"], "updates on average", marks=pytest.mark.slow),
        pytest.param(
            ["../benchmarks/torchrl_step.py", "--shapes", "8x16", "--repeats", "1"], "faster by", marks=pytest.mark.slow
        ),
        (["sb3_ppo.py", "--steps", "2048"], "vtrace/ess"),
        pytest.param(["sb3_contrib.py", "--steps", "256"], "recurrent: mean return", marks=pytest.mark.slow),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_example(command, says):
    for module in ("torchrl", "sb3_contrib", *(["ray"] if "ray" in command[0] else [])):
        pytest.importorskip(module)
    result = subprocess.run(
        [sys.executable, EXAMPLES / command[0], *command[1:]], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert says in result.stdout
