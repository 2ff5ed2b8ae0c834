"""What of torchrl's private parts TritonVTrace leans on.

If one of these fails, upstream has changed it: read the new code, mend the file named here, and adjust the range of
versions in pyproject.toml.
"""

import inspect

import pytest
from rollouts import ACTORS
from torch import nn
from torchrl.modules import ValueOperator
from torchrl.objectives.value import VTrace, advantages

CALLED = {
    "_call_value_nets": (
        VTrace._call_value_nets,
        ["data", "params", "next_params", "single_call", "value_key", "detach_next", "vmap_randomness"],
        "vtrace_plugins/torchrl/estimator.py, _values",
    ),
    "_get_time_dim": (VTrace._get_time_dim, ["time_dim", "data"], "estimator.py, _resolve_time_dim"),
    "_group_ids": (VTrace._group_ids, ["tensordict"], "estimator.py, _standardized"),
    "_standardize_by_group": (
        advantages._standardize_by_group,
        ["x", "groups", "mask", "eps"],
        "estimator.py, _standardized",
    ),
    "_call_actor_net": (
        advantages._call_actor_net,
        ["actor_net", "data", "params", "log_prob_key"],
        "log_probs.py, upstreams_log_prob",
    ),
    "_self_set_grad_enabled": (advantages._self_set_grad_enabled, ["fun"], "estimator.py, forward"),
    "_self_set_skip_existing": (advantages._self_set_skip_existing, ["fun"], "estimator.py, forward"),
}


@pytest.mark.parametrize("name", CALLED)
def test_upstreams_signature(name):
    function, needed, where = CALLED[name]
    parameters = inspect.signature(function).parameters
    missing = [p for p in needed if p not in parameters]
    assert not missing, f"torchrl's {name} no longer takes {missing}, as {where} calls it; it takes {list(parameters)}"


def test_the_switch_that_spares_recurrent_critics_vmap():
    assert hasattr(VTrace, "deactivate_vmap"), "torchrl's ValueEstimatorBase lost deactivate_vmap (estimator.py)"


def test_what_the_short_way_through_a_module_reads():
    """vtrace_plugins/torchrl/plain.py, and networks.py's distribution."""
    module = ValueOperator(nn.Linear(2, 1), in_keys=["x"])
    read = ("module", "method", "method_kwargs", "_kwargs", "_get_kwargs", "inplace", "_compiled_call_impl")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name in read + hooks:
        assert hasattr(module, name), f"tensordict's TensorDictModule lost {name}"
    assert hasattr(nn.modules.module, "_has_any_global_hook"), "torch's nn.Module lost _has_any_global_hook"
    for name in ("return_composite", "default_interaction_type", "module", "det_part", "_dist_sample"):
        assert hasattr(ACTORS["Categorical"](), name), f"tensordict's ProbabilisticTensorDictSequential lost {name}"


def test_upstreams_constructor_takes_what_we_pass_on():
    ours = {"gamma", "actor_network", "value_network", "rho_thresh", "c_thresh"}
    assert ours <= set(inspect.signature(VTrace.__init__).parameters), "torchrl's VTrace.__init__ lost an argument"
