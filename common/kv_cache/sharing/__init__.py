"""Prefixes between nodes: leased to a reader until a deadline, or taken in from a peer once they are validated.

Sequences and hits come in; what a reader is told, or where it is to read to, goes out as ids and generations. Must not
know the transfer, manifests or HTTP.
"""
