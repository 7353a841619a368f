"""Who may begin now, who waits, who is turned away.

In: an ``AdmissionRequest``: arrival, priority, deadline, API key, size. Out: a place for as long as the request runs,
or ``RequestDroppedError`` with its reason. Must not know: nodes, placement, legs.
"""
