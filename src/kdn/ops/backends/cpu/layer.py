"""What stands around the memory in a model (`kdn.ops.layer`), each step in one pass over the data.

Every step is an operator with a gradient, for autograd and graphs. Where neither is wanted its function is called as it
is: an operator's call by itself takes longer than a kernel does for one token.

The functions return None, and PyTorch does it, for tensors or shapes that the kernels do not take, and wherever
something watches or transforms what is computed (tracing, torch.func, forward-mode AD, dispatch modes): it would see
nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kdn.ops.backends.cpu.library import (
    Conv,
    Decay,
    Described,
    Loss,
    ReadOut,
    SwiGLU,
    call,
    matrix_vector,
    piece,
    served,
)
from kdn.ops.checks import sequence_offsets
from kdn.ops.operators import like, sequence_count, wants_gradient

WIDEST = 16  # tokens of a convolution that the kernel takes


def _takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels may read and write these tensors' memory."""
    compiling = torch.compiler.is_compiling()
    if not compiling and watched():
        return False
    given = [x for x in tensors if x is not None]
    if not served(*given) or any(x.device.type != "cpu" for x in given):
        return False
    if compiling:
        return True
    return all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_neg() for x in given)


def watched() -> bool:
    """Whether something other than autograd follows what is computed."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _plain(*tensors: Tensor | None) -> bool:
    return not (wants_gradient(*tensors) or torch.compiler.is_compiling())


def _operator(
    name: str,
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor, ...]],
    fake: Callable[..., Tensor],
    differentiable: int,
) -> Any:
    """forward(tensors…, options…) → y and backward(d_y, the same) → gradients of the first `differentiable` inputs,
    empty for one that is None."""
    operator = torch.library.custom_op(f"kdn_cpu::{name}", forward, mutates_args=())
    back = torch.library.custom_op(f"kdn_cpu::{name}_backward", backward, mutates_args=())
    operator.register_fake(fake)
    back.register_fake(lambda d_y, *inputs: like(*inputs[:differentiable]))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.options = tuple(x for x in inputs if x is not None and not isinstance(x, Tensor))
        ctx.save_for_backward(*inputs[: len(inputs) - len(ctx.options)])

    def differentiate(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        inputs = (*ctx.saved_tensors, *ctx.options)
        found = back(d_y, *inputs)
        given = [None if x is None else d for x, d in zip(inputs, found, strict=False)]
        return (*given, *[None] * (len(inputs) - differentiable))

    operator.register_autograd(differentiate, setup_context=save)
    return operator


# --- short convolution ---


def _convolution_of(
    to: Described,
    x: Tensor,
    weight: Tensor,
    history: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
    eps: float,
) -> Conv:
    if cu_seqlens is not None:
        sequence_offsets(cu_seqlens.tolist(), x.shape[1])
    return Conv(
        sequences=to.sequences(x, cu_seqlens),
        heads=x.shape[2],
        key=x.shape[3],
        width=weight.shape[1],
        x=to.rows(x),
        weight=to.plain(weight.detach().t()),
        history=to.plain(history),
        activation=activation,
        unit=eps > 0,
        eps=eps,
    )


def _convolution(
    x: Tensor,
    weight: Tensor,
    history: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
    eps: float,
) -> Tensor:
    to, y = Described(), x.new_empty(x.shape)
    a = _convolution_of(to, x, weight, history, cu_seqlens, activation, eps)
    a.y = to.rows(y)
    call("kdn_conv_forward", a)
    return y


def _convolution_backward(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor,
    history: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    to, d_x = Described(), x.new_empty(x.shape)
    a = _convolution_of(to, x, weight, history, cu_seqlens, activation, eps)
    a.d_y, a.d_x = to.rows(d_y), to.rows(d_x)
    shape = (sequence_count(x, cu_seqlens), weight.shape[1], weight.shape[0])
    d_weight = torch.empty(shape, dtype=torch.float32)
    a.d_weight = to.plain(d_weight)
    d_history = torch.empty(0 if history is None else history.shape, dtype=torch.float32)
    a.d_history = None if history is None else to.plain(d_history)
    call("kdn_conv_backward", a)
    d_history = x.new_empty(0) if history is None else d_history.to(history.dtype)
    return d_x, d_weight.sum(0).t().to(weight.dtype).contiguous(), d_history


_convolve = _operator(
    "convolution", _convolution, _convolution_backward, lambda x, *_: x.new_empty(x.shape), 3
)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    history: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
    eps: float,
) -> Tensor | None:
    if not _takes(x, weight, history):
        return None
    channels, width = weight.shape
    before = (sequence_count(x, cu_seqlens), width - 1, channels)
    fits = channels == x.shape[2] * x.shape[3] and (history is None or history.shape == before)
    if cu_seqlens is not None:
        fits = fits and x.shape[0] == 1
    if not fits or width > WIDEST:
        return None
    function = _convolution if _plain(x, weight, history) else _convolve
    y: Tensor = function(x, weight, history, cu_seqlens, activation, eps)
    return y


# --- decay ---


def _decay_of(to: Described, f: Tensor, rate: Tensor, bias: Tensor) -> Decay:
    batch, time, heads, key = f.shape
    plain = {"rate": to.plain(rate.detach()), "bias": to.plain(bias.detach())}
    return Decay(batch=batch, time=time, heads=heads, key=key, f=to.rows(f), **plain)


def _decay(f: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    to, out = Described(), f.new_empty(f.shape, dtype=torch.float32)
    a = _decay_of(to, f, rate, bias)
    a.out = to.rows(out)
    call("kdn_decay_forward", a)
    return out


def _decay_backward(d_out: Tensor, f: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    to, d_f = Described(), f.new_empty(f.shape)
    a = _decay_of(to, f, rate, bias)
    a.d_out, a.d_f = to.rows(d_out), to.rows(d_f)
    d_rate = torch.empty(f.shape[0], f.shape[2], dtype=torch.float32)
    d_bias = torch.empty(f.shape[0], bias.numel(), dtype=torch.float32)
    a.d_rate, a.d_bias = to.plain(d_rate), to.plain(d_bias)
    call("kdn_decay_backward", a)
    return d_f, d_rate.sum(0).to(rate.dtype), d_bias.sum(0).to(bias.dtype).view(bias.shape)


_decayed = _operator(
    "decay", _decay, _decay_backward, lambda f, *_: f.new_empty(f.shape, dtype=torch.float32), 3
)


def softplus_decay(f: Tensor, rate: Tensor, bias: Tensor) -> Tensor | None:
    if not _takes(f, rate, bias):
        return None
    if rate.shape != f.shape[2:3] or bias.numel() != f.shape[2] * f.shape[3]:
        return None
    y: Tensor = (_decay if _plain(f, rate, bias) else _decayed)(f, rate, bias)
    return y


# --- read-out ---


def _read_out_of(
    to: Described, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool
) -> ReadOut:
    batch, time, heads, value = x.shape
    return ReadOut(
        batch=batch,
        time=time,
        heads=heads,
        value=value,
        x=to.rows(x),
        gate=to.rows(gate),
        weight=to.plain(weight.detach()),
        eps=eps,
        silu=silu,
    )


def _read_out(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool, dtype: torch.dtype
) -> Tensor:
    to, y = Described(), x.new_empty(x.shape, dtype=dtype)
    a = _read_out_of(to, x, weight, gate, eps, silu)
    a.y = to.rows(y)
    call("kdn_read_out_forward", a)
    return y


def _read_out_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    to, d_x = Described(), x.new_empty(x.shape)
    d_gate = x.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    a = _read_out_of(to, x, weight, gate, eps, silu)
    a.d_y, a.d_x = to.rows(d_y), to.rows(d_x)
    if gate is not None:
        a.d_gate = to.rows(d_gate)
    rows = x.shape[0] * x.shape[2] * -(-x.shape[1] // piece())
    d_weight = torch.empty(rows, weight.numel(), dtype=torch.float32)
    a.d_weight = to.plain(d_weight)
    call("kdn_read_out_backward", a)
    return d_x, d_weight.sum(0).to(weight.dtype), d_gate


_read = _operator(
    "read_out",
    _read_out,
    _read_out_backward,
    lambda x, *others: x.new_empty(x.shape, dtype=others[-1]),
    3,
)


def rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, silu: bool, dtype: torch.dtype
) -> Tensor | None:
    if not _takes(x, weight, gate) or dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight.shape != x.shape[3:] or (gate is not None and gate.shape != x.shape):
        return None
    y: Tensor = (_read_out if _plain(x, weight, gate) else _read)(x, weight, gate, eps, silu, dtype)
    return y


# --- SwiGLU ---


def _swiglu_of(to: Described, gate: Tensor, up: Tensor) -> SwiGLU:
    batch, time = gate.shape[:2]
    return SwiGLU(batch=batch, time=time, gate=to.rows(gate[:, :, None]), up=to.rows(up[:, :, None]))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    to, y = Described(), gate.new_empty(gate.shape)
    a = _swiglu_of(to, gate, up)
    a.y = to.rows(y[:, :, None])
    call("kdn_swiglu_forward", a)
    return y


def _swiglu_backward(d_y: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    to, d_gate, d_up = Described(), gate.new_empty(gate.shape), up.new_empty(up.shape)
    a = _swiglu_of(to, gate, up)
    a.d_y = to.rows(d_y[:, :, None])
    a.d_gate, a.d_up = to.rows(d_gate[:, :, None]), to.rows(d_up[:, :, None])
    call("kdn_swiglu_backward", a)
    return d_gate, d_up


_swiglu_operator = _operator(
    "swiglu", _swiglu, _swiglu_backward, lambda gate, up: gate.new_empty(gate.shape), 2
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor | None:
    if not _takes(gate, up) or gate.shape != up.shape:
        return None
    y: Tensor = (_swiglu if _plain(gate, up) else _swiglu_operator)(gate, up)
    return y


# --- linear layers of one row ---


def linear_of_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    if not _takes(x, weight, bias):
        return None
    rows, n = weight.shape
    one = x.dtype is weight.dtype and x.shape[-1] == n == x.numel() and weight.stride(1) == 1
    if bias is not None:
        one = one and bias.dtype is x.dtype and bias.shape == (rows,) and bias.is_contiguous()
    if not one:
        return None
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    matrix_vector(weight, x if x.is_contiguous() else x.contiguous(), bias, y)
    return y


# --- loss ---


@torch.library.custom_op("kdn_cpu::softmax_loss", mutates_args=("logits",))
def _softmax_loss(logits: Tensor, labels: Tensor, gradient: bool) -> Tensor:
    rows, classes = logits.shape
    if rows and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise IndexError(
            f"labels must be from 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}"
        )
    to, loss = Described(), torch.empty(rows, dtype=torch.float32)
    a = Loss(
        rows=rows,
        logits=to.rows(logits[None, :, None]),
        labels=to.plain(labels, torch.int64),
        loss=to.plain(loss),
        gradient=gradient,
    )
    call("kdn_softmax_loss", a)
    return loss


_softmax_loss.register_fake(lambda logits, *_: logits.new_empty(logits.shape[0], dtype=torch.float32))


def softmax_loss_(logits: Tensor, labels: Tensor, gradient: bool) -> Tensor | None:
    if not _takes(logits) or not logits.is_contiguous():  # a copy would take the gradient
        return None
    if labels.is_floating_point() or labels.device != logits.device:
        return None
    loss: Tensor = _softmax_loss(logits, labels, gradient)
    return loss
