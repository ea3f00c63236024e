"""The stories that the built-in model learns: their grammar, probabilities and tokens."""

import itertools
import math
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llamaspec.commands.generate
from llamaspec.model.chat.template import ChatTemplate, SpecialTokens
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.checkpoints.open import BUILT_IN
from llamaspec.model.tokenizers.load import load_tokenizer
from llamaspec.model.tokenizers.sentencepiece_model import read_sentencepiece
from llamaspec.model.tokenizers.tokenizer import Tokenizer, decode
from llamaspec.training.stories import lexicon, outside, phrases, plots, vocabulary
from llamaspec.training.stories.choices import Choices, ReplayedChoices
from llamaspec.training.stories.corpus import OPEN, Story, story, tell_story
from llamaspec.training.stories.lexicon import Character
from llamaspec.training.stories.talk import TalkMessage, conversation, request, tells_of
from llamaspec.training.stories.world import World, unnamed
from tests.goldens import make_story
from tests.support.processes import REPOSITORY

pytestmark = pytest.mark.slow  # 40 s; the corpus rarely changes

WORD = re.compile(r"[A-Za-z]+")
TEMPLATE = ChatTemplate(
    "chat_template.jinja",
    (BUILT_IN["stories"] / "chat_template.jinja").read_text("utf-8"),
    {"bos_token": "<s>", "eos_token": "</s>"},
)
FEELINGS = "happy|glad|proud|thankful"
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    return [story(random.Random(seed)) for seed in range(2000)]


@pytest.fixture(scope="module")
def conversations() -> list[list[TalkMessage]]:
    return [conversation(random.Random(seed)) for seed in range(500)]


@pytest.fixture(scope="module")
def model() -> bytes:
    """Read the tokenizer that comes with the model. `train_tokenizer` makes it, as test_stories_model.py checks."""
    return (BUILT_IN["stories"] / "tokenizer.model").read_bytes()


@pytest.fixture(scope="module")
def tokenizer(model) -> Tokenizer:
    return read_sentencepiece(model, path="tokenizer.model")


def slips(text: str) -> list[str]:
    """List the substrings of a text that break its grammar: wrong articles, doubled words or spaces, no end.

    >>> slips("Then an dog  saw a owl and and sat")
    ['an d', '  ', 'a o', 'and and', 'no end']
    """
    wrong = r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]|  |[{}<>_]|\b(\w+) \1\b|\bNone\b|[.!?,] ?[.,]|[.!?]\"? [a-z]"
    plain = re.sub(r'[?!]" [a-z]', '" x', text)  # a quoted question or cry ends inside the quotes: "Why?" asked Mia.
    matches = [match[0] for match in re.finditer(wrong, plain)]
    return matches + ["no end"] * (not re.search(r'[.!?]"?$', text)) + ["quotes"] * (text.count('"') % 2)


def test_every_text_is_grammatical(stories, conversations):
    answers = [message.content for talk in conversations for message in talk if message.role == "assistant"]
    assert [(text, slips(text)) for text in answers + [tale.text for tale in stories] if slips(text)] == []


def test_stories_are_short_and_their_words_few(stories):
    lengths = [len(tale.text.split()) for tale in stories]
    assert 100 <= min(lengths) and max(lengths) <= 200
    assert len({word.lower() for tale in stories for word in WORD.findall(tale.text)}) <= 560


def test_a_pronoun_means_the_hero_or_the_friend(stories):
    for tale in stories:
        words = {word.lower() for word in WORD.findall(tale.text)}
        she = tale.facts["they"] == "she"
        right_pronouns, wrong_pronouns = ({"she", "her", "hers"}, {"he", "him", "his"})[:: 1 if she else -1]
        assert words & right_pronouns
        if "m" in tale.facts:  # he and she differ, so each pronoun means one person
            assert tale.facts["m_they"] != tale.facts["they"]
        else:
            assert not words & wrong_pronouns, tale.text


def test_names_say_whether_it_is_he_or_she(stories):
    for tale in stories:
        assert (tale.facts["n"] in lexicon.GIRLS + lexicon.SHE_ANIMALS) == (tale.facts["they"] == "she")
        assert tale.facts["kind"] not in tale.facts.get("helper", "")


def test_the_world_refuses_what_cannot_be():
    world = World(Choices(random.Random(0)), Character("Dot", "fox", she=True))
    world.put("kite", "Dot", taken_from=None)
    with pytest.raises(ValueError, match="kite: expected the holder Ben, got Dot"):
        world.put("kite", "a tree", taken_from="Ben")
    with pytest.raises(ValueError, match="there"):
        world.go("home")


def test_answers_can_be_read_in_the_story(stories):
    """The words of every answer occur in the story's text; the test does not use the generator's facts."""
    told_again = set(
        """
        an and at because brought but came could far felt found from gave gone got grew helped her him home it learned
        lost made no nobody not nothing planted some stayed taught the them there up was were when yes
        """.split()
    )
    for tale in stories:
        for question, answer in tale.questions:
            text = tale.text.lower()
            opening = r"^((he|she) (felt|planted it|found an?)|it was|some|to the|to|the|for|they|he|she|an|a) "
            core = re.sub(opening, "", answer.removesuffix(".").lower())
            done = re.search(r"^(made a soft bed|brought fresh water|pushed the stone away|sang a song)$", core)
            lesson = question[0].startswith("What is the moral")
            known = set(WORD.findall(text)) | told_again
            assert done or lesson or set(WORD.findall(core)) <= known, (question, answer, text)
            match question[0].split():
                case ["How", "did", _, "feel", "at", "the", "end?"]:
                    assert re.findall(FEELINGS, tale.text)[-1] == core
                case ["What", "color", "was", "the", noun]:
                    noun = noun.removesuffix("?")
                    assert re.search(rf"{core} {noun}|Something {core} lay .* It was an? {noun}!", tale.text)
                case ["Who", "helped", _]:
                    assert tale.plot == "found" or re.search(rf"\b(old|friendly|small|wise) {core}\b", text)
                case ["Where", "did", _, "go?"]:
                    assert tale.plot == "grow" or re.search(rf"(to the|to) {core}\b", text)


def test_a_question_has_one_answer(stories):
    for tale in stories:
        questions = [way for question in tale.questions for way in question.wordings]
        assert len(questions) == len(set(questions)) >= 6


@given(seeds)
def test_what_is_asked_for_is_told(seed):
    choices = Choices(random.Random(seed))
    plan, prompt = request(choices)
    text = tell_story(choices, plan).text
    about = None if plan.subject is None else getattr(plan.subject, "noun", getattr(plan.subject, "verb", None))
    for word in filter(None, (plan.kind, plan.name, plan.color, about)):
        assert word in prompt or (word == plan.kind and f"about {plan.name}" in prompt)
        assert word.split()[0] in text
    assert bool(prompt) == (plan != OPEN)


def test_a_conversation_takes_turns(conversations):
    assert {message.role for talk in conversations for message in talk} == {"user", "assistant"}
    for talk in conversations:
        assert [message.role for message in talk] == ["user", "assistant"] * (len(talk) // 2)
    assert set(range(1, 12)) <= {len(talk) // 2 for talk in conversations}


def test_another_story_has_another_hero_and_another_plot():
    """A request for another story gives a different hero and a different plot, unless it names an earlier plot."""
    for seed in range(100):
        earlier_stories: list[Story] = []
        for _ in range(4):
            choices = Choices(random.Random(seed + len(earlier_stories)))
            earlier_plots, heroes = (
                {tale.plot for tale in earlier_stories},
                {tale.facts["n"] for tale in earlier_stories},
            )
            tale = tell_story(choices, OPEN, plots=earlier_plots, heroes=heroes)
            assert tale.plot not in earlier_plots and tale.facts["n"] not in heroes
            earlier_stories.append(tale)


def test_nothing_outside_is_in_a_story(stories):
    words = {word.lower() for tale in stories for word in WORD.findall(tale.text)}
    outsiders = (*outside.NOUNS, *outside.PEOPLE, *outside.PLACES)
    assert not words & {word.lower() for word in outsiders} and len(set(outsiders)) == len(outsiders)


def test_what_no_story_answers_is_declined_in_words(conversations):
    """Every answer is in the last story, or says that the story does not tell it, or lists what one can ask."""
    declined = Counter()
    for talk in conversations:
        tale = ""
        for question, answer in zip(talk[::2], talk[1::2], strict=True):
            if len(answer.content) > 300:
                tale += answer.content
            elif absent := re.fullmatch(r"There is no (\w+) in the story\.", answer.content):
                assert absent[1].lower() in question.content.lower() and absent[1] not in tale
                declined["absent"] += 1
            elif answer.content == "The story does not say.":
                assert tale and answer.of_story
                declined["not told"] += 1
            elif answer.content.startswith(("I do not know", "I tell stories.")):
                subject = re.search(
                    r" Ask me (for a story about an? \w|about (\w+), or for another story\.$)", answer.content
                )
                assert subject and (subject[2] or "") in tale
                declined["outside"] += 1
    assert all(count > 50 for count in declined.values()) and len(declined) == 3


def test_a_question_that_the_story_answers_is_never_declined(stories):
    """A question that the story answers is never declined as unanswerable, or as a question about another plot."""
    other_plots: list[tuple[str, ...]] = []
    for seed, tale in enumerate(stories[:60]):
        questions = {way.lower() for question in tale.questions for way in question.wordings}
        other_plots = [ways for plot, ways in phrases.OTHER_PLOTS.items() if not tells_of(tale.plot, plot)]
        words = tale.facts | {"noun": "robot", "someone": "the judge", "own": "the judge"}
        for template in itertools.chain(phrases.NOT_TOLD, *other_plots):
            spelled = outside.BraceWords(Choices(random.Random(seed)), words)
            assert not questions & {way.format_map(spelled).lower() for way in unnamed(template)}
    known = {word.lower() for tale in stories for word in WORD.findall(tale.text)}
    assert not known & set(phrases.HOW) and len(other_plots) == 5


def test_the_questions_of_the_card_are_in_no_conversation(conversations):
    """No training conversation contains a question of the model card, up to capitals, punctuation and short forms."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9 ]", "", text.lower().replace("'s ", " is ").replace("colour", "color"))

    lists = [make_story.BEFORE, *make_story.AFTER.values(), make_story.MORE_BEFORE, *make_story.MORE_AFTER.values()]
    held_out = {plain(question) for text in lists for question in text.splitlines()}
    assert len(held_out) == 60
    questions = {plain(message.content) for talk in conversations for message in talk if message.role == "user"}
    assert len(questions) > 1000 and not questions & held_out
    # Templates without placeholders are few enough to check them all.
    fixed = [*outside.QUESTIONS, *phrases.ABOUT_IT, *phrases.MORE, *phrases.REMARKS, *phrases.ABILITIES]
    assert not {plain(template) for template in fixed} & held_out


def test_no_two_stories_of_many_are_the_same():
    # A process without the tests' type checks is ten times as fast.
    tell = "import random; from llamaspec.training.stories.corpus import story"
    count = "print(len({story(random.Random(seed)).text for seed in range(20_000)}))"
    process = subprocess.run(
        [sys.executable, "-c", f"{tell}; {count}"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert process.stdout == "20000\n"


def test_no_two_stories_are_alike(stories):
    texts = [tale.text for tale in stories[:1000]]
    openings = Counter(" ".join(text.split()[:12]) for text in texts)
    assert openings.most_common(1)[0][1] <= 25
    grams = [{tuple(words[i : i + 5]) for i in range(len(words) - 4)} for words in map(str.split, texts[:300])]
    overlaps = [len(gram & earlier) / len(gram | earlier) for i, gram in enumerate(grams) for earlier in grams[:i]]
    assert sum(overlaps) / len(overlaps) < 0.05 and max(overlaps) < 0.6


def test_held_out_stories_are_new():
    texts = [{message.content for seed in range(i, 2000, 4) for message in vocabulary.messages(seed)} for i in (0, 1)]
    assert len(texts[0]) == 500 and not texts[0] & texts[1]


@given(seeds)
def test_a_seed_tells_one_story(seed):
    assert story(random.Random(seed)) == story(random.Random(seed))
    assert conversation(random.Random(seed)) == conversation(random.Random(seed))


@given(seeds)
def test_nats_are_those_of_the_choices(seed):
    once = story(random.Random(seed))
    replay = ReplayedChoices(once.trail)
    again = tell_story(replay, OPEN)
    assert again == once
    probability = math.prod(w[chosen] / sum(w) for w, chosen in zip(replay.weights, once.trail, strict=True))
    assert math.isclose(once.nats, -math.log(probability), rel_tol=1e-12)
    assert 30 < once.nats < 60


@given(seeds, st.data())
def test_another_choice_makes_another_text(seed, data):
    """A different choice always gives a different text, so a text's probability is the product over its choices."""
    once = story(random.Random(seed))
    replay = ReplayedChoices(once.trail)
    tell_story(replay, OPEN)
    i = data.draw(st.integers(0, len(once.trail) - 1), label="choice")
    choice = data.draw(st.integers(0, len(replay.weights[i]) - 1).filter(lambda choice: choice != once.trail[i]))
    assert tell_story(ReplayedChoices((*once.trail[:i], choice)), OPEN).text != once.text


def derivations(tell: Callable[[Choices], str], start: tuple[int, ...] = ()) -> Iterator[tuple[str, float]]:
    """Yield every text that a part of the grammar produces after the choices `start`, with its probability."""
    trails = [start]
    while trails:
        trail = trails.pop()
        replay = ReplayedChoices(trail)
        text = tell(replay)
        odds = zip(replay.weights, replay.trail, strict=True)
        yield text, math.prod(weights[chosen] / sum(weights) for weights, chosen in list(odds)[len(start) :])
        # Beyond the end of the trail, the first option was taken; queue the other options.
        for i in range(len(trail), len(replay.trail)):
            trails += [(*replay.trail[:i], choice) for choice in range(1, len(replay.weights[i]))]


def introduction(choices: Choices) -> str:
    world = World(choices, Character("Dot", "fox", she=True))
    plots.introduce(world)
    plots.become(world, "sad", "upset", why="because")
    return " ".join(world.sentences)


def test_probabilities_sum_to_one_and_no_text_is_made_twice():
    texts, probabilities = zip(*derivations(introduction), strict=True)
    assert len(set(texts)) == len(texts) == 8 * 8 * 8 * 2 * 4
    assert math.isclose(sum(probabilities), 1)


@given(seeds, st.integers(1, 5))
def test_probabilities_of_every_story_ending_sum_to_one(seed, open_choices):
    start = story(random.Random(seed)).trail[:-open_choices]
    texts, probabilities = zip(*derivations(lambda choices: tell_story(choices, OPEN).text, start), strict=True)
    assert len(set(texts)) == len(texts) > 1
    assert math.isclose(sum(probabilities), 1)


def test_a_choice_between_equals_is_refused():
    with pytest.raises(ValueError, match="different"):
        Choices(random.Random(0)).pick(["a fox", "a fox"])


def test_the_vocabulary_is_small_and_its_control_tokens_are_llamas(model, tokenizer):
    assert vocabulary.train_tokenizer(range(0, 400, 2)) == vocabulary.train_tokenizer(range(0, 400, 2)) != model
    assert tokenizer.vocab == vocabulary.VOCAB <= 1024
    assert tokenizer.dummy_prefix and tokenizer.bos == 1
    assert tokenizer.special == {"<s>": 1, "</s>": 2, "<|user|>": 3, "<|assistant|>": 4}


@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    text = text.replace("▁", "_")  # SentencePiece's own way to write a space
    assert decode(tokenizer, tokenizer.encode(text)) == text


def test_words_are_pieces(tokenizer, stories):
    tokens = sum(len(tokenizer.encode(tale.text)) for tale in stories[:200])
    assert tokens < 1.5 * sum(len(tale.text.split()) for tale in stories[:200])


def test_the_longest_stories_end_before_the_commands_stop(stories):
    """The longest story fits the default of max_new_tokens.

    A search for long stories found one of 315 tokens; the longest of 2,000 drawn stories has 285.
    """
    tokenizer = load_tokenizer(BUILT_IN["stories"])
    longest = max(stories, key=lambda tale: len(tale.text)).text
    most = next(
        option.default for option in llamaspec.commands.generate.story.params if option.name == "max_new_tokens"
    )
    assert isinstance(most, int)
    assert 250 < len(tokenizer.encode(longest)) <= 315 < most


def test_the_loss_counts_what_the_model_says(tokenizer):
    for seed in range(1, 200, 2):
        messages = vocabulary.messages(seed)
        document = vocabulary.encode(messages, tokenizer)
        assert len(document.ids) == len(document.counted)
        counted = [token for token, counts in zip(document.ids, document.counted, strict=True) if counts]
        answers = [message for message in messages if message.role != "user"]
        assert counted.count(vocabulary.EOS) == len(answers) and counted[-1] == vocabulary.EOS
        assert decode(tokenizer, counted).replace(" ", "") == "".join(m.content for m in answers).replace(" ", "")
        assert math.isclose(document.nats, sum(message.nats for message in answers), rel_tol=1e-12)
        assert document.ids[0] == vocabulary.BOS and not document.counted[0]


def test_documents_are_of_stories_and_conversations_in_training_and_held_out(tokenizer):
    for parity in (0, 1):
        documents = list(vocabulary.documents(range(parity, 80, 2), tokenizer))
        conversations = [document for document in documents if tokenizer.special["<|user|>"] in document.ids]
        assert len(conversations) == len(documents) / 2
        assert 0.1 < vocabulary.entropy_rate(documents) < 0.3


@pytest.mark.parametrize("seed", [2, 3, 7])
def test_the_chat_template_writes_what_was_trained(seed):
    # Its tokenizer_config.json states "legacy", which puts a space after a control token, as training did.
    tokenizer = load_tokenizer(BUILT_IN["stories"])
    dialog = vocabulary.messages(seed)
    messages = [{"role": message.role, "content": message.content} for message in dialog]
    special = SpecialTokens(tokenizer)
    document = vocabulary.encode(dialog, tokenizer)
    rendered = TEMPLATE.render(messages, add_generation_prompt=False)
    assert special.encode(rendered) == document.ids

    last = max(i for i, token in enumerate(document.ids) if token == tokenizer.special["<|assistant|>"])
    assert special.encode(TEMPLATE.render(messages[:-1])) == document.ids[: last + 1]


def test_the_chat_template_refuses_what_was_not_trained():
    with pytest.raises(CheckpointError, match="alternate"):
        TEMPLATE.render([{"role": "system", "content": "Be a pirate."}, {"role": "user", "content": "Hello!"}])
