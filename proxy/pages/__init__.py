"""The pages for people: the status page at ``/`` and the chat page at ``/chat``, as plain files.

In: nothing. Out: HTML, CSS and JavaScript, the same for all. Must not know: what the pages ask for once they run in a
browser; that are the proxy's own routes (``/status.json``, ``/v1/models``, ``/v1/chat/completions``), behind its keys.
"""
