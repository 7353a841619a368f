"""Moving bytes between nodes: one-sided reads of numbered units, and the check that they are what was promised.

In come regions of memory, announcements of peers and pull jobs; out go ``PullOutcome`` and destinations that nothing
writes any more. ``backend`` is the contract of a transport, ``puller`` runs pulls on one. Nothing here knows what a
block or a state means, who leased it, or HTTP; a transport's own errors and types stay in its folder.
"""
