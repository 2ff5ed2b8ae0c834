"""Each wrong argument is one sentence that names it, what was expected and what came."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import tensors, window

from vtrace_plugins import VTraceError, validate, vtrace
from vtrace_plugins.diagnostics import importance

DATA = tensors(window(2, 5), dtype=torch.float32)
LAST = {k: x for k, x in DATA.items() if k not in ("truncated", "bootstrap_values")} | {"last_value": torch.zeros(2)}
WITHOUT = {k: x for k, x in DATA.items() if k != "bootstrap_values"}
X = DATA["values"]

WRONG = {
    # shapes
    "log_pi shape": (DATA, {"log_pi": X[:, :4]}, "log_pi: expected shape [2, 5] (the shape of values), got shape [2, 4]"),
    "log_mu shape": (DATA, {"log_mu": X[0]}, "log_mu: expected shape [2, 5] (the shape of values), got shape [5]"),
    "rewards shape": (DATA, {"rewards": X[..., None]}, "rewards: expected shape [2, 5]*got shape [2, 5, 1]"),
    "terminated shape": (DATA, {"terminated": X[:1].bool()}, "terminated: expected shape [2, 5]*got shape [1, 5]"),
    "truncated shape": (DATA, {"truncated": X.T.bool()}, "truncated: expected shape [2, 5]*got shape [5, 2]"),
    "mask shape": (DATA, {"mask": X[0].bool()}, "mask: expected shape [2, 5]*got shape [5]"),
    "bootstrap_values shape": (DATA, {"bootstrap_values": X[:, 0]}, "bootstrap_values: expected shape [2, 5]*got shape [2]"),
    "next_values shape": (WITHOUT, {"next_values": X[:, 0]}, "next_values: expected shape [2, 5]*got shape [2]"),
    "last_value shape": (
        LAST, {"last_value": X}, "last_value: expected shape [2] (the shape of values without time), got shape [2, 5]"
    ),
    "gamma shape": (DATA, {"gamma": torch.ones(4)}, "gamma: expected a shape that broadcasts to [2, 5], got shape [4]"),
    "rho_bar shape": (DATA, {"rho_bar": torch.ones(5)}, "rho_bar: expected a number or a 0-d tensor, got shape [5]"),
    "0-d data": (DATA, {"values": torch.tensor(1.0)}, "values: expected at least one dimension (time), got a 0-d tensor"),
    # types and dtypes
    "values dtype": (DATA, {"values": X.long()}, "values: expected a floating dtype, got dtype torch.int64"),
    "log_pi dtype": (DATA, {"log_pi": X.long()}, "log_pi: expected a floating dtype, got dtype torch.int64"),
    "log_mu dtype": (DATA, {"log_mu": X.bool()}, "log_mu: expected a floating dtype, got dtype torch.bool"),
    "rewards dtype": (DATA, {"rewards": X.bool()}, "rewards: expected a floating or integer dtype, got dtype torch.bool"),
    "terminated dtype": (
        DATA, {"terminated": X.to(torch.complex64)},
        "terminated: expected a bool, integer or floating dtype, got dtype torch.complex64",
    ),
    "bootstrap_values dtype": (
        DATA, {"bootstrap_values": X.long()}, "bootstrap_values: expected a floating dtype, got dtype torch.int64"
    ),
    "not a tensor": (DATA, {"rewards": [1.0]}, "rewards: expected a torch.Tensor, got list"),
    "gamma type": (DATA, {"gamma": "0.9"}, "gamma: expected a number or a tensor, got str"),
    "gamma dtype": (DATA, {"gamma": X.bool()}, "gamma: expected a floating or integer dtype, got dtype torch.bool"),
    "c_bar type": (DATA, {"c_bar": None}, "c_bar: expected a number or a tensor, got NoneType"),
    "lam type": (DATA, {"lam": X}, "lam: expected a number, got Tensor"),
    # devices
    "log_pi device": (DATA, {"log_pi": X.to("meta")}, "log_pi: expected device cpu (that of values), got device meta"),
    "mask device": (DATA, {"mask": X.bool().to("meta")}, "mask: expected device cpu (that of values), got device meta"),
    "gamma device": (
        DATA, {"gamma": torch.tensor(0.9, device="meta")}, "gamma: expected device cpu (that of values), got device meta"
    ),
    # continuation
    "none": (WITHOUT, {}, "bootstrap_values, last_value, next_values: expected exactly one of the three, got none"),
    "two": (
        DATA, {"next_values": X},
        "bootstrap_values, last_value, next_values: expected exactly one of the three, got bootstrap_values and next_values",
    ),
    "last_value beside truncated": (
        LAST, {"truncated": X.bool()}, "last_value: expected no truncated and no mask beside it*got truncated"
    ),
    "last_value beside mask": (
        LAST, {"mask": X.bool()}, "last_value: expected no truncated and no mask beside it*got mask"
    ),
    # ranges and choices
    "gamma above 1": (DATA, {"gamma": 1.1}, "gamma: expected a number in [0, 1], got 1.1"),
    "gamma below 0": (DATA, {"gamma": -0.1}, "gamma: expected a number in [0, 1], got -0.1"),
    "gamma NaN": (DATA, {"gamma": float("nan")}, "gamma: expected a number in [0, 1], got nan"),
    "negative rho_bar": (DATA, {"rho_bar": -1.0}, "rho_bar: expected a number of at least 0 (inf is allowed), got -1.0"),
    "negative c_bar": (DATA, {"c_bar": -1.0}, "c_bar: expected a number of at least 0 (inf is allowed), got -1.0"),
    "negative pg_rho_bar": (
        DATA, {"pg_rho_bar": -1.0}, "pg_rho_bar: expected a number of at least 0 (inf is allowed), got -1.0"
    ),
    "weight_advantages": (DATA, {"weight_advantages": None}, "weight_advantages: expected True or False, got None"),
    "lam above 1": (DATA, {"lam": 2}, "lam: expected a number in [0, 1], got 2"),
    "time_dim": (DATA, {"time_dim": 2}, "time_dim: expected a dimension of the 2-d data, got 2"),
    "a huge gamma": (DATA, {"gamma": 10**400}, "gamma: expected a number in [0, 1], got 1*"),
    "sparse data": (DATA, {"log_mu": X.to_sparse()}, "log_mu: expected a dense tensor, got one of layout torch.sparse_coo"),
    "nested data": (
        DATA, {"values": torch.nested.nested_tensor([X[0], X[1]])}, "values: expected a dense tensor, got a nested one"
    ),
    "a sparse clip": (
        DATA, {"rho_bar": torch.ones(1).to_sparse()},
        "rho_bar: expected a dense tensor, got one of layout torch.sparse_coo",
    ),
    "time_dim bool": (DATA, {"time_dim": True}, "time_dim: expected an int, got bool"),
    "backend type": (DATA, {"backend": X}, "backend: expected one of*"),
    "time_dim type": (DATA, {"time_dim": 1.0}, "time_dim: expected an int, got float"),
    "backend": (DATA, {"backend": "cuda"}, "backend: expected one of 'auto', 'triton', 'torch', 'reference', got 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_argument(wrong):
    data, change, message = WRONG[wrong]
    pattern = ".*".join(map(re.escape, message.split("*")))
    with pytest.raises(VTraceError, match=f"^{pattern}$"):
        vtrace(**{"gamma": 0.9} | data | change)


@pytest.mark.parametrize("function", [vtrace, validate, importance], ids=lambda f: f.__name__)
@pytest.mark.parametrize("option", ["discounts", "bootstrap_value", "rho_bars"])
def test_an_option_of_another_library_or_a_misspelt_one(function, option):
    """Also where a required argument is missing in its place: gamma, beside ``discounts``."""
    with pytest.raises(VTraceError, match=rf"^{option}: expected one of {function.__name__}'s arguments, \[.*'log_pi'"):
        function(**{option: X})
    with pytest.raises(TypeError):  # as Python's own answer is
        function(**{option: X})


def test_a_vtrace_error_is_a_value_error():
    with pytest.raises(ValueError, match="gamma"):
        vtrace(**DATA, gamma=2.0)


def test_triton_on_a_cpu_tensor_without_the_interpreter():
    code = (
        "import torch; from vtrace_plugins import vtrace; x = torch.zeros(1, 2)\n"
        "vtrace(x, x, x, x, x.bool(), last_value=x[:, 0], gamma=0.9, backend='triton')"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert "VTraceError: backend: expected tensors on a CUDA device for 'triton'" in result.stderr
    assert "TRITON_INTERPRET=1" in result.stderr


@pytest.mark.parametrize(
    ("says", "wanted"), [("Failed to find C compiler. Please", VTraceError), ("boom", RuntimeError)]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors the backend needs the interpreter")
def test_without_a_c_compiler(monkeypatch, says, wanted):
    """Triton builds its launcher at the first call; what else goes wrong there is not hidden."""
    from vtrace_plugins._core import launch, ops

    class Kernel:
        def __getitem__(self, grid):
            def run(*arguments, **options):
                raise RuntimeError(says)

            return run

    monkeypatch.setattr(launch, "vtrace_kernel", Kernel())
    monkeypatch.setattr(ops, "_launches", {})
    with pytest.raises(wanted, match="install gcc" if wanted is VTraceError else says):
        vtrace(**DATA, gamma=0.9, backend="triton")


@pytest.mark.parametrize("backend", ["auto", "torch", "triton", "reference"])
def test_a_distributed_tensor(backend, tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        data = {k: DTensor.from_local(x, mesh, [Replicate()]) for k, x in DATA.items()}
        with pytest.raises(VTraceError, match=r"^values: expected .*to_local\(\).*, got DTensor$"):
            vtrace(**data, gamma=0.9, backend=backend)
        with pytest.raises(VTraceError, match=r"^rewards: expected .*to_local\(\).*, got DTensor$"):
            vtrace(**DATA | {"rewards": data["rewards"]}, gamma=0.9, backend=backend)
    finally:
        dist.destroy_process_group()
