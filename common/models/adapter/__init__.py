"""The adapter: transformers' model code, run on our ops and pools without changing its files.

In come the calls of transformers' modules (cache, attention, convolution, scans); out go calls of ``common.ops`` with
the attention metadata and pools of the forward context. ``families.py`` says what is patched of which family.
Everything that depends on the pinned transformers version is here. Nothing here knows which backend runs the ops.
"""
