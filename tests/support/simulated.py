"""A small hybrid and how fast its nodes are, for simulated clusters."""

from __future__ import annotations

from proxy.nodes.load import Measured
from proxy.simulation.speeds import Speeds

HYBRID = {
    "model_type": "granitemoehybrid", "hidden_size": 32, "num_attention_heads": 4, "mamba_n_heads": 8,
    "mamba_d_state": 16, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "dtype": "float32",
}  # fmt: skip
"""Its ``config.json``."""
SPEEDS = Speeds(
    prefill=Measured(0.01, 0.001), decode=Measured(0.02, 0.001), pull=Measured(0.003, 0.0), row_s=0.002, chunk=512,
    max_num_seqs=8,
)  # fmt: skip
