"""The ``tandem`` command: ``up`` starts and watches a service on this machine, ``bench`` loads one.

In come command lines and the environment; out go other processes of ours, their output, and exit statuses. Nodes and
the proxy are started as processes and asked over HTTP: none of their modules is imported here.
"""
