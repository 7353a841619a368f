"""Where a prompt can be resumed: what all groups together have of it.

A key chain comes in, a hit goes out (``hits``). No lookup changes or pins anything.
"""
