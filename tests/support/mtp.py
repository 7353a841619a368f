"""Checkpoints with a head for further tokens whose guesses are known: right or wrong by place.

The head is drawn at random, attention and experts alive. Then its last dense matrix is solved for, so that over given
texts its hidden row is the model's own (each draft right, and each draft behind that one too), or the opposite of it at
the places that are to be wrong. The rows that it is solved from come from stock layers over the whole text at once, so
that an engine which keeps other K/V, or takes another hidden row, drafts other tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.models.adapter.mtp import MtpHead, create_head
from common.models.synthetic import give_long_memory
from tests.support.models import auto_class, checkpoint

MTP_FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h", "qwen3_5_vl", "qwen3_5_moe_vl")


def is_right(position: int) -> bool:
    """Of the token at a position: whether the draft of the token after it is right."""
    return position % 4 != 3


def num_accepted(start: int, end: int, count: int) -> list[tuple[int, int]]:
    """(drafted, right) of each step with drafts: an answer from position ``start`` to before ``end``, by drafts of
    ``count`` tokens. The first step has none."""
    steps, last = [], start + 1
    while last < end - 1:
        drafted = min(count, end - last - 2)
        right = next((index for index in range(drafted) if not is_right(last + index)), drafted)
        if drafted:
            steps.append((drafted, right))
        last += right + 1
    return steps


@torch.no_grad()
def checkpoint_with_mtp(
    family: str, folder: Path, texts: Sequence[tuple[int, Sequence[int]]] = (), *, source: Path | None = None
) -> Path:
    """The tiny checkpoint of ``family``, or ``source``, with a head. ``texts``: (length of the prompt, prompt and
    answer); over their answers the head is right where ``is_right`` says."""
    source = source or checkpoint(family)
    model = auto_class(family).from_pretrained(source, dtype=torch.float32).eval()
    base = getattr(model.base_model, "language_model", model.base_model)
    head = create_head(base, copy.deepcopy(model.config.get_text_config()))
    give_long_memory(head, seed=7)
    if texts:
        _solve(head, model, base, texts)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    weights |= {f"mtp.{name}": x for name, x in _published(head.state_dict()).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _published(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a matrix for each expert, as checkpoints have them."""
    found: dict[str, Tensor] = {}
    for name, x in weights.items():
        if not re.search(r"\.experts\.\w+$", name):
            found[name] = x.clone()
            continue
        place, _, kind = name.rpartition(".")
        for index, matrix in enumerate(x):
            parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
            for part, matrix_part in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{place}.{index}.{part}.weight"] = matrix_part.clone()
    return found


def _solve(head: MtpHead, model: Any, base: Any, texts: Sequence[tuple[int, Sequence[int]]]) -> None:
    layer: Any = head.layers[-1]
    norm = head.norm if hasattr(head, "norm") else layer.final_layernorm
    own: Any = getattr(base, "norm", None) or base.norm_f
    norm.weight.copy_(own.weight)
    mlp = layer.mlp if hasattr(layer, "mlp") else layer.mixer
    down, factor = _last_matrix(mlp)
    down.weight.zero_()
    inputs, missing = [], []
    for length, text in texts:
        ids = torch.tensor([list(text)])
        hidden = base(input_ids=ids, use_cache=False).last_hidden_state[0]
        seen: list[Tensor] = []
        hook = down.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        rows = _stock_rows(head, base, ids, hidden)
        hook.remove()
        # The norm's factor: what it makes of a row of root mean square 1.
        scale = norm(torch.ones(1, rows.shape[-1]))
        wanted = hidden / scale
        signs = torch.tensor([1.0 if is_right(position) else -1.0 for position in range(len(text))])
        places = torch.arange(length, len(text))
        inputs.append(seen[0].reshape(len(text), -1)[places])
        missing.append((wanted * signs[:, None] - rows)[places] / factor)
    x, y = torch.cat(inputs).double(), torch.cat(missing).double()
    assert len(x) <= x.shape[1], "more rows than the matrix has columns: it cannot be right everywhere"
    down.weight.copy_((torch.linalg.pinv(x, rtol=1e-12) @ y).T.float())


def _last_matrix(mlp: Any) -> tuple[nn.Linear, float]:
    if hasattr(mlp, "shared_expert_gate"):
        mlp.shared_expert_gate.weight.zero_()
        return mlp.shared_expert.down_proj, 0.5
    found: nn.Linear = mlp.shared_experts.down_proj if hasattr(mlp, "shared_experts") else mlp.down_proj
    return found, 1.0


def _stock_rows(head: MtpHead, base: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """[num_tokens, hidden] before the last norm: of each token with the hidden row before it, 0 for the first."""
    before = torch.cat([torch.zeros(1, hidden.shape[1]), hidden[:-1]])
    rows = head._join(base.get_input_embeddings()(ids[0]), before)[None]
    count = ids.shape[1]
    mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
    kwargs: dict[str, Any] = {}
    if (rotary := getattr(base, "rotary_emb", None)) is not None:
        kwargs["position_embeddings"] = rotary(rows, torch.arange(count)[None])
    for layer in head.layers:
        rows = layer(rows, attention_mask=mask, **kwargs)
    return rows[0]
