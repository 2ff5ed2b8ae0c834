"""What ``vtrace`` is measured against, each in the form its own users would write, all from the same raw inputs.

``torch_rivals`` and ``jax_rivals`` take a window as ``vtrace`` does (float32, ``[N,T]`` or ``[T,N]``; ``truncated`` and
``bootstrap_values``, or ``last_value``) and give calls that return (targets, advantages), thresholds and lambda 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from vtrace_plugins.bench import torchrl_call

GAMMA = 0.99
LONGEST_PYTHON_LOOP = 2048
LONGEST_UNROLLED_LOOP = 32  # its compile time grows with its length
Call = Callable[[], Any]


def _scan_inputs(time_dim, log_pi, log_mu, values, rewards, terminated, truncated, after):
    """(rho, alpha, beta, next value, cut): what every rival below computes before it scans."""
    rho = torch.exp(log_pi - log_mu).clamp(max=1.0)
    steps = values.shape[time_dim]
    t = torch.arange(steps, device=values.device)
    last = (t == steps - 1).view(-1, 1) if time_dim == 0 else t == steps - 1
    if truncated is None:
        after = after.unsqueeze(time_dim)
        cut = terminated | last
    else:
        cut = terminated | truncated | last
    next_value = torch.where(cut, torch.where(terminated, 0.0, after), values.roll(-1, time_dim))
    return rho, rho * (rewards + GAMMA * next_value - values), torch.where(cut, 0.0, GAMMA * rho), next_value, cut


def _finish(time_dim, values, rewards, rho, next_value, cut, delta):
    targets = values + delta
    ahead = torch.where(cut, next_value, targets.roll(-1, time_dim))
    return targets, rho * (rewards + GAMMA * ahead - values)


def _loop(time_dim, log_pi, log_mu, values, rewards, terminated, truncated, after):
    rho, alpha, beta, next_value, cut = _scan_inputs(
        time_dim, log_pi, log_mu, values, rewards, terminated, truncated, after
    )
    x, xs = torch.zeros_like(alpha.select(time_dim, 0)), []
    for a, b in zip(reversed(alpha.unbind(time_dim)), reversed(beta.unbind(time_dim)), strict=True):
        x = a + b * x
        xs.append(x)
    return _finish(time_dim, values, rewards, rho, next_value, cut, torch.stack(xs[::-1], time_dim))


def _associative_scan(time_dim, log_pi, log_mu, values, rewards, terminated, truncated, after):
    from torch._higher_order_ops.associative_scan import associative_scan

    rho, alpha, beta, next_value, cut = _scan_inputs(
        time_dim, log_pi, log_mu, values, rewards, terminated, truncated, after
    )

    def combine(later, earlier):
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    mode = "pointwise" if alpha.is_cuda else "generic"
    delta, _ = associative_scan(combine, (alpha, beta), time_dim, reverse=True, combine_mode=mode)
    return _finish(time_dim, values, rewards, rho, next_value, cut, delta)


# One thread a row, walking back through time: what one writes in CUDA first.
_SOURCE = """
extern "C" __global__ void walk(
    const float* log_pi, const float* log_mu, const float* values, const float* rewards,
    const unsigned char* terminated, const unsigned char* truncated, const float* after,
    float* targets, float* advantages, int rows, int steps, int row_stride, int time_stride, int has_truncated)
{
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    float delta = 0.0f, value_ahead = 0.0f, target_ahead = 0.0f;
    for (int t = steps - 1; t >= 0; --t) {
        long long i = (long long)row * row_stride + (long long)t * time_stride;
        bool term = terminated[i];
        bool stop = term || t == steps - 1 || (has_truncated && truncated[i]);
        float value = values[i], reward = rewards[i], next = value_ahead, ahead = target_ahead;
        if (stop) {
            next = term ? 0.0f : (has_truncated ? after[i] : after[row]);
            ahead = next;
            delta = 0.0f;
        }
        float rho = fminf(1.0f, expf(log_pi[i] - log_mu[i]));
        delta = rho * (reward + 0.99f * next - value) + 0.99f * rho * delta;
        targets[i] = value + delta;
        advantages[i] = rho * (reward + 0.99f * ahead - value);
        value_ahead = value;
        target_ahead = value + delta;
    }
}
"""


@cache
def _walk() -> Any:
    return torch.cuda._compile_kernel(_SOURCE, "walk")


def _thread_a_row(time_dim, log_pi, log_mu, values, rewards, terminated, truncated, after):
    rows, steps = values.shape[1 - time_dim], values.shape[time_dim]
    outputs = torch.empty_like(values), torch.empty_like(values)
    flags = terminated, terminated if truncated is None else truncated
    sizes = (rows, steps, values.stride(1 - time_dim), values.stride(time_dim), int(truncated is not None))
    arguments = [log_pi, log_mu, values, rewards, *flags, after, *outputs, *sizes]
    _walk()((-(-rows // 128), 1, 1), (128, 1, 1), arguments)
    return outputs


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.config.cache_size_limit = 1000
    return torch.compile(function, fullgraph=True, dynamic=False)


def _arguments(data: dict[str, Tensor]) -> list[Tensor | None]:
    names = ("log_pi", "log_mu", "values", "rewards", "terminated", "truncated")
    return [*(data.get(name) for name in names), data["bootstrap_values" if "truncated" in data else "last_value"]]


def torch_rivals(data: dict[str, Tensor], time_dim: int) -> Iterator[tuple[str, Call]]:
    arguments = _arguments(data)
    steps = data["values"].shape[time_dim]
    if steps <= LONGEST_PYTHON_LOOP:
        yield "torchrl", _torchrl(data, time_dim)
    if steps <= LONGEST_UNROLLED_LOOP:
        yield "compiled loop", partial(_compiled(_loop), time_dim, *arguments)
    yield "torch.associative_scan", partial(_compiled(_associative_scan), time_dim, *arguments)
    if data["values"].is_cuda:
        yield "CUDA, a thread a row", partial(_thread_a_row, time_dim, *arguments)
        try:
            from rl_triton import compute_vtrace
        except ImportError:
            return
        if time_dim == 1:  # its flags are floats, its bootstraps zero where they do not count
            bootstrap = {} if "truncated" in data else {"last_value": data["last_value"]}
            flags = [data[name].float() for name in ("terminated", "truncated") if name in data]
            if "truncated" in data:
                counts = data["truncated"].clone()
                counts[:, -1] = True
                bootstrap["bootstrap_values"] = data["bootstrap_values"] * (counts & ~data["terminated"])
            yield "rl-triton", partial(compute_vtrace, *arguments[:4], *flags, gamma=GAMMA, **bootstrap)


def _torchrl(data: dict[str, Tensor], time_dim: int) -> Call:
    if "truncated" not in data:
        never = torch.zeros_like(data["terminated"])
        after = data["last_value"].unsqueeze(time_dim).expand_as(never)
        data = data | {"truncated": never, "bootstrap_values": after}
    return torchrl_call(data, GAMMA, time_dim)


@cache
def _jax_functions(time_dim: int, truncation: bool) -> dict[str, Any]:
    """By name, jitted functions of (log_pi, log_mu, values, rewards, terminated, truncated or None, what follows)."""
    import jax
    import jax.numpy as jnp

    def prepare(log_pi, log_mu, values, rewards, terminated, truncated, after):
        rho = jnp.minimum(1.0, jnp.exp(log_pi - log_mu))
        terminated = terminated != 0
        cut = (jnp.arange(values.shape[0]) == values.shape[0] - 1) | terminated
        if truncated is not None:
            cut |= truncated != 0
        next_value = jnp.where(cut, jnp.where(terminated, 0.0, after), jnp.roll(values, -1))
        return rho, rho * (rewards + GAMMA * next_value - values), jnp.where(cut, 0.0, GAMMA * rho), next_value, cut

    def finish(values, rewards, rho, next_value, cut, delta):
        targets = values + delta
        return targets, rho * (rewards + GAMMA * jnp.where(cut, next_value, jnp.roll(targets, -1)) - values)

    def scan(log_pi, log_mu, values, rewards, *rest):
        rho, alpha, beta, next_value, cut = prepare(log_pi, log_mu, values, rewards, *rest)

        def step(x, ab):
            x = ab[0] + ab[1] * x
            return x, x

        _, delta = jax.lax.scan(step, 0.0, (alpha, beta), reverse=True)
        return finish(values, rewards, rho, next_value, cut, delta)

    def associative(log_pi, log_mu, values, rewards, *rest):
        rho, alpha, beta, next_value, cut = prepare(log_pi, log_mu, values, rewards, *rest)

        def combine(later, earlier):
            return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

        delta, _ = jax.lax.associative_scan(combine, (alpha, beta), reverse=True)
        return finish(values, rewards, rho, next_value, cut, delta)

    functions = {"jax.lax.scan": scan, "jax.lax.associative_scan": associative}
    rlax = None
    if not truncation:  # it cannot cut at a truncated step and go on from its bootstrap
        with suppress(ImportError):
            import rlax
    if rlax:

        def with_rlax(log_pi, log_mu, values, rewards, terminated, _, after):
            following = jnp.append(values[1:], after)
            discount = GAMMA * (terminated == 0)
            out = rlax.vtrace_td_error_and_advantage(
                values, following, rewards, discount, jnp.exp(log_pi - log_mu), stop_target_gradients=False
            )
            return values + out.errors, out.pg_advantage

        functions["rlax"] = with_rlax

    dim = 1 - time_dim
    axes = (dim,) * 5 + ((dim, dim) if truncation else (None, 0))
    return {name: jax.jit(jax.vmap(f, in_axes=axes, out_axes=dim)) for name, f in functions.items()}


def jax_rivals(data: dict[str, Tensor], time_dim: int, compile_only: bool = False) -> Iterator[tuple[str, Call]]:
    """With ``compile_only`` the calls only compile (into JAX's cache), and the data is not touched."""
    import jax

    arguments = [None if x is None else x.view(torch.uint8) if x.dtype is torch.bool else x for x in _arguments(data)]

    def given(x: Tensor) -> Any:
        if compile_only:
            return jax.ShapeDtypeStruct(x.shape, str(x.dtype).removeprefix("torch."))
        return jax.dlpack.from_dlpack(x)

    for name, function in _jax_functions(time_dim, "truncated" in data).items():
        call = partial(
            function.lower if compile_only else function, *(None if x is None else given(x) for x in arguments)
        )
        yield name, (lambda lower=call: lower().compile()) if compile_only else call
