"""OpenAI's Responses API, stateless: input items as messages, a chat's answer as output items and typed events."""
