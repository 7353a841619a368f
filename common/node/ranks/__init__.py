"""A node of several ranks: processes that compute one model together, each with a part of the weights and of the pools.

Rank 0 is the node: scheduler, cache manager, sampler, HTTP. It starts the others (``ranks.py``), which run
``follower.py``, and sends them each step's plan before it runs its own part of it (``runner.py``). All have the same
block ids and slots, so a plan means the same to each.
"""
