"""Faster on the CPU: compiled layers in a loaded model, and decode steps that are recorded once and replayed.

In comes a transformers model and the compiled kernels of ``common.ops.cpu``; out goes the same model with its linear
layers, norms, activations and gated MLPs replaced, and programs that repeat a decode step without Python. Numbers stay
within the tolerance of the load probe, replayed steps have the same bits. Other devices use nothing of this.
"""
