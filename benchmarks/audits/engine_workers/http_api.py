"""Serves two functions over HTTP as OpenAI's completions and chat completions. Needs only Python."""

import argparse
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def arguments() -> argparse.Namespace:
    """Read the model, the dtype and the port from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, required=True)
    return parser.parse_args()


def serve(port: int, complete: Answer, chat: Answer) -> None:
    """Serve until the process is killed. Requests run one at a time."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = {"/v1/completions": complete, "/v1/chat/completions": chat}.get(self.path)
            if answer is None:
                self.reply(404, {"error": {"message": "unknown path"}})
                return
            try:
                with lock:
                    result = answer(body)
                    chunks = list(result) if body.get("stream") else []
            except Exception as error:
                self.reply(400, {"error": {"message": str(error)}})
                return
            if body.get("stream"):
                self.send(200, "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")
            else:
                self.reply(200, result)

        def reply(self, status: int, value: Any) -> None:
            self.send(status, json.dumps(value))

        def send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
