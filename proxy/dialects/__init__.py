"""Other APIs as converters over chat: what a body of theirs is as a chat, and what a chat's answer is in theirs.

In: checked bodies, and the bytes of a chat's answer as a node sends them, cut anywhere. Out: chat bodies, answers, and
events. Must not know: nodes, sockets, where a request runs. Nothing here waits.
"""
