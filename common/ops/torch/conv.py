"""The causal depthwise convolution in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.ops.step.state_metadata import StateMetadata


def conv1d_varlen(x: Tensor, weight: Tensor, bias: Tensor | None, metadata: StateMetadata, pool: Tensor) -> Tensor:
    """Causal depthwise convolution.

    Args:
        x: [num_tokens, channels]; weight: [channels, kernel]; bias: [channels].
        pool: [num_slots, channels, kernel - 1], the last inputs of each sequence.

    Returns: [num_tokens, channels], no activation applied.
    """
    out = torch.empty_like(x)
    width = weight.shape[-1] - 1
    if metadata.num_decode:
        window = torch.cat([pool[metadata.decode_src].to(x.dtype), x[metadata.decode_rows][:, :, None]], -1)
        convolved = (window * weight).sum(-1)
        out[metadata.decode_rows] = convolved if bias is None else convolved + bias
        metadata.store_decode(pool, window[:, :, 1:])
    if not metadata.spans:
        return out
    # Every span with its state in front, side by side: one convolution; outputs that mix two neighbours are not read.
    pieces: list[Tensor] = []
    for span in metadata.spans:
        pieces += (pool[span.src_slot].to(x.dtype), x[span.begin : span.end].T)
    inputs = torch.cat(pieces, 1)
    outputs = F.conv1d(inputs[None], weight[:, None], bias, groups=x.shape[1])[0]
    begin = 0
    for span in metadata.spans:
        length = span.end - span.begin
        out[span.begin : span.end] = outputs[:, begin : begin + length].T
        for offset, slot in (*span.saves, (length, span.dst_slot)):
            pool[slot] = inputs[:, begin + offset : begin + offset + width]
        begin += length + width
    return out
