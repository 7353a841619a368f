"""The HTTP requests to nodes that serve one client's request, and what happens when they fail.

In: an admitted ``Job`` and the client's stream. Out: bytes to the client, leases released, verdicts for the nodes'
breakers. Start at ``orchestrator``. Must not know: how requests are parsed, tokenised or admitted.
"""
