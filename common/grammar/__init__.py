"""Grammars of structured output, before an engine has them: limits, and the process in which each is tried first.

In comes llguidance's text of a grammar; out goes nothing, or an error that says why it cannot be used. A grammar that
takes too long, overflows a stack or eats memory ends a child process that is there for this, never a proxy or a node.
It knows no request, no tokenizer and no engine.
"""
