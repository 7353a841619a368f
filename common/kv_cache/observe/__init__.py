"""What the cache tells about itself: events of what can be found, and counters.

Groups and the coordinator report; the node's event feed and metrics read. Must not know who reports.
"""
