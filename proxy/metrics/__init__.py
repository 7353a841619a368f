"""What the proxy counts and remembers of its requests.

In: what legs, routes and placement observe while a request runs. Out: the Prometheus exposition, the last requests as
JSON for the status page. Must not know: nodes, the prefix index, admission; what they hold is read by ``proxy.status``.
"""
