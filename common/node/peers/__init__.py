"""Other nodes as this one sees them: which are allowed, how to reach them, which are alive.

In: base URLs from requests, transfer announcements and beats from peers. Out: transfer peers, answers to queries, word
that a peer is lost. It must not know what is asked of a peer or why.
"""
