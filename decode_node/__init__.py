"""The decode node: pulls computed prompts, generates, streams. Its parts are in ``common.node``, mostly ``pull``."""
