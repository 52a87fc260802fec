"""What flash-linear-attention's layers and models compute, on a CPU.

Their forward passes are GPU kernels and refuse. The modules themselves can be built, so a layer's output is
put together here from its weights: its naive recurrences and gates, and plain PyTorch around them.
"""

import functools
import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@functools.cache
def theirs(module: str) -> Any:
    """A module of that library, imported when a test runs: it takes seconds, and warns without a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "fla.models", reason="flash-linear-attention is the peer to compare with", exc_type=ImportError
        )
        return importlib.import_module(module)


def layer_class(mixer: str) -> type[nn.Module]:
    """Its layer for the mixer of that name."""
    layers = {
        "kda": ("kda", "KimiDeltaAttention"),
        "gdn2": ("gdn2", "GatedDeltaNet2"),
        "gated-deltanet": ("gated_deltanet", "GatedDeltaNet"),
        "deltanet": ("delta_net", "DeltaNet"),
    }
    module, name = layers[mixer]
    return getattr(theirs(f"fla.layers.{module}"), name)


def layer_output(layer: Any, x: Tensor) -> Tensor:
    """y of one of its layers for x: [B, T, hidden]."""
    if type(layer).__name__ == "Attention":
        return _attention(layer, x)
    q, k, v = _qkv(layer, x)
    scale = 2 if layer.allow_neg_eigval else 1
    strength = scale * layer.b_proj(x).sigmoid()
    match type(layer).__name__:
        case "KimiDeltaAttention":
            o, _ = theirs("fla.ops.kda.naive").naive_recurrent_kda(
                q, k, v, _channel_decay(layer, x), strength
            )
        case "GatedDeltaNet2":
            b = strength.unflatten(-1, q.shape[-2:])
            w = layer.w_proj(x).sigmoid().unflatten(-1, v.shape[-2:])
            o, _ = theirs("fla.ops.gdn2.naive").naive_recurrent_gdn2(q, k, v, _channel_decay(layer, x), b, w)
        case "GatedDeltaNet":
            gate = theirs("fla.ops.gated_delta_rule.gate").naive_gdn_gate
            g = gate(layer.a_proj(x), layer.A_log, layer.dt_bias)
            naive = theirs("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
            o, _ = naive(q, k, v, strength, g)
        case "DeltaNet":
            heads_first = [y.transpose(1, 2) for y in (q, k, v, strength)]
            o = theirs("fla.ops.delta_rule.naive").delta_rule_recurrence(*heads_first)[0].transpose(1, 2)
    y = F.rms_norm(o, o.shape[-1:], layer.o_norm.weight, layer.o_norm.eps)
    if hasattr(layer, "g_proj"):
        gate = layer.g_proj(x).unflatten(-1, o.shape[-2:])
        y = y * (gate.sigmoid() if layer.o_norm.activation == "sigmoid" else F.silu(gate))
    return layer.o_proj(y.flatten(-2))


@torch.no_grad()
def shake(module: nn.Module, seed: int = 0) -> nn.Module:
    """Change all weights a little, so that none is 0 or 1 and could be left out unnoticed."""
    rng = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.add_(0.2 * torch.randn(weight.shape, generator=rng))
    return module


def model_logits(model: Any, tokens: Tensor) -> Tensor:
    """Logits of one of its causal language models for tokens: [B, T]."""
    x = model.model.embeddings(tokens)
    for block in model.model.layers:
        x = x + layer_output(block.attn, _norm(block.attn_norm, x))
        h = _norm(block.mlp_norm, x)
        x = x + block.mlp.down_proj(F.silu(block.mlp.gate_proj(h)) * block.mlp.up_proj(h))
    return model.lm_head(_norm(model.model.norm, x))


def _norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def _qkv(layer: Any, x: Tensor) -> list[Tensor]:
    """[B, T, H, ·] each, q and k of unit length."""
    out = []
    for name in "qkv":
        y = getattr(layer, f"{name}_proj")(x).transpose(1, 2)
        if layer.use_short_conv:
            weight = getattr(layer, f"{name}_conv1d").weight
            y = F.conv1d(F.pad(y, (weight.shape[-1] - 1, 0)), weight, groups=weight.shape[0])
        y = F.silu(y.transpose(1, 2)).unflatten(-1, (layer.num_heads, -1))
        out.append(y if name == "v" else y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt())
    return out


def _channel_decay(layer: Any, x: Tensor) -> Tensor:
    gate = theirs("fla.ops.kda.gate").naive_kda_gate
    return gate(layer.f_proj(x).unflatten(-1, (layer.num_heads, -1)), layer.A_log, layer.dt_bias)


def _attention(layer: Any, x: Tensor) -> Tensor:
    """Softmax over the last `window_size` tokens, token itself included, with its reference rotation."""
    import torch

    time, half = x.shape[1], layer.head_dim // 2
    angle = torch.arange(time)[:, None] * layer.rope_theta ** (-torch.arange(half) / half)
    rotate = theirs("fla.modules.rotary.ops").rotary_embedding_ref
    q, k, v = (getattr(layer, f"{name}_proj")(x).unflatten(-1, (layer.num_heads, -1)) for name in "qkv")
    q, k = (rotate(y, angle.cos(), angle.sin()) for y in (q, k))
    distance = torch.arange(time)[:, None] - torch.arange(time)
    seen = (distance >= 0) & (distance < (layer.window_size or time))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * layer.head_dim**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return layer.o_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(-2))
