"""Text to token ids and back, for one model.

In come checked requests (``common.openai``) and token ids; out go prompts as ids, positions in chats that are worth a
kept state, and text as it becomes certain. ``light_tokenizer`` and ``chat_template`` do the same without transformers,
for the proxy; ``tokenizer_document`` carries a node's tokenizer there. No HTTP, no model, no cache in here.
"""
