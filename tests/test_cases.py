"""Every backend gives the committed right answers, which were computed apart from this project."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close

from vtrace_plugins import vtrace

CASES = json.loads((Path(__file__).parent / "data" / "vtrace_cases.json").read_text())
FLAGS = ("terminated", "truncated", "mask")


def number(x):
    return float(x) if isinstance(x, str) else x


def array(x):
    return np.vectorize(number, otypes=[float])(np.asarray(x, dtype=object))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(on, case, dtype):
    backend, device = on
    inputs = {
        name: torch.tensor(x, dtype=torch.bool, device=device)
        if name in FLAGS
        else torch.tensor(array(x), dtype=dtype, device=device)
        for name, x in case["inputs"].items()
    }
    options = {
        name: torch.tensor(x, dtype=dtype, device=device) if isinstance(x, list) else number(x)
        for name, x in case["options"].items()
    }
    result = vtrace(**inputs, **options, backend=backend)
    assert_close(result.targets, array(case["expected"]["targets"]))
    assert_close(result.advantages, array(case["expected"]["advantages"]))
