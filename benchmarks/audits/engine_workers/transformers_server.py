"""Serves a model's folder with transformers. A user could write this server in an hour.

python transformers_server.py FOLDER --dtype float32 --port 8000
"""

from typing import Any

import torch
from http_api import arguments, serve
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parsed = arguments()
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(parsed.model)
    model = AutoModelForCausalLM.from_pretrained(parsed.model, dtype=getattr(torch, parsed.dtype)).eval()
    ends = {tokenizer.eos_token_id}

    @torch.no_grad()
    def write(ids: list[int], body: dict[str, Any]) -> tuple[str, str, list[tuple[int, torch.Tensor]]]:
        if body.get("n", 1) != 1 or body.get("logit_bias") or body.get("stream"):
            raise ValueError("n, logit_bias and stream are not supported")
        generator = torch.Generator().manual_seed(body.get("seed") or torch.seed() % 2**32)
        temperature, stops = body.get("temperature", 1.0), body.get("stop") or []
        output = model(torch.tensor([ids]), use_cache=True)
        steps: list[tuple[int, torch.Tensor]] = []
        while len(steps) < body.get("max_tokens", 16):
            logits = output.logits[0, -1].float()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
            steps.append((token, torch.log_softmax(logits, -1)))
            text = spelled(ids, [token for token, _ in steps])
            if token in ends:
                return text, "stop", steps
            for stop in [stops] if isinstance(stops, str) else stops:
                if stop in text:
                    return text[: text.index(stop)], "stop", steps
            output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        return spelled(ids, [token for token, _ in steps]), "length", steps

    def spelled(ids: list[int], drawn: list[int]) -> str:
        before = tokenizer.decode(ids, skip_special_tokens=True)
        return tokenizer.decode([*ids, *drawn], skip_special_tokens=True)[len(before) :]

    def top(row: torch.Tensor, count: int) -> list[tuple[str, float]]:
        return [(tokenizer.convert_ids_to_tokens(int(i)), float(row[i])) for i in row.topk(count).indices]

    def usage(ids: list[int], steps: list[Any]) -> dict[str, int]:
        return {"prompt_tokens": len(ids), "completion_tokens": len(steps), "total_tokens": len(ids) + len(steps)}

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        ids = tokenizer(body["prompt"])["input_ids"]
        text, reason, steps = write(ids, body)
        known = {
            "tokens": [tokenizer.convert_ids_to_tokens(token) for token, _ in steps],
            "token_logprobs": [float(row[token]) for token, row in steps],
            "top_logprobs": [dict(top(row, body["logprobs"])) for _, row in steps] if body.get("logprobs") else None,
        }
        choice = {"text": text, "finish_reason": reason, "logprobs": known if body.get("logprobs") else None}
        return {"choices": [choice], "usage": usage(ids, steps)}

    def chat(body: dict[str, Any]) -> dict[str, Any]:
        rendered = tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        text, reason, steps = write(ids, body)
        content = [
            {
                "token": tokenizer.convert_ids_to_tokens(token),
                "logprob": float(row[token]),
                "top_logprobs": [
                    {"token": name, "logprob": number} for name, number in top(row, body.get("top_logprobs") or 0)
                ],
            }
            for token, row in steps
        ]
        message = {"role": "assistant", "content": text}
        choice = {"message": message, "finish_reason": reason, "logprobs": {"content": content}}
        return {"choices": [choice], "usage": usage(ids, steps)}

    serve(parsed.port, complete, chat)


if __name__ == "__main__":
    main()
