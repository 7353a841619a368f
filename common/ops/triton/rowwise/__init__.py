"""Kernels of :mod:`common.ops.row_ops`: norms with sums of the residual stream, rotary embedding, activations and
gates, each on rows alone; ``rows.py`` finds the rows of strided views without a copy."""
