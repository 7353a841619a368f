"""The bytes of tiers on a filesystem: immutable objects under keyed names, each checked whole when it is read.

Headers and buffers come in and go out; what is worth keeping is decided in ``common.kv_cache.tiers``. Must not know
torch, requests, the engine or the transfer.
"""
