"""Write the built-in model's texts wherever they appear: goldens/story.txt, the README's story, and the model card.

Run it from the root of the repository:

    python -m tests.goldens.make_story

The card gets twenty stories, a chat of nine more, and thirty common questions with the model's answers. We wrote the
questions before the grammar that answers or declines them, so the grammar was not fitted to them.
"""

import hashlib
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from llamaspec import Llama, load
from llamaspec.model.chat.chat import Chat
from llamaspec.model.checkpoints.open import BUILT_IN
from llamaspec.model.options import SamplingOptions
from tests.support.processes import REPOSITORY

CARD = BUILT_IN["stories"] / "README.md"
LONGEST = 512  # tokens
BEFORE = """\
what's the capital of France?
Can you write me a poem about the moon?
how many legs does a spider have
Tell me a story about a dragon and a castle.
What is 12 times 7?
do you speak Spanish?
Tell me about yourself.
I'm bored, entertain me
story about a cat please
Which stories do you know?
Explain how a transformer works.
make up something funny"""
AFTER = {
    "Tell me a story about a girl and a kite.": """\
Did she get it back?
Why was she crying?
How old is she?
What happened first?
who's the main character
Was it windy?
What should I learn from this?
Could you summarize it in one line?""",
    "Tell me a story about a bear who learns to swim.": """\
was it hard for him?
Who taught him?
What did the bear do in the end?
Which animal had a problem?
Is this a true story?""",
    "Tell me a story about a mouse and a cake.": """\
What was missing?
Who ate the cake?
Did the mouse have any brothers?
Where's the recipe?
that was boring, can I have a longer one?""",
}
# Written after the first thirty were answered, and before the grammar was extended for these.
MORE_BEFORE = """\
hey, what's up?
Do you know any jokes?
who won the world cup in 1998
What's your favorite color?
How do I bake bread?
Tell me a story about a mermaid who finds a ring.
can you help me with my homework?
Is it going to rain tomorrow?
i want a scary story
what languages do you understand
Translate "good morning" into Italian.
how were you trained?"""
MORE_AFTER = {
    "Tell me a story about a boy and a balloon.": """\
what's the kid called?
Where does this take place?
What colour was it again?
Did anyone help him?
how tall is he?
What would have happened without the helper?
Is the balloon still flying?
do you like this story?""",
    "Tell me a story about a rabbit and a carrot.": """\
so which toy did the bunny lose?
how long did it take to grow
Why wouldn't it grow?
Did she ever give up?
What was the weather like?
Who is the bad guy?""",
    "Tell me a story about a puppy and a storm.": """\
were they scared?
Who was the friend?
What did they bake?
that's a lovely story, tell me one more!""",
}


def story(llama: Llama, seed: int, *, temperature: float = 0.8) -> str:
    """Return the text that `llamaspec story --seed N` prints."""
    sampling = SamplingOptions(temperature=temperature)
    return "".join(token.text for token in llama.generate("", seed=seed, sampling=sampling, max_new_tokens=LONGEST))


def reply(chat: Chat, text: str, seed: int) -> str:
    """Answer as `llamaspec chat` does, which drops the oldest turns if the context is nearly full."""
    chat.make_room(text, answer=LONGEST)
    return "".join(token.text for token in chat.reply(text, seed=seed, max_new_tokens=LONGEST)).strip()


def twenty_stories(llama: Llama) -> str:
    return "\n".join(f"{seed}. {story(llama, seed).strip()}" for seed in range(1, 21))


def nine_stories(llama: Llama) -> str:
    chat = Chat(llama)
    reply(chat, "Tell me a story.", 100)
    return "\n".join(f"{n}. {reply(chat, 'Tell me another story.', 100 + n)}" for n in range(1, 10))


def questions_asked(llama: Llama, before: str, after: Mapping[str, str]) -> str:
    lines, number = [], 0
    for question in before.splitlines():
        number += 1
        lines.append(f"{number}. {question} *{reply(Chat(llama), question, number)}*")
    for request, questions in after.items():
        chat = Chat(llama)
        lines += ["", f"After this: {request} *{reply(chat, request, 1)}*", ""]
        for question in questions.splitlines():
            number += 1
            chat = Chat(llama)
            reply(chat, request, 1)
            lines.append(f"{number}. {question} *{reply(chat, question, number)}*")
    return "\n".join(lines)


def thirty_questions(llama: Llama) -> str:
    return questions_asked(llama, BEFORE, AFTER)


def thirty_more(llama: Llama) -> str:
    return questions_asked(llama, MORE_BEFORE, MORE_AFTER)


def main() -> None:
    llama = load("stories")
    (Path(__file__).parent / "story.txt").write_text(story(llama, 7, temperature=0.0) + "\n")
    readme = REPOSITORY / "README.md"
    story_text = textwrap.fill(story(llama, 10).strip(), 119, break_on_hyphens=False)
    text = re.sub(
        r"(\$ make story SEED=10\n).*?(\n\$)", lambda m: m[1] + story_text + m[2], readme.read_text(), flags=re.DOTALL
    )
    readme.write_text(text)
    card = CARD.read_text()
    digest = hashlib.sha256((BUILT_IN["stories"] / "model.safetensors").read_bytes()).hexdigest()
    card = re.sub(r"(?<=sha256 of model.safetensors \| `)[0-9a-f]{64}", digest, card)
    parts = {
        "twenty stories": twenty_stories,
        "nine stories": nine_stories,
        "thirty questions": thirty_questions,
        "thirty more": thirty_more,
    }
    for name, make in parts.items():
        marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, tail = card.split(marks[0])
        card = f"{before}{marks[0]}\n{make(llama)}\n{marks[1]}{tail.split(marks[1])[1]}"
    CARD.write_text(card)


if __name__ == "__main__":
    main()
