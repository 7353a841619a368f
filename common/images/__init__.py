"""Images in prompts, as far as no model is needed for them: where one is, how large it is, how many tokens it takes.

Encoded images and a checkpoint's own fields come in; spans of a prompt, positions and refusals go out. Imports nothing
of ours but errors, and neither torch nor Pillow: the proxy and the cache's keys use it.
"""
