"""What clients and the operator talk to: routes, the parsing of bodies, tokenisation.

In: HTTP requests. Out: checked jobs for the orchestrator, and an answer or an error event for every outcome. Must not
know: which node is chosen, and how legs are sent.
"""
