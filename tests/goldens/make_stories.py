"""Write stories.json: token ids, a story and logits that transformers computes with the built-in model.

    python -m tests.goldens.make_stories

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch transformers sentencepiece protobuf safetensors

The file has the ids of some texts and of a chat, a greedy story, and the logits after some tokens of the story.
"""

import json
import platform
from pathlib import Path

from tests.goldens.make_logits import shortest

COMMAND = "python -m tests.goldens.make_stories"
MODEL = Path(__file__).parents[2] / "model/stories"
# No text begins with a space, because transformers then omits the space that SentencePiece puts in front.
TEXTS = ["Once upon a time", "Tell me a story.", "two  spaces ", "naïve 🎈\n"]
CHAT = [
    {"role": "user", "content": "Tell me a story about a fox."},
    {"role": "assistant", "content": "Long ago, there was a fox."},
    {"role": "user", "content": "Who was it?"},
]
TOKENS = 60
POSITIONS = [0, 20, 59]


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report  # no missing, unexpected or mismatched keys
    begin = torch.tensor([[tokenizer.bos_token_id]])
    story = model.generate(begin, max_new_tokens=TOKENS, do_sample=False)[0]
    with torch.no_grad():
        logits = model(story[None], use_cache=False).logits[0].numpy()
    golden = {
        "made": {
            "command": COMMAND,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "texts": {text: tokenizer.encode(text) for text in TEXTS},
        "chat": tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"],
        "story": story.tolist(),
        "positions": POSITIONS,
        "logits": [[shortest(x) for x in logits[position]] for position in POSITIONS],
    }
    text = json.dumps(golden, ensure_ascii=False).replace('], "', '],\n"').replace("], [", "],\n[")
    (Path(__file__).parent / "stories.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
