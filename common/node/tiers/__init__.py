"""The node's tiers: prefixes that leave its pools are written to folders of objects and read back when they are asked
for, by the rules of ``common.kv_cache.tiers`` over the store of ``common.tiers``.

In: what the pools will evict or have published, prompts that are admitted. Out: objects; pulls with a local source.
Decisions are the engine thread's, bytes move on threads of their own. Must not know requests or peers.
"""
