"""The holder's side: what this node computed, or has, and lets other nodes read.

In: prefill legs and queries of readers. Out: leases and the manifests that describe them; a rendezvous tells a reader
step by step what is finished. It must not know how or when a reader reads: the transport reads memory on its own.
"""
