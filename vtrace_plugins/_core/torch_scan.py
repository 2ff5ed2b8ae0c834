"""V-trace in vectorised torch, on any device: elementwise terms, then a scan in O(log T) steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from vtrace_plugins._core.clipping import clipped
from vtrace_plugins._core.inputs import Inputs

# A scan step on fewer elements than this costs its launch, not its arithmetic (CPU and GPU alike).
_ELEMENTS_PER_STEP = 4096
_LONGEST_LOOP = 32
_WIDE_ON_CPU = 512  # from so many rows on, a plain loop is faster there at any length


def _ahead(x: Tensor, last: Tensor | float) -> Tensor:
    """``x[t + 1]`` at t, with ``last`` where there is no next step; laid out as x is."""
    end = last[None] if isinstance(last, Tensor) else torch.full_like(x[:1], last)
    if _time_is_inside(x):
        return torch.cat([x[1:].movedim(0, -1), end.movedim(0, -1)], -1).movedim(-1, 0)
    return torch.cat([x[1:], end])


def _time_is_inside(x: Tensor) -> bool:
    """Whether the steps of a row lie side by side in memory. Operations on mixed layouts cost several times as much."""
    return x.ndim > 1 and x.shape[0] > 1 and x.stride(0) == 1


def _same(x: float | Tensor, y: float | Tensor) -> bool:
    """Whether two clips are known to be one, without reading a tensor (which would wait for the GPU)."""
    return x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y)


def _combine(later: tuple[Tensor, ...], earlier: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The associative operator on elements (a, b, cut) of spans of time; b is read only where cut is false."""
    a_later, b_later, cut_later = later
    a, b, cut = earlier
    return torch.where(cut, a, a + b * a_later), b * b_later, cut | cut_later


def _scan_by_doubling(a: Tensor, b: Tensor, cut: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inclusive scan against time: combine each element with the one 1, 2, 4, ... steps later (Hillis and Steele)."""
    step, T = 1, a.shape[0]
    while step < T:
        near = _combine((a[step:], b[step:], cut[step:]), (a[:-step], b[:-step], cut[:-step]))
        a, b, cut = (torch.cat([x, y[-step:]]) for x, y in zip(near, (a, b, cut), strict=True))
        step *= 2
    return a, b, cut


def _loop(a: Tensor, b: Tensor, cut: Tensor) -> Tensor:
    """The scan step by step."""
    inside = _time_is_inside(a)
    if inside:  # steps become rows of memory, once
        a, b, cut = a.contiguous(), b.contiguous(), cut.contiguous()
    steps = list(zip(a.unbind(0), b.unbind(0), cut.unbind(0), strict=True))
    xs = [steps[-1][0]]
    for a_t, b_t, cut_t in steps[-2::-1]:
        xs.append(torch.where(cut_t, a_t, torch.addcmul(a_t, b_t, xs[-1])))
    x = torch.stack(xs[::-1])
    return x.movedim(0, -1).contiguous().movedim(-1, 0) if inside else x


def _linear_scan(a: Tensor, b: Tensor, cut: Tensor) -> Tensor:
    """``x_t = a_t`` where cut, else ``a_t + b_t x_{t+1}``, along dim 0. The last step of each row must be cut.

    Time is folded into ``[chunks, loop]``: a loop over the steps of all chunks at once, then doubling over the chunks'
    ends. Short or wide windows are one chunk (a plain loop), long ones are mostly doubling.
    """
    T = a.shape[0]
    wide = a.device.type == "cpu" and a.numel() >= T * _WIDE_ON_CPU
    if T <= _LONGEST_LOOP or wide:
        return _loop(a, b, cut)
    loop = max(1, min(_LONGEST_LOOP, a.numel() // _ELEMENTS_PER_STEP))
    chunks = -(-T // loop)
    padding = chunks * loop - T
    if padding:
        pad = a.new_zeros(padding, *a.shape[1:])
        a, b = torch.cat([a, pad]), torch.cat([b, pad])
        cut = torch.cat([cut, torch.ones_like(pad, dtype=torch.bool)])
    a, b, cut = (x.reshape(chunks, loop, *x.shape[1:]) for x in (a, b, cut))

    inside = [(a[:, -1], b[:, -1], cut[:, -1])]
    for i in range(loop - 2, -1, -1):
        inside.append(_combine(inside[-1], (a[:, i], b[:, i], cut[:, i])))
    starts = _scan_by_doubling(*inside[-1])[0]  # x at the first step of each chunk
    entering = _ahead(starts, 0.0)[:, None]
    a, b, cut = (torch.stack(xs[::-1], 1) for xs in zip(*inside, strict=True))
    return torch.where(cut, a, a + b * entering).reshape(chunks * loop, *a.shape[2:])[:T]


def _scan_batch(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Tensor, int]:
    """The operator under vmap: time stays first, the batch goes last."""
    batched = (
        x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
        for x, dim in zip(inputs, in_dims, strict=True)
    )
    return torch.ops.vtrace_plugins.linear_scan.default(*batched), -1


# To a compiler the scan is one operator: its loops depend on the length, and would be unrolled anew for each.
_NAME = "vtrace_plugins::linear_scan"
_library = torch.library.Library("vtrace_plugins", "FRAGMENT")
_library.define("linear_scan(Tensor a, Tensor b, Tensor cut) -> Tensor")
_library.impl("linear_scan", lambda a, b, cut: _linear_scan(a, b, cut).contiguous(), "CompositeExplicitAutograd")
torch.library.register_fake(_NAME, lambda a, b, cut: a.new_empty(a.shape), lib=_library)
torch.library.register_vmap(_NAME, _scan_batch, lib=_library)


def _scan(a: Tensor, b: Tensor, cut: Tensor) -> Tensor:
    result: Tensor
    if torch.compiler.is_compiling() and forward_ad._current_level < 0:  # the operator would drop a tangent
        result = torch.ops.vtrace_plugins.linear_scan.default(a, b, cut)
    else:
        result = _linear_scan(a, b, cut)
    return result


class LinearScan(torch.autograd.Function):
    """The recurrence with its adjoint, which is the same recurrence run the other way in time.

    With G_t = dL/dx_t accumulated: ``G_t = g_t + b_{t-1} G_{t-1}`` unless step t-1 is cut, ``dL/da = G``, and
    ``dL/db_t = G_t x_{t+1}`` where t is not cut. All by selection, so that a NaN behind a cut stays there.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, cut: Tensor) -> Tensor:
        return _scan(a, b, cut)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, b, cut = inputs
        ctx.save_for_backward(b, cut, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        b, cut, x = ctx.saved_tensors
        (grad,) = grads
        # Flipped in time, "the step before" becomes "the step after": reuse the scan. Step 0 has none before it.
        b_before = _ahead(b.flip(0), 0.0)
        cut_before = torch.cat([cut.flip(0)[1:], torch.ones_like(cut[:1])])
        grad_a = LinearScan.apply(grad.flip(0), b_before, cut_before).flip(0)
        return grad_a, torch.where(cut, 0.0, grad_a) * torch.where(cut, 0.0, _ahead(x, 0.0)), None


def vtrace_torch(x: Inputs) -> tuple[Tensor, Tensor]:
    """As :func:`~vtrace_plugins._core.reference.vtrace_reference`, term by term, without its loop."""
    log_ratio, rewards, values, gamma, term = x.log_pi - x.log_mu, x.rewards, x.values, x.gamma, x.terminated
    if x.mask is None:
        end = _ahead(torch.zeros_like(term), True)
        unread = term
    else:
        end = ~_ahead(x.mask, False)
        term = term & x.mask
        unread = term | ~x.mask
        log_ratio, rewards, values = (torch.where(x.mask, t, 0.0) for t in (log_ratio, rewards, values))
        if isinstance(gamma, Tensor):
            gamma = torch.where(x.mask, gamma, 0.0)
    bootstraps = end if x.truncated is None else end | (x.truncated & ~term)
    cut = term | bootstraps

    if x.next_values is not None:
        next_value = x.next_values
    elif x.bootstrap_values is not None:
        next_value = torch.where(bootstraps, x.bootstrap_values, _ahead(values, 0.0))
    else:
        assert x.last_value is not None
        next_value = _ahead(values, x.last_value)
    next_value = torch.where(unread, 0.0, next_value)

    rho = clipped(log_ratio, x.rho_bar)
    c = rho if _same(x.c_bar, x.rho_bar) else clipped(log_ratio, x.c_bar)
    alpha = rho * (rewards + gamma * next_value - values)
    beta = torch.where(cut, 0.0, gamma * (c if x.lam == 1 else x.lam * c))
    targets = values + LinearScan.apply(alpha, beta, cut)

    target_next = _ahead(targets, 0.0)
    mixed = target_next if x.lam == 1 else next_value + x.lam * (target_next - next_value)
    advantages = rewards + gamma * torch.where(cut, next_value, mixed) - values
    if x.weight_advantages:
        weight = rho if _same(x.pg_rho_bar, x.rho_bar) else clipped(log_ratio, x.pg_rho_bar)
        advantages = weight * advantages
    if x.mask is not None:
        targets, advantages = torch.where(x.mask, targets, 0.0), torch.where(x.mask, advantages, 0.0)
    return targets, advantages
