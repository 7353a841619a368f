"""Leads transformers' model code to our ops: one attention function, five module-level functions, three forwards, and
torch's activations (``gates.py``).

Mixers keep their own forward (projections, norms, gates). They are handed an ``EngineCache``, which has no state to
give, so they take their many-tokens branch for any number of rows; the functions which that branch calls are
replaced, in the mixer's module, by wrappers that go to the varlen ops while a forward context is set and to the stock
function (transformers' own) otherwise.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.activations import ACT2FN

from common.errors import ConfigError
from common.geometry.families import CONV, GATED_DELTA, KIMI_DELTA, MAMBA1, MAMBA2, Family
from common.kv_cache.spec import ModelGeometry
from common.models.adapter import gates, mla
from common.models.adapter.forward_context import get_forward_context
from common.models.adapter.lightning_attention import lightning_forward
from common.models.adapter.short_conv import short_conv_forward
from common.ops.interface import StepSize

ATTENTION_NAME = "tandem_paged"
"""Under which transformers calls :func:`_attention`. No mask function has this name, so no mask is ever built."""
_STOCK = "__tandem_stock__"
"""Attribute of a replaced function: the one of transformers or torch that it stands for."""
_NO_STATE = torch.empty(0)
"""Handed back as the state after a rule: some mixers convert it before they give it to the cache, which ignores it."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call: [1, heads, num_tokens, head_size] in, [1, num_tokens, heads, head_size_v] out."""
    context = get_forward_context()
    assert context is not None, "a model prepared for the engine was called outside a forward context"
    pool = context.attention_pool()
    if (sliding_window or 0) != pool.window:
        raise RuntimeError(
            f"layer {context.layer_idx} has a window of {sliding_window} tokens, planned is {pool.window}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if pool.is_latent:
        return mla.attend(context, module, query, scale), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return context.ops.attention(q, k, v, pool.key, pool.value, context.attention_metadata(), scale)[None], None


def _conv(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def conv(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Any:
        context = get_forward_context()
        if context is None:
            return stock(hidden_states, weight, bias, activation=activation, **kwargs)
        x, pool = hidden_states[0].T.to(weight.dtype), context.state_pool("conv")
        silu = activation in ("silu", "swish")
        out = context.ops.conv1d(x, weight, bias, context.metadata, pool, silu=silu)
        if activation is not None and not silu:
            out = ACT2FN[activation](out)
        return out.to(hidden_states.dtype).T[None]

    return conv


def _mamba2(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        context = get_forward_context()
        if context is None:
            return stock(hidden_states, dt, A, B, C, *args, **kwargs)
        assert kwargs.get("z") is None, "gating inside the Mamba-2 scan is not used by any listed family"
        size = StepSize(
            kwargs.get("dt_bias"), bool(kwargs.get("dt_softplus")), *(kwargs.get("dt_limit") or (0.0, float("inf")))
        )
        pool = context.state_pool("recurrent")
        out = context.ops.mamba2(
            hidden_states[0], dt[0], A, B[0], C[0], kwargs.get("D"), context.metadata, pool, step_size=size
        )
        return (out[None], None) if kwargs.get("return_final_states") else out[None]

    return scan


def _mamba1(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        context = get_forward_context()
        if context is None:
            return stock(hidden_states, dt, A, B, C, *args, **kwargs)
        size = StepSize(kwargs.get("delta_bias"), bool(kwargs.get("delta_softplus")))
        x, b, c = hidden_states[0].T, B[0].T, C[0].T
        # zamba calls once per head, in order; each takes its channels of the layer's state.
        begin, context.num_scanned = context.num_scanned, context.num_scanned + x.shape[1]
        pool = context.state_pool("recurrent").flatten(1, -2)[:, begin : context.num_scanned]
        out = context.ops.mamba1(x, dt[0].T, A, b, c, kwargs.get("D"), context.metadata, pool, step_size=size).T[None]
        if (gate := kwargs.get("z")) is not None:
            out = out * context.ops.activation("silu", gate)
        return (out, out.new_empty(0)) if kwargs.get("return_last_state") else out  # zamba stacks the heads' states

    return scan


def _delta_rule(op: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """``op``: which of the ops; they differ in the decay alone, one per head or one per head and key channel."""

    @functools.wraps(stock)
    def rule(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context()
        if context is None:
            return stock(query, key, value, *args, **kwargs)
        assert kwargs.get("use_qk_l2norm_in_kernel"), "every listed family normalises query and key inside the rule"
        pool = context.state_pool("recurrent")
        decay, beta = kwargs["g"][0], kwargs["beta"][0]
        out = getattr(context.ops, op)(query[0], key[0], value[0], decay, beta, context.metadata, pool)
        return out[None], _NO_STATE

    return rule


_WRAPPERS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = MappingProxyType(
    {
        CONV: _conv,
        MAMBA2: _mamba2,
        MAMBA1: _mamba1,
        GATED_DELTA: functools.partial(_delta_rule, "gated_delta"),
        KIMI_DELTA: functools.partial(_delta_rule, "kimi_delta"),
    }
)


_FORWARDS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = MappingProxyType(
    {
        "MiniMaxLightningAttention": lightning_forward,
        "Lfm2ShortConv": short_conv_forward,
        "Lfm2MoeShortConv": short_conv_forward,
    }
)
"""Mixers whose whole forward is ours: what they call is not a function that could be replaced, or is less than what one
kernel does."""


def patch_model(model: Any, family: Family, geometry: ModelGeometry) -> None:
    """Check that the loaded modules are those that ``family`` names, and lead their calls to the engine.

    Raises:
        ConfigError: naming what differs from the planned geometry or the pinned transformers version.
    """
    mixers = [m for m in model.modules() if family.mixer_class and type(m).__name__ == family.mixer_class]
    planned = {layer.layer_idx: layer for layer in geometry.state_layers}
    if sorted(m.layer_idx for m in mixers) != sorted(planned):
        raise ConfigError(
            f"model_type {geometry.model_type!r}: the config plans recurrent layers {sorted(planned)}, the model has "
            f"{family.mixer_class} at {sorted(m.layer_idx for m in mixers)}",
            param="--model",
        )
    if mixers:
        module = sys.modules[type(mixers[0]).__module__]
        if missing := [name for name in family.functions if not callable(getattr(module, name, None))]:
            raise ConfigError(
                f"transformers has no {', '.join(missing)} beside {family.mixer_class}: install transformers==5.23.*",
                param="--model",
            )
        _replace_functions(type(mixers[0]), family.functions)
    for owner, name in gates.PLACES:
        replace_function(owner, name, functools.partial(gates.gate, name))
    AttentionInterface.register(ATTENTION_NAME, _attention)
    config = model.config
    text = [name for name in config.sub_configs if getattr(config, name) is config.get_text_config()]
    # Of a vision-language model only the text part: its tower is no part of a packed step.
    model.set_attn_implementation({text[0]: ATTENTION_NAME} if text else ATTENTION_NAME)


def _replace_functions(mixer_class: Any, names: tuple[str, ...]) -> None:
    """Replace the functions in the mixer's module, or its forward."""
    for name in names:
        replace_function(sys.modules[mixer_class.__module__], name, _WRAPPERS[name])
    if mixer_class.__name__ in _FORWARDS:
        replace_function(mixer_class, "forward", _FORWARDS[mixer_class.__name__])


def replace_function(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Once per process; without a forward context the function stays what it was."""
    stock = getattr(owner, name)
    if not hasattr(stock, _STOCK):
        wrapped = wrap(stock)
        setattr(wrapped, _STOCK, stock)
        setattr(owner, name, wrapped)
