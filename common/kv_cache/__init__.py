"""The hybrid cache's bookkeeping: which block and slot holds which prefix, who uses it, and what is found or evicted.

``manager.KVCacheManager`` is the way in: prompts come as key chains (``keys``), block tables, slots and leases go out
as ids. ``planner`` sizes the pools from a memory budget, ``spec`` and ``layout`` say what a unit holds.
Knows nothing of torch (``pools/storage.py`` alone does), of models, of requests and of the network.
"""
