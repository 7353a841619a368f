"""The OpenAI endpoints of a node: from a request's body to engine requests, from engine outputs to the answer.

In: HTTP requests. Out: bodies, event streams, the trace of a request, its metrics. ``admission`` says which requests
may begin. It must not know how a prefix is pulled or handed out: it holds one while its request runs.
"""
