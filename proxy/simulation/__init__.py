"""A cluster in simulated time: which nodes of which roles serve a trace within its targets.

In: a trace, the model's sizes, how fast nodes are. Out: goodput, utilisation, cache hits of each cluster. Placement,
prefix index, schedulers and cache managers are the real ones; a step takes what the nodes' rates say, and nothing is
computed or sent. Must not know: HTTP, torch.
"""
