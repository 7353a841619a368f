"""Replays of request traces through the real cache manager, without a model: ``tandem simulate``.

A trace and a model's config come in, hit rates and counts go out, the same in every run. Must not know torch or a node.
"""
