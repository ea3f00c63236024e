"""Words and questions from outside the stories, which the storyteller declines.

The person's words cost the model nothing, so they are as varied as they can be: nouns that no story has, words that
are made up, numbers, and questions of many kinds around them.
"""

from training.stories.choices import Choices

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
    "Where do you live?",
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
    return choices.pick(QUESTIONS).format_map(_Words(choices))


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


class _Words(dict):
    """Words for the braces of a question, each chosen when it is needed."""

    def __init__(self, choices: Choices):
        super().__init__()
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
            case "number":
                return str(pick(range(1, 10 ** pick((1, 2, 3)))))
            case "year":
                return str(pick(range(1000, 2100)))
            case _:
                lists = {"place": PLACES, "language": LANGUAGES, "adjective": ADJECTIVES, "verb": VERBS}
                return pick(lists[word])
