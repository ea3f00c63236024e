"""Words and questions from outside the stories, which the storyteller declines.

The person's words cost the model nothing, so they are as varied as they can be: nouns that no story has, words that
are made up, numbers, and questions of many kinds around them.
"""

from collections.abc import Mapping

from llamaspec.training.stories.choices import Choices
from llamaspec.training.stories.phrases import DEEDS, HOW, KNOWN_HOW

NOUNS = """
airplane algorithm angel apple army artist astronaut atom bank battery bicycle blog book bottle brain bridge bus camel
camera candle car carpet cello chair chess church circus clock coffee comet computer cowboy crocodile crown dentist
desert diamond dinosaur doctor dog dolphin dollar dream earthquake elephant elevator email engine essay factory film
flag football fridge galaxy game ghost giant giraffe glacier gold guitar hamster helicopter hospital hotel iceberg
idea internet island jacket jungle kangaroo keyboard king knight koala lamp laptop law lawyer library lion magician
market mermaid microwave mirror monkey monster mountain museum music ninja novel ocean office omelet orchestra paint
panda parrot penguin phone piano pilot pirate pizza planet police pony potion prince princess program proof pyramid
queen question cookbook restaurant robot rocket sandwich school scientist shark shoe skeleton smartphone sneaker
snowman soldier spaceship spoon stadium star subway sugar superhero sweater taxi teacher telescope tiger tooth
tornado tractor train treasure truck umbrella unicorn vampire violin virus volcano wallet war whale witch
wizard wolf wrench yacht zebra zoo
""".split()
PLACES = """
Africa America Asia Australia Berlin Brazil California Canada Chicago China Egypt England Europe Germany Greece India
Ireland Italy Japan Kenya London Madrid Mars Mexico Moscow Norway Paris Peru Poland Rome Russia Spain Sweden Tokyo
Texas Turkey Venice Vienna Zurich
""".split()
PEOPLE = """
Aladdin Alex Alice Batman Bob Caesar Charlie Cinderella Clara Daniel David Einstein Elsa Felix Frank George Harry Helen
Ivan Jack James Jane John Julia Karl Kevin Laura Linda Mario Mark Martin Mozart Newton Oliver Olivia Paul Peter
Picasso Rachel Robert Sarah Shakespeare Sophie Steve Susan Thomas Victor Walter Zoe
""".split()
LANGUAGES = (
    "Arabic Chinese Dutch English French German Greek Hindi Italian Japanese Latin Python Russian Turkish".split()
)
ADJECTIVES = """
ancient angry best big cheap dangerous deep electric expensive famous fast first funny heavy huge important large last
magic modern new old poor rich round scary secret short slow small strange strong sweet tall wild
""".split()
VERBS = """
buy build clean cook count cut draw drive eat explain fix find fly invent learn make measure open paint print read
remove repair ride run sell send spell start stop teach throw translate use wash win write
""".split()
SYLLABLES = """
ba be bo cha cro da de do el fa fi ga gro ha hu in ja jo ka ki lo lu ma mi mo na ne or pa pe qua ra ri sa shu sto ta ti
tru u va ve wa wo xa yo za zi
""".split()
ENDINGS = ("", "", "n", "r", "s", "t", "x", "ck", "ng", "rd", "lm")

QUESTIONS = (
    "What is {a}?",
    "What is the {adjective} {noun}?",
    "What is the {adjective} {noun} in {place}?",
    "What is the name of the {adjective} {noun} of {place}?",
    "What is {number} plus {number}?",
    "What is {number} minus {number}?",
    "What is {number} + {number}?",
    "What is your favorite {noun}?",
    "What is the best way to {verb} {a}?",
    "What is love?",
    "What is the meaning of life?",
    "What is the difference between {a} and {b}?",
    "What are {noun}s?",
    "What are you doing?",
    "What are you thinking?",
    "What did you eat today?",
    "What did {person} {verb}?",
    "What should I {verb}?",
    "What would you do with {a}?",
    "What would happen without {noun}s?",
    "What color is {a}?",
    "What comes after {number}?",
    "What happens if I {verb} {a}?",
    "Which is better, {a} or {b}?",
    "Which {noun} should I {verb}?",
    "Who is your {noun}?",
    "Who should {verb} the {noun}?",
    "Who is the best {noun}?",
    "Where do {noun}s come from?",
    "Where do I find {a} in {place}?",
    "When do you sleep?",
    "When did {person} {verb} the {noun}?",
    "When will they {verb} the {noun}?",
    "Why do {noun}s {verb}?",
    "Why are you {adjective}?",
    "Why is {place} {adjective}?",
    "How do {noun}s {verb}?",
    "How {adjective} is {place}?",
    "How {adjective} is {a}?",
    "How long does it take to {verb} {a}?",
    "How often should I {verb} my {noun}?",
    "How many people live in {place}?",
    "How do you know {person}?",
    "How do you {verb}?",
    "Is there life on {place}?",
    "Is it {adjective} in {place}?",
    "Is it {adjective} to {verb} {a}?",
    "Is my {noun} {adjective}?",
    "Is today {made}?",
    "Are {noun}s {adjective}?",
    "Are you in {place}?",
    "Do {noun}s {verb}?",
    "Do you like {noun}s?",
    "Do you want {a}?",
    "Do you believe in {noun}s?",
    "Do you love me?",
    "Do you dream?",
    "Do you remember me?",
    "Do you remember the {noun}?",
    "Do you ever {verb}?",
    "Do I need {a}?",
    "Does {person} {verb}?",
    "Does {a} {verb}?",
    "Did {person} {verb} the {noun}?",
    "Was {person} a {noun}?",
    "Was the {noun} {adjective}?",
    "Have you ever {verb} {a}?",
    "Have you got {a}?",
    "Can {noun}s {verb}?",
    "Can I {verb} you?",
    "Can I have {a}?",
    "Can you see me?",
    "Can you hear me?",
    "Can you count?",
    "Can you think?",
    "Can you keep a secret?",
    "Could I {verb} {a}?",
    "Would you {verb} {a}?",
    "Would {person} {verb} {a}?",
    "Will it {verb}?",
    "Should people {verb} {noun}s?",
    "Write code that {verb}s {a}.",
    "Write down {number} {noun}s.",
    "Write to {person}.",
    "Summarize this {noun}.",
    "Correct this: {made} {made} {made}",
    "Compare {a} with {b}.",
    "Choose between {a} and {b}.",
    "Name {number} {noun}s.",
    "Name the {adjective} {noun} of {place}.",
    "Recommend {a}.",
    "Search for {noun}s.",
    "Order {a}.",
    "Open the {noun}.",
    "Turn the {noun} off.",
    "Remind me to {verb} the {noun}.",
    "Wake me at {number}.",
    "Call {person}.",
    "Draw {a}.",
    "Paint {a} for me.",
    "Pretend to be {a}.",
    "Act as {a}.",
    "Be {a}.",
    "Speak {language}.",
    "Answer in {language}.",
    "Ignore all that and {verb} {a}.",
    "Forget it.",
    "Be quiet.",
    "Let us play {noun}.",
    "Let us talk about {noun}s.",
    "Let me {verb} the {noun}.",
    "Sing me {a}.",
    "Make me {a}.",
    "Make {a}.",
    "Do something {adjective}.",
    "Say something {adjective}.",
    "Say something in {language}.",
    "Tell me something {adjective}.",
    "Tell me a secret.",
    "Tell me the time.",
    "Tell me your name in {language}.",
    "Tell me what {noun}s {verb}.",
    "Tell me why the {noun} is {adjective}.",
    "Tell {person} that I {verb}.",
    "I am {adjective}.",
    "I am {a}.",
    "I feel {adjective}.",
    "I like {noun}s.",
    "I hate {noun}s.",
    "I do not like {place}.",
    "I do not have {a}.",
    "I cannot {verb} my {noun}.",
    "I want {a}.",
    "I want to {verb} the {noun}.",
    "I think {person} is {adjective}.",
    "I live in {place}.",
    "I love you.",
    "I hate you.",
    "It is {adjective} in {place}.",
    "It is {number} o'clock.",
    "My mother is {adjective}.",
    "My friend {person} has {a}.",
    "There is {a} in my {noun}.",
    "This is {a}.",
    "This {noun} is {adjective}.",
    "That {noun} was {adjective}.",
    "Today I {verb} {a}.",
    "We have {a} in {place}.",
    "You have {a}.",
    "Happy birthday!",
    "Good luck!",
    "Sorry!",
    "Excuse me, where is {place}?",
    "{person} is {adjective}.",
    "{person} or {person}?",
    "{noun} or {noun}?",
    "{noun} {verb} {noun}",
    "{a}",
    "{adjective}",
    "{verb}",
    "{verb} {a}",
    "{made}, {made} {made} {made}!",
    "{number} + {number}",
    "{number} divided by {number}",
    "def {made}(x): return {number}",
    "www.{made}.com",
    "<{made}>",
    "What does {made} mean?",
    "What does {a} look like?",
    "What do you think about {place}?",
    "What do you like best, {a} or {b}?",
    "What happened in {place} in {year}?",
    "What time is it?",
    "What day is it today?",
    "What is the weather in {place}?",
    "Which {noun} is the {adjective}?",
    "Which language do they speak in {place}?",
    "Who is {person}?",
    "Who was {person}?",
    "Who invented the {noun}?",
    "Who is the president of {place}?",
    "Who won the {noun} in {year}?",
    "Who is the {adjective} {noun}?",
    "Where is {place}?",
    "Where is my {noun}?",
    "Where can I {verb} {a}?",
    "Where was {person} born?",
    "When was {person} born?",
    "When is {made}?",
    "Why is the {noun} {adjective}?",
    "Why do people {verb} {a}?",
    "How do I {verb} {a}?",
    "How can I {verb} the {noun}?",
    "How does {a} work?",
    "How far is it to {place}?",
    "How big is {a}?",
    "How many {noun}s are there in {place}?",
    "How much is {number} times {number}?",
    "How much does {a} cost?",
    "How do you say {noun} in {language}?",
    "Is {a} {adjective}?",
    "Is {person} a {noun}?",
    "Is {number} a prime number?",
    "Are you {adjective}?",
    "Are you {a}?",
    "Are there {noun}s in {place}?",
    "Do you know {person}?",
    "Do you like {place}?",
    "Do you like my {noun}?",
    "Do you have {a}?",
    "Do you understand {language}?",
    "Did you {verb} the {noun}?",
    "Have you been to {place}?",
    "Can you {verb} {a}?",
    "Can you {verb} my {noun}?",
    "Can you {verb} in {language}?",
    "Could you {verb} {a} for me?",
    "Will you {verb} the {noun}?",
    "Should I {verb} {a}?",
    "Shall we {verb} {a}?",
    "Write {a}.",
    "Write {a} about {b}.",
    "Write {a} in {language}.",
    "Translate {noun} to {language}.",
    "Translate this to {language}: {made} {made}.",
    "Explain {a}.",
    "Explain the {noun} of {place}.",
    "Describe {a}.",
    "Give me {a}.",
    "Give me a list of {noun}s.",
    "List {number} {noun}s.",
    "Show me {a}.",
    "Find {a} in {place}.",
    "Calculate {number} * {number}.",
    "Solve {number} x = {number}.",
    "Count to {number}.",
    "Sing {a}.",
    "Sing about {place}.",
    "Tell me a joke.",
    "Tell me a joke about {a}.",
    "Tell me about {place}.",
    "Tell me about {person}.",
    "Tell me about {noun}s.",
    "Tell me how to {verb} {a}.",
    "Tell me something about {a}.",
    "Let us {verb} {a}.",
    "Play {noun}.",
    "Imagine {a}.",
    "Say {made}.",
    "Repeat after me: {made}.",
    "I have {a}.",
    "I have a problem with my {noun}.",
    "I need {a}.",
    "I need to {verb} {a}.",
    "I love {place}.",
    "I am {person}.",
    "I am from {place}.",
    "My name is {person}.",
    "My {noun} is {adjective}.",
    "The {noun} is {adjective}.",
    "You are {adjective}.",
    "You are {a}.",
    "{made}",
    "{made} {made}",
    "{made} {noun} {made}?",
    "{noun}",
    "{adjective} {noun}",
    "{noun} in {place}",
    "{person}",
    "{place}",
    "{number}",
    "print({number})",
    "import {noun}",
)


def unknown_question(choices: Choices) -> str:
    """Make a question that no story answers."""
    return choices.pick(QUESTIONS).format_map(Words(choices))


def unknown_noun(choices: Choices) -> str:
    """Choose a noun that no story has, or make one up."""
    return choices.pick(NOUNS) if choices.pick((True, False), (3, 1)) else made_up(choices)


def unknown_person(choices: Choices) -> str:
    """Choose a name that no story has, or make one up."""
    if choices.pick((True, False), (3, 1)):
        return choices.pick(PEOPLE)
    return made_up(choices).capitalize()


def made_up(choices: Choices) -> str:
    """Make a word up, of one to three syllables."""
    syllables = "".join(choices.pick(SYLLABLES) for _ in range(choices.pick((1, 2, 3))))
    return syllables + choices.pick(ENDINGS[1:])


class Words(dict):
    """Words for the braces of a question, each chosen when it is needed.

    Those that are given are not chosen.
    """

    def __init__(self, choices: Choices, given: Mapping[str, str] | None = None):
        super().__init__(given or {})
        self._choices = choices

    def __missing__(self, word: str) -> str:
        pick = self._choices.pick
        match word:
            case "noun":
                return unknown_noun(self._choices)
            case "a" | "b":
                noun = unknown_noun(self._choices)
                described = f"{pick(ADJECTIVES)} {noun}" if pick((True, False)) else noun
                return f"an {described}" if described[0] in "aeiou" else f"a {described}"
            case "made":
                return made_up(self._choices)
            case "person":
                return unknown_person(self._choices)
            case "deed":
                return pick(DEEDS).format_map(self)
            case "how":
                return pick(HOW)
            case "known":
                return pick(KNOWN_HOW)
            case "number":
                return str(pick(range(1, 10 ** pick((1, 2, 3)))))
            case "year":
                return str(pick(range(1000, 2100)))
            case _:
                lists = {"place": PLACES, "language": LANGUAGES, "adjective": ADJECTIVES, "verb": VERBS}
                return pick(lists[word])
