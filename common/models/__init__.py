"""Models: from a checkpoint to a transformers model whose state lives in our pools.

In comes a folder or hub id, a dtype and a device; out goes a ``LoadedModel`` (``loading/loader.py``), which the engine
calls with packed tokens under a forward context. ``adapter`` joins transformers' code to the ops, ``cpu`` puts compiled
layers into a model, ``loading`` reads, checks and proves it. Nothing here knows requests, the scheduler, or how blocks
and slots are given out.
"""
