"""What leaves the pools for a lower tier, what a tier keeps, and when coming back pays: decisions alone, no bytes.

Checkpoints and sizes come in, what to write, drop and read goes out. ``tandem simulate`` and the nodes' tiers decide by
the same code. Must not know files, threads, or the transfer.
"""
