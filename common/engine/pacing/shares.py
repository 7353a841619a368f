"""How a node divides its steps between prompts and streams. Its scheduler goes by these, and so does the proxy's
placement when it estimates what a node will do."""

from __future__ import annotations

PROMPT_SHARE = 4
"""Beside streams without a target, prompts get one ``PROMPT_SHARE``-th of ``max_num_batched_tokens`` in each step. A
stream waits for the whole step, so this is what bounds the gaps between its tokens; with chunks of 512 tokens a prompt
takes little longer."""

SLOWEST_SHARE = 0.125
"""Beside streams with a target, a prompt keeps this share of the speed that it has without streams, whatever the target
is."""

PACING_RESERVE = 1.25
"""A prompt may be computed at a slower pace where it would be in time even if it were so many times as long: another
stream may begin meanwhile."""

TARGET_SHARE = 0.9
"""Steps with prompts are planned to take this share of the target for the time between two tokens, at most."""

USUAL_ANSWER_TOKENS = 256
"""An answer is expected to have so many tokens at most: few are as long as their requests allow."""
