"""Builds the OpenAPI document from the types of requests and responses."""

from typing import Any

import msgspec

from llamaspec.serving.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from llamaspec.serving.openai_answers import ChatCompletion, Completion, EmbeddingList

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
EVENT = {  # one server-sent event: a chunk as JSON, "[DONE]", or an error
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
POSTS: dict[str, tuple[str, type, type | None]] = {
    "/v1/completions": ("Continue a prompt.", CompletionRequest, Completion),
    "/v1/chat/completions": ("Answer a conversation.", ChatRequest, ChatCompletion),
    "/v1/embeddings": ("Compute embeddings.", EmbeddingRequest, EmbeddingList),
    "/tokenize": ("Encode a text or a conversation.", TokenizeRequest, None),
    "/detokenize": ("Decode token ids.", DetokenizeRequest, None),
}
GETS = {
    "/v1/models": "List the model of this server, and its adapters.",
    "/tokenizer_info": "Describe the tokenizer.",
    "/health": "Check that the process and its engine are running.",
    "/ready": "Check whether the server accepts requests.",
}


def openapi(model: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the server of `model`."""
    kinds = [kind for _, body, answer in POSTS.values() for kind in (body, answer) if kind]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for path, (summary, body, answer) in POSTS.items():
        request = {"required": True, "content": in_content(reference(body.__name__))}
        written = reference(answer.__name__) if answer else {"type": "object"}
        answers = responses(written)
        if answer in (Completion, ChatCompletion):
            answers["200"]["content"] |= {"text/event-stream": {"schema": EVENT}}
        paths[path] = {"post": {"summary": summary, "requestBody": request, "responses": answers}}
    for path, summary in GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": responses({"type": "object"})}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"llamaspec serve: {model}", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def reference(name: str) -> dict[str, str]:
    """Return a reference to the schema `name`."""
    return {"$ref": f"#/components/schemas/{name}"}


def responses(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe the responses of an endpoint: success with `schema`, and errors in one format for all endpoints."""
    wrong = {"description": "An error.", "content": in_content(reference("Error"))}
    return {"200": {"description": "Success.", "content": in_content(schema)}, "4XX": wrong, "5XX": wrong}


def in_content(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe a JSON body with `schema`."""
    return {"application/json": {"schema": schema}}
