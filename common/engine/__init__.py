"""One node's model computing: which sequences run in the next step, the step itself, and the tokens it yields.

In come requests (``common.request``), results of pulls, leases to grant; out go ``RequestOutput`` and what a prefix
source shall pull. ``EngineCore`` is the face; one thread calls it. It knows nothing of HTTP, of asyncio, of text, or
of how bytes move between nodes. ``scheduler``, ``scheduling``, ``sequence`` and ``plan`` run without torch.
"""
