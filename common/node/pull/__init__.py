"""The reader's side: prefixes that other nodes have, read into this node's memory.

In: handoffs and sources of requests, manifests of holders, pull plans of the engine. Out: one outcome per pull, which
the engine commits or throws away. Leases are renewed from the manifest to that outcome; memory that a read may still
write stays in quarantine. It must not know what a request does with the prefix, nor write to a holder's memory.
"""
