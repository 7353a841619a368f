"""The nodes that the proxy drives: who belongs to the pool, in which state each is, how loaded and how fast.

In: flags, DNS, the operator's orders, what nodes answer to health probes. Out: ``Node`` records, the usable ones by
role, and calls to listeners when a node's life begins or ends. Must not know: requests, prompts, placement.
"""
