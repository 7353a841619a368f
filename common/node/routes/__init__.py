"""The other HTTP routes of a node: text, status, what other nodes call, what the proxy reads, test hooks.

In: HTTP requests; those under ``/internal`` need the cluster key. Out: JSON. Each file checks a body, calls one part of
the node and shapes its answer; it keeps no state and decides nothing.
"""
