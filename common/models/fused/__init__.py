"""Fewer kernels: layers of a loaded model that are computed in fewer calls than transformers writes them in.

In comes a transformers model and a backend's ops on rows (``common.ops.row_ops``); out goes the same model with norms,
activations and gated MLPs replaced, each after a trial on the model's device, and where the backend has more of them
(on a GPU) with merged projections, residual sums that the next norm computes, and mixers and attention of ours. The
load probe compares the numbers of what came out with transformers' own.
"""
