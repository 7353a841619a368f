"""What a prefill node and a decode node are made of: HTTP outside, one engine thread inside, and the exchange of
prefixes with other nodes.

In: requests of clients and of the proxy, queries of other nodes. Out: answers, leases, manifests, metrics. ``node``
assembles the parts, ``app`` puts the routes round them, ``main`` is the program. A room gets the parts that it uses,
not the node. No module here computes or decides what is cached: that is ``common.engine`` and ``common.kv_cache``.
"""
