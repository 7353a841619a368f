"""The adapter: transformers' model code, run on our ops and pools without changing its files.

In come the calls of transformers' modules (cache, attention, convolution, scans); out go calls of ``common.ops`` with
the attention metadata and pools of the forward context. ``patching.py`` replaces the functions, of each family those
that ``common.geometry.families`` names. Nothing here knows which backend runs the ops.
"""
