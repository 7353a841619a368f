"""The weights that training starts from: noise, and in it a rough look-up of "what followed this token".

In the spirit of mimetic initialisation (Trockman et al. 2024, "Mimetic Initialization Helps State Space Models Learn to
Recall"). Training has to find such a circuit otherwise, which took more than the whole budget of the shipped weights.
All of it may be unlearnt.

A token's *code* is one quarter of its embedding. The quarters of the residual stream start as:

      0 ..  63   what attention brought; a fading sum of the last codes, turned so that the two do not meet
     64 .. 127   the code of this token
    128 .. 191   the code of the token before
    192 .. 255   the code of the one before that
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

_CODE = 64
_BROUGHT, _OWN, _BEFORE, _TWO_BEFORE = (slice(start, start + _CODE) for start in range(0, 4 * _CODE, _CODE))
_CONSTANT = 2.0
"""Dimension 0 of every embedding, after the multiplier: stands in for biases, which the projections lack."""
_NOISE = 0.1
"""Of the drawn weights, this much is left where a part is set up."""
_FADING_TOKENS = 10.0
_NO_STEP = 0.001

# Chosen so that on random tokens a match stands out among 2,000 others.
_DELAY_GAIN, _FADING_GAIN = 2.0, 0.3
_KEY_GAIN, _QUERY_GAIN, _FADING_QUERY_GAIN = 1.6, 1.6, 2.0
_COPY_GAIN, _SECOND_COPY_GAIN = 3.0, 0.5
_HEAD_GAIN = 0.15


def build_model(config: GraniteMoeHybridConfig, seed: int) -> Any:
    """A float32 model with starting weights drawn from ``seed``; ``config`` as of ``build_config``."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _draw_weights(model, config)
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = _CONSTANT / config.embedding_multiplier
        turn = torch.linalg.qr(torch.randn(_CODE, _CODE)).Q
        _set_up_memory(model.model.layers[0].mamba, turn)
        _set_up_lookup(model.model.layers[1].self_attn, turn)
        model.lm_head.weight[:, _BROUGHT] = _HEAD_GAIN * config.embedding_multiplier * embedding[:, _OWN]
    return model


def _draw_weights(model: Any, config: GraniteMoeHybridConfig) -> None:
    depth = math.sqrt(2 * config.num_hidden_layers)
    for name, p in model.named_parameters():
        kind = name.split(".")[-2]
        if kind == "embed_tokens":
            p.normal_(std=1 / config.embedding_multiplier)
        elif kind == "lm_head":
            p.zero_()
        elif kind in ("out_proj", "o_proj", "output_linear"):
            p.normal_(std=1 / math.sqrt(p.shape[1]) / depth)
        elif kind == "conv1d" and p.ndim == 3:
            p.uniform_(-0.5, 0.5)
        elif name.endswith("conv1d.bias"):
            p.zero_()
        elif name.endswith("A_log"):
            p.copy_(torch.log(torch.linspace(1, 16, p.numel())))
        elif name.endswith("dt_bias"):  # decays from one token to about a thousand, as in the Mamba-2 paper
            p.copy_(_inverse_softplus(torch.exp(torch.linspace(math.log(0.1), math.log(0.001), p.numel()))))
        elif p.ndim == 2:
            p.normal_(std=1 / math.sqrt(p.shape[1]))


def _set_up_memory(mamba: Any, turn: Tensor) -> None:
    """Heads 0-1 and 2-3 pass the code of one and two tokens ago (convolution), 4-5 keep a fading sum (scan)."""
    inner, state = mamba.intermediate_size, mamba.ssm_state_size
    eye = torch.eye(_CODE)
    for head, delay, written, code in (
        (0, 1, _BEFORE, _DELAY_GAIN * eye),
        (2, 2, _TWO_BEFORE, _DELAY_GAIN * eye),
        (4, 0, _BROUGHT, _FADING_GAIN * turn),
    ):
        is_kept = delay == 0
        channels = slice(head * _CODE, (head + 2) * _CODE)
        gate, inputs = mamba.in_proj.weight[channels], mamba.in_proj.weight[inner:][channels]
        taps, out = mamba.conv1d.weight[channels, 0], mamba.out_proj.weight[:, channels]
        for drawn in (gate, inputs, taps, out):
            drawn.mul_(_NOISE)
        gate[:, 0] = 1.0
        inputs[:, _OWN] += torch.cat([eye, -eye])  # silu(x) - silu(-x) = x: a code takes two heads
        taps[:, -1 - delay] = 1.0
        out[written] += torch.cat([code, -code], 1)
        mamba.D[head : head + 2] = 0.0 if is_kept else 1.0
        mamba.A_log[head : head + 2] = 0.0
        step = torch.full((2,), 1 / _FADING_TOKENS if is_kept else _NO_STEP)
        mamba.dt_bias[head : head + 2] = _inverse_softplus(step)
    for index in (2 * inner, 2 * inner + state):  # the first entries of B and C: constant, so the scan is a sum
        mamba.in_proj.weight[index] *= _NOISE
        mamba.in_proj.weight[index, 0] = 1.5
        mamba.conv1d.weight[index - inner, 0] = torch.tensor([0.0, 0.0, 0.0, 1.0])


def _set_up_lookup(attention: Any, turn: Tensor) -> None:
    """Head 0 looks for a place where this token, and one of the last ones before it, stood; head 2 for the latter only.
    Both bring the code of what followed there."""
    eye = torch.eye(_CODE)

    def rows(head: int) -> slice:
        return slice(head * _CODE, (head + 1) * _CODE)

    for head, read, code, copied in (
        (0, _OWN, _QUERY_GAIN * eye, _COPY_GAIN),
        (2, _BROUGHT, _FADING_QUERY_GAIN * turn.T, _SECOND_COPY_GAIN),
    ):
        attention.q_proj.weight[rows(head)] *= _NOISE
        attention.q_proj.weight[rows(head), read] += code
        attention.o_proj.weight[_BROUGHT, rows(head)] += copied * eye
    for kv_head, read in ((0, _BEFORE), (1, _TWO_BEFORE)):
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight[rows(kv_head)] *= _NOISE
        attention.k_proj.weight[rows(kv_head), read] += _KEY_GAIN * eye
        attention.v_proj.weight[rows(kv_head), _OWN] += eye
    basis = torch.linalg.qr(torch.randn(_CODE, _CODE)).Q  # so that head 0's two comparisons do not meet
    attention.q_proj.weight[rows(0), _BROUGHT] += _FADING_QUERY_GAIN * basis @ turn.T
    attention.k_proj.weight[rows(0), _TWO_BEFORE] += _KEY_GAIN * basis


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))
