"""The proxy: the OpenAI front door before prefill and decode nodes.

In: clients' requests, nodes' answers and cache events, the operator's orders. Out: legs to nodes, streams to clients.
Rooms, each of which imports only those before it: ``metrics``, ``node_http``, ``nodes``, ``prefix_index``,
``placement``, ``admission``, ``legs``, ``status``, ``pages``, ``http``; ``app`` puts them together. Must not know:
engines, caches, transfer; neither torch nor NIXL is installed here.
"""
