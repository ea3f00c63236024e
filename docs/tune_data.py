"""Write the data of docs/training.md: conversations with a robot, pairs of answers, and questions.

    python docs/tune_data.py      # writes robot.jsonl, few.jsonl (its first lines), pairs.jsonl and questions.jsonl

The stories are those that the built-in model was trained on, but in a robot's answer each full stop is an exclamation
mark, and the answer ends with "Beep beep!". The style adds no random choice, so we know the least loss that any model
can reach: the surprisal of the choices behind the stories, divided by the number of tokens.
"""

import json
from pathlib import Path

from llamaspec.model.checkpoints.open import BUILT_IN
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.training.stories.talk import TalkMessage
from llamaspec.training.stories.vocabulary import messages

EXAMPLES, FEW, PAIRS, QUESTIONS = 400, 60, 40, 40  # lines of the files
FIRST = 1_000_001  # odd seeds: the built-in model did not see these stories


def robot(text: str) -> str:
    """Rewrite a text in the robot's style: each full stop becomes an exclamation mark, and "Beep beep!" follows."""
    return f"{text.strip().replace('.', '!')} Beep beep!"


def conversations() -> list[list[TalkMessage]]:
    """Draw conversations of questions and answers in turn."""
    drawn = []
    seed = FIRST
    while len(drawn) < EXAMPLES:
        conversation = messages(seed)
        if [message.role for message in conversation][:2] == ["user", "assistant"]:
            drawn.append(conversation[: len(conversation) // 2 * 2])
        seed += 2
    return drawn


def questions(conversation: list[TalkMessage]) -> list[dict[str, object]]:
    """List the questions about stories in a conversation. Each has a single right answer."""
    said = [{"role": message.role, "content": message.content.strip()} for message in conversation]
    return [
        {"prompt": said[:turn], "answer": said[turn]["content"]}
        for turn, message in enumerate(conversation)
        if message.role == "assistant" and message.of_story
    ]


if __name__ == "__main__":
    tokenizer, nats, tokens = load_tokenizer(BUILT_IN["stories"]), 0.0, 0
    learned, pairs, asked = [], [], []
    for conversation in conversations():
        said = [
            {"role": m.role, "content": robot(m.content) if m.role == "assistant" else m.content} for m in conversation
        ]
        learned.append({"messages": said})
        pairs.append(
            {
                "prompt": [{"role": "user", "content": conversation[0].content}],
                "chosen": said[1]["content"],
                "rejected": conversation[1].content.strip(),
            }
        )
        asked += questions(conversation)
        answers = [message for message in conversation if message.role == "assistant"]
        nats += sum(message.nats for message in answers)
        tokens += sum(len(tokenizer.encode(robot(message.content))) + 1 for message in answers)  # and </s>
    files = {
        "robot.jsonl": learned,
        "few.jsonl": learned[:FEW],
        "pairs.jsonl": pairs[:PAIRS],
        "questions.jsonl": asked[:QUESTIONS],
    }
    for name, lines in files.items():
        Path(name).write_text("\n".join(map(json.dumps, lines)) + "\n")
    print(f"{', '.join(files)}; the least possible loss is {nats / tokens:.4f} nats per answer token in robot.jsonl")
