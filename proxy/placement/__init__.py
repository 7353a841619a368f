"""Which decode node and which prefill nodes serve a request.

In: a ``PlacementRequest``, the pool, the prefix index. Out: a ``Placement``, with pull sources for whoever computes the
prompts. Pure choice: no waiting, no I/O. Must not know: legs, HTTP, and how a placement is carried out.
"""
