"""One step as the ops see it: segments packed one after another, and where each row's memory is.

In come segments (tokens of one sequence with its blocks and slots); out goes ``AttentionMetadata``, which makes each
form of it when a backend first asks: tensors for torch's states (``state_metadata``, ``chunks``) and torch's attention
(``paged_metadata``), words for compiled kernels (``packed``). It must not know which op reads it.
"""
