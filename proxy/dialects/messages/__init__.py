"""Anthropic's Messages API: its content blocks as messages of a chat, a chat's answer as content blocks and events."""
