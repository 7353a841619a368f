"""From a row's logits to its next token.

In come logits and what each sequence asked for; out go tokens and logprobs. A draw depends on its own row alone, never
on which others are in the batch. It knows no scheduler and no cache.
"""
