"""Names of the HTTP headers that are ours. HTTP compares names without case; a plain dict of headers does not."""

from __future__ import annotations

# On every request; the id is on every answer too.
REQUEST_ID_HEADER = "X-Request-Id"
CLUSTER_KEY_HEADER = "X-Tandem-Cluster-Key"
"""The key of internal routes; a caller that has it counts as a process of the same service."""

# On a client's request.
API_KEY_HEADER = "X-Api-Key"
"""An API key, as Anthropic's clients send it; others send ``Authorization: Bearer``."""

# On a client's request to the proxy.
TRACE_HEADER = "X-Tandem-Trace"
"""``1``: the answer is to say where the request ran and where the time went (the ``tandem`` object)."""
PLACEMENT_HEADER = "X-Tandem-Placement"
"""``auto``, ``local`` or ``remote``: where the prompt is to be computed, for tests and operators."""
SESSION_HEADER = "X-Session-Id"
"""Which session the request is of."""
DEADLINE_HEADER = "X-Request-Deadline-Ms"
"""Milliseconds from arrival after which the client has no use for an answer."""
TTFT_TARGET_HEADER = "X-Tandem-Ttft-Target-Ms"
"""Milliseconds from arrival in which the first token is to come; on legs: from the leg's arrival at its node."""
ITL_TARGET_HEADER = "X-Tandem-Itl-Target-Ms"
"""Milliseconds in which each further token is to come, on average; on the decode leg too."""

# On the proxy's answer to a client.
DROPPED_HEADER = "X-Tandem-Dropped"
"""Why admission turned the request away."""

# On every call from the proxy to a node.
PROXY_HEADER = "X-Tandem-Proxy"
"""``1``: the caller is a proxy, whose client's body came within the limit before what legs carry was added to it."""

# On the decode leg, from the proxy to a node.
PROXY_SECONDS_HEADER = "X-Tandem-Proxy-Seconds"
"""``QUEUE,ELAPSED,TOKENIZE``: seconds in the proxy's queue, since the request's arrival until the leg was sent, and for
rendering and tokenising the prompt there."""
PREFILL_NODE_HEADER = "X-Tandem-Prefill-Node"
"""Name of the node that computes the prompt."""

# On a decode node's answer; the proxy takes it off and shows it on its status page.
REPORT_HEADER = "X-Tandem-Report"
"""What is known when the answer begins: JSON of the ``tandem`` object, without the total time. Of a whole answer also
``usage``, and ``choices`` with each ``finish_reason`` that it has."""

# On a node's answer to another node's pull, and on that node's answer to the decode leg; the proxy takes it off.
LEG_HEADER = "X-Tandem-Leg"
"""``failed``: the error is that of the prefill leg, not of the pull or of the decode leg itself."""
LEG_FAILED = "failed"
