"""Guesses of what a sequence's next tokens are, and how much of guessing pays.

In come a sequence's tokens, what came of earlier drafts, and how long steps took; out go drafted tokens. Nothing here
can make an answer wrong: a draft counts only where it equals what is sampled. No torch, no scheduler, no cache.
"""
