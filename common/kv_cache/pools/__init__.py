"""Memory units, blocks or slots, without their meaning: who may use each, its generation and tag, its bytes.

Unit ids come in and go out. Must not know what a prefix is; which cached unit is evicted first is told by ``eviction``.
``storage`` is the one module of the cache that imports torch.
"""
