"""Loading: the way from ``--model`` to a ``LoadedModel`` or a ``ConfigError`` with the reason.

In come a folder or hub id and the flags of the run; out go the patched model, its geometry, ops, tokenizer and
fingerprint. A model is checked twice before it serves: the shapes of its states (``check_shapes.py``) and its numbers
(``probe.py``). Nothing here knows the size of the cache or how steps are planned.
"""
