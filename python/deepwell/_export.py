"""Operators that stand for attention and experts in exported programs.

transformers builds masks and routes tokens with graphs of dozens of nodes, some of which cannot be
exported. register() makes two implementations known to it:

    register()
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="deepwell", experts_implementation="deepwell")

An exported program then has one node dw.attention per layer, whose window, softcap, sinks and
causality are arguments, and one node dw.experts. Both compute on any device and have gradients, so
that the module runs as before; they are plain and slow, and meant to be replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

NAME = "deepwell"


def _attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float,
               causal: bool, window: int, softcap: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * scale).float()
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    query = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)[None, :]
    seen = torch.ones_like(query >= key)
    if causal:
        seen = seen & (key <= query)
    if window > 0:
        seen = seen & (key > query - window) & (key < query + window)
    if mask is not None:
        seen = seen & mask[:, None, None, :].bool()
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is None:
        probs = scores.softmax(-1)
    else:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        probs = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return probs.to(v.dtype) @ v


@torch.library.custom_op("dw::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float,
              causal: bool, window: int, softcap: float, dropout: float) -> Tensor:
    """softmax(scale q kᵀ) v.

    q has the shape (batch, heads, queries, depth), k and v (batch, groups, keys, depth), where
    groups divides heads; the depth of v may be another. The result is (batch, heads, queries,
    depth of v). sinks (heads) has a score that takes part in the softmax and has no value. mask
    (batch, keys) is true where a key is no padding. causal hides keys behind the query. window > 0
    hides keys that are window or more away. softcap > 0 replaces a score s by softcap·tanh(s/softcap).
    """
    if dropout > 0:
        raise NotImplementedError("dw::attention computes no dropout outside the engine")
    return _attention(q, k, v, sinks, mask, scale, causal, window, softcap).contiguous()


@attention.register_fake
def _(q, k, v, sinks, mask, scale, causal, window, softcap, dropout):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])


_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "swish": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
}

CLAMPED = "clamped_swiglu"  # of gpt-oss: (clamp(up) + 1) · gate · sigmoid(alpha · gate)


def _experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
             down_bias: Tensor | None, act: str, transposed: bool, interleaved: bool, alpha: float,
             limit: float) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        token, slot = torch.where(index == e)
        h = x[token] @ (gate_up[e] if transposed else gate_up[e].T)
        if gate_up_bias is not None:
            h = h + gate_up_bias[e]
        gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
        if act == CLAMPED:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = (up + 1) * (gate * torch.sigmoid(gate * alpha))
        else:
            h = _ACTIVATIONS[act](gate) * up
        h = h @ (down[e] if transposed else down[e].T)
        if down_bias is not None:
            h = h + down_bias[e]
        out = out.index_add(0, token, (h * weight[token, slot, None]).to(out.dtype))
    return out


@torch.library.custom_op("dw::experts", mutates_args=())
def experts(x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
            down_bias: Tensor | None, act: str, transposed: bool, interleaved: bool, alpha: float,
            limit: float) -> Tensor:
    """The weighted sum of the gated MLPs that index (tokens, k) chooses for each row of x.

    x has the shape (tokens, embed), weight (tokens, k), gate_up (experts, 2·ffn, embed) and down
    (experts, embed, ffn); transposed says that their last two dimensions are the other way round.
    interleaved says that gate and up alternate instead of following each other.
    """
    return _experts(x, index, weight, gate_up, down, gate_up_bias, down_bias, act, transposed, interleaved, alpha,
                    limit)


@experts.register_fake
def _(x, index, weight, gate_up, down, gate_up_bias, down_bias, act, transposed, interleaved, alpha, limit):
    return torch.empty_like(x)


def _differentiable(op, compute, arguments):
    """Gives op the gradient of compute, which takes the first arguments of op and is run once more."""

    def setup(ctx, inputs, output):
        ctx.others = [None if isinstance(a, Tensor) else a for a in inputs]
        ctx.places = [i for i, a in enumerate(inputs) if isinstance(a, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))

    def backward(ctx, slope):
        inputs, wanted = list(ctx.others), []
        for i, t in zip(ctx.places, ctx.saved_tensors):
            inputs[i] = t.detach()
            if ctx.needs_input_grad[i]:
                inputs[i].requires_grad_()
                wanted.append(i)
        with torch.enable_grad():
            out = compute(*inputs[:arguments])
        slopes = iter(torch.autograd.grad(out, [inputs[i] for i in wanted], slope, allow_unused=True))
        return tuple(next(slopes) if i in wanted else None for i in range(len(inputs)))

    op.register_autograd(backward, setup_context=setup)


_differentiable(attention, _attention, 9)
_differentiable(experts, _experts, 12)


def _attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
                       sliding_window=None, softcap=None, s_aux=None, position_bias=None, cache=None, **_):
    """transformers' attention function: the result is (batch, queries, heads, depth)."""
    if position_bias is not None or cache is not None:
        raise NotImplementedError(f"{type(module).__name__}: a position bias or a paged cache is not supported")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise NotImplementedError(f"{type(module).__name__}: a mask of {attention_mask.dim()} dimensions; give the mask "
                                  "of padding (batch, keys)")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = torch.ops.dw.attention(query, key, value, s_aux, attention_mask,
                                 query.shape[-1] ** -0.5 if scaling is None else scaling, bool(causal),
                                 sliding_window or 0, softcap or 0.0, dropout)
    return out.transpose(1, 2), None


def _mask(*_, attention_mask=None, **__):
    """transformers' mask function: padding alone, since the operator makes all else.

    Sequences that are packed into one row and separated by position_ids are not seen: their mask has no
    place in the operator.
    """
    return attention_mask


def _experts_forward(module, hidden_states, top_k_index, top_k_weights):
    """transformers' experts function."""
    from transformers.integrations.moe import _default_apply_gate

    name = type(module).__name__
    alpha = limit = 0.0
    if not module.has_gate or module.has_post_expert_norm or module._is_expert_parallel:
        raise NotImplementedError(f"{name}: experts without a gate, with a norm, or spread over processes")
    if type(module)._apply_gate is _default_apply_gate:
        act = module.config.hidden_act
        if act not in _ACTIVATIONS:
            raise NotImplementedError(f"{name}: experts with activation {act}")
    elif hasattr(module, "alpha") and hasattr(module, "limit"):
        act, alpha, limit = CLAMPED, float(module.alpha), float(module.limit)
    else:
        raise NotImplementedError(f"{name}: experts with a gate of their own")
    return torch.ops.dw.experts(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj,
        module.gate_up_proj_bias if module.has_bias else None, module.down_proj_bias if module.has_bias else None,
        act, module.is_transposed, not module.is_concatenated, alpha, limit)


def register() -> None:
    """Makes the implementations known to transformers, by the name "deepwell"."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _mask)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)


@contextlib.contextmanager
def used(module: torch.nn.Module) -> Iterator[None]:
    """Lets models of transformers call these operators for a while, and return no cache."""
    configs = {id(c): c for m in module.modules()
               if hasattr(c := getattr(m, "config", None), "_attn_implementation")}
    if not configs:
        yield
        return
    register()
    keys = {"_attn_implementation": NAME, "_experts_implementation": NAME, "use_cache": False}
    before = [(c, k, getattr(c, k)) for c in configs.values() for k in keys if hasattr(c, k)]
    try:
        for c, k, _ in before:
            setattr(c, k, keys[k])
        yield
    finally:
        for c, k, value in before:
            setattr(c, k, value)
