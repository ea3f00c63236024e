"""Checks the messages of a conversation that a file holds."""

from typing import Any

from llamaspec.model.checkpoints.strict_json import short

ROLES = ("system", "user", "assistant", "tool")

Messages = list[dict[str, Any]]


def check_messages(value: Any) -> Messages:
    """Return `value`, a JSON value, if it is a list of messages with a role and content. Otherwise raise ValueError.

    An answer that calls a tool may have no content.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages, got {short(value)}")
    for i, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise ValueError(f"message {i} has role {short(role)}, expected {', '.join(ROLES)}")
        content = message.get("content")
        calls = message["role"] == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not calls:
            raise ValueError(f"message {i} has content {short(content)}, expected a string")
        if message["role"] == "assistant" and not calls and not str(content).strip():
            raise ValueError(f"message {i} is an answer, but it is empty")
    return value
