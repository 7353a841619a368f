"""The status page's data and the gauges: what the other rooms hold at the moment somebody looks.

In: the pool, the prefix index, admission, recent requests, the nodes' own metrics. Out: the page's JSON, and
samples for the proxy's exposition. Must not know: requests while they run; nothing is kept for the page but rates.
"""
