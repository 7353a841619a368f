"""Tensor parallelism: a loaded model's weights cut to one rank's part, and the sums over ranks that this calls for.

``slicing.py`` cuts one weight, ``attention.py``, ``mixers.py`` and ``mlps.py`` know which weights a module has and in
which order their rows are, ``shard_model.py`` goes through a model. Which heads are a rank's is said in one place for
weights and pools alike: ``common.kv_cache.shards``.
"""
