"""``tandem bench``: a client that loads a running service and reports what it saw.

In come flags and a URL; out go requests whose content a seed decides, and a report for people or as JSON. It speaks to
any OpenAI-compatible server and knows nothing of this one's processes but the trace in its answers.
"""
