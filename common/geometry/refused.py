"""Model families that transformers has and this engine does not run, each with its reason; without torch.

A family is refused by name so that its user learns why, and what would have to be built. Anything else that is not
listed in ``common.geometry.families`` is refused as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from common.errors import ConfigError

_INKLING = (
    "each layer has four short convolutions inside attention and MLP with a state each, and attention takes position "
    "biases and sinks"
)

REFUSED_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "glm5_next": "its attention is MLA with an indexer, whose keys are a third thing to keep per token, and reads "
        "only the tokens that the indexer picks",
        "inkling": _INKLING,
        "inkling2": _INKLING,
        "qwen4_exp": "its attention has an indexer, whose keys are a third thing to keep per token, and its per-layer "
        "embeddings keep two more states, past input ids among them",
        "recurrent_gemma": "transformers keeps the state of its RG-LRU on the modules, not in the cache",
        "rwkv": "it keeps its state through an interface of its own, not through transformers' cache",
        "xlstm": "it keeps its state in a cache class of its own, cell by cell",
        "zaya": "its convolutions over queries and keys and the delayed half of its values are modules of their own, "
        "not functions that could be replaced",
    }
)


def unsupported_family(model_type: object, supported: Iterable[str]) -> ConfigError:
    """The error for a ``model_type`` that cannot be served: its own reason if it has one, and what can be served."""
    reason = REFUSED_FAMILIES.get(str(model_type))
    why = f": {reason}" if reason else ""
    return ConfigError(
        f"model_type {model_type!r} is not supported{why}; supported: {', '.join(sorted(supported))}", param="--model"
    )
