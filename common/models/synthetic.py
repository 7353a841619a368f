"""Small checkpoints made on the spot: a tokenizer trained on the interpreter's own documentation, and weights with a
long memory.

Default random weights barely carry the far past, so an engine that lost a state would still give the right tokens.
The weights here make late logits depend on early tokens: matrices keep the variance of what they multiply, decays are
slow, attention is sharp. Everything is drawn from one seed.
"""

from __future__ import annotations

import importlib
import inspect
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.models.loading.quiet import quiet_transformers

ROLES = ("system", "user", "assistant", "tool")
PAD_TOKEN, END_TOKEN = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, *(f"<|{role}|>" for role in ROLES))
"""Ids 0 .. 5, in this order."""

# Turns are fenced by special tokens alone: text never merges across a fence, so a conversation rendered with the
# generation prompt is a token prefix of the same conversation with its next turns.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] or '' }}{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

_DOCUMENTED = (
    "argparse",
    "asyncio",
    "collections",
    "datetime",
    "decimal",
    "json",
    "logging",
    "pathlib",
    "random",
    "socket",
)


def documentation_texts() -> Iterator[str]:
    """Documentation strings of some standard library modules, in a fixed order."""
    for name in _DOCUMENTED:
        module = importlib.import_module(name)
        yield inspect.getdoc(module) or name
        for _, member in sorted(vars(module).items()):
            if (inspect.isclass(member) or inspect.isfunction(member)) and (text := inspect.getdoc(member)):
                yield text


def build_tokenizer(vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ``vocab_size`` entries (at least 262) and a chat template for :data:`ROLES`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documentation_texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def give_long_memory(model: Any, seed: int) -> None:
    """Overwrite the weights of ``model`` in place so that its logits depend on tokens thousands of positions back."""
    generator = torch.Generator().manual_seed(seed)

    def normal(p: torch.Tensor, scale: float, mean: float = 0.0) -> None:
        p.copy_(torch.randn(p.shape, generator=generator) * scale + mean)

    for name, p in sorted(model.named_parameters()):
        module, _, kind = name.rpartition(".")
        owner = module.rpartition(".")[2]
        if kind == "A_log":
            p.copy_(torch.log(torch.rand(p.shape, generator=generator) * 0.095 + 0.005))
        elif kind in ("dt_bias", "dt_proj_bias") or (owner == "dt_proj" and kind == "bias"):
            normal(p, 0.5, -2.0)
        elif owner in ("conv1d", "conv"):
            normal(p, 0.4)
        elif owner in ("q_norm", "q_layernorm"):
            p.copy_(
                torch.full_like(p, 4.0 - (1.0 if float(p.abs().max()) == 0.0 else 0.0))
            )  # some families store w - 1
        elif p.ndim >= 2:
            normal(p, (2.5 if owner in ("q_proj", "k_proj") else 1.0) / math.sqrt(p.shape[-1]))


def save_checkpoint(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Write config, weights and tokenizer to ``folder`` in one move: other processes see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet_transformers():
            model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(folder)
    except OSError:
        if missing(folder):  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def special_ids() -> dict[str, int]:
    """Config fields of the special tokens."""
    return {"pad_token_id": SPECIAL_TOKENS.index(PAD_TOKEN), "eos_token_id": SPECIAL_TOKENS.index(END_TOKEN)}


def missing(folder: Path, names: Sequence[str] = ("config.json", "model.safetensors", "tokenizer.json")) -> bool:
    """Whether ``folder`` lacks one of the files of a checkpoint."""
    return not all((folder / name).is_file() for name in names)
