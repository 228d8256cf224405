"""Chat and recall samples: conversations in the XTML layout, and NAME = VALUE lists with questions about them.

A conversation is a list of segments: ints are control ids, strings are ordinary text.
"""

import json
import random
import re

from training.bpe import CLOSE, END_OF_MESSAGE, OPEN, SEPARATOR
from training.library_items import Item

Segments = list[int | str]
QuestionAnswer = tuple[str, str]

WORDS = [
    "apple", "bridge", "cat", "delta", "engine", "forest", "garden", "hammer", "island", "jungle", "kernel", "ladder",
    "mirror", "needle", "ocean", "pencil", "queue", "river", "stone", "tower", "umbrella", "valley", "window",
    "yellow", "zebra", "anchor", "basket", "candle", "dragon", "eagle", "falcon", "guitar", "harbor", "insect",
    "jacket", "kettle", "lemon", "marble", "napkin", "orange", "parrot", "quartz", "rabbit", "silver", "ticket",
    "urchin", "violet", "walnut", "copper", "planet", "rocket", "signal", "tunnel", "cotton", "button", "python",
    "string", "module", "buffer", "packet", "vector", "matrix", "socket", "thread", "cache", "token", "server",
    "client",
]  # fmt: skip
NAMES = [
    "Ada", "Alan", "Grace", "Guido", "Tim", "Barbara", "Edsger", "Donald", "Linus", "Ken", "Dennis", "Margaret",
    "Niklaus", "John", "Leslie", "Radia", "Frances", "Bjarne",
]  # fmt: skip
CITIES = ["Paris", "Berlin", "Tokyo", "Madrid", "Oslo", "Cairo", "Lima", "Seoul", "Rome", "Delhi"]
EFFORT = (
    "`thinking_effort` guides how much to think in the thinking channel. "
    "The system is now invoked with `thinking_effort={}`."
)
TOOLS = {
    "add": ("Add two numbers.", {"a": "number", "b": "number"}),
    "multiply": ("Multiply two numbers.", {"a": "number", "b": "number"}),
    "get_weather": ("Get the current weather.", {"city": "string"}),
    "lookup": ("Look up a Python object.", {"name": "string"}),
}


class Chat:
    """One conversation under construction."""

    def __init__(self) -> None:
        self.segments: Segments = []

    def _open(self, tag: str) -> None:
        self.segments += [OPEN, tag, SEPARATOR]

    def _close(self, tag: str) -> None:
        self.segments += [CLOSE, tag, SEPARATOR]

    def say(self, role: str, text: str, attributes: str = "") -> None:
        self._open(f'message role="{role}"{attributes}')
        self.segments.append(text)
        self._close("message")
        self.segments.append(END_OF_MESSAGE)

    def answer(
        self, text: str, think: str | None = None, call: tuple[str, dict[str, tuple[str, str]]] | None = None
    ) -> None:
        self._open('message role="assistant"')
        if think is not None:
            self._open("think")
            self.segments.append(think)
            self._close("think")
        self._open("response")
        self.segments.append(text)
        self._close("response")
        if call is not None:
            name, arguments = call
            self._open("tools")
            self._open(f'call tool="{name}" index="1"')
            for key, (kind, value) in arguments.items():
                self._open(f'argument key="{key}" type="{kind}"')
                self.segments.append(value)
                self._close("argument")
            self._close("call")
            self._close("tools")
        self._close("message")
        self.segments.append(END_OF_MESSAGE)


def chats(count: int, items: list[Item], draw: random.Random) -> list[Segments]:
    """`count` conversations of more than 20 characters: 88 % plain, 7 % with thinking, 5 % with a tool call."""
    made: list[Segments] = []
    while len(made) < count:
        kind = draw.random()
        chat = plain_chat(draw, items) if kind < 0.88 else think_chat(draw) if kind < 0.95 else tool_chat(draw, items)
        if sum(len(part) for part in chat.segments if isinstance(part, str)) > 20:
            made.append(chat.segments)
    return made


def plain_chat(draw: random.Random, items: list[Item]) -> Chat:
    chat, kind = Chat(), draw.random()
    if draw.random() < 0.25:
        systems = ["You are a helpful assistant.", "You are a Python expert.", "Answer briefly."]
        chat.say("system", draw.choice([*systems, "You are Kimi, a small assistant."]))
    if kind < 0.62:
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            pairs = item_questions(draw.choice(items), draw)
            if pairs:
                question, answer = draw.choice(pairs)
                chat.say("user", question)
                chat.answer(answer)
    elif kind < 0.78:
        for _ in range(draw.choice([1, 1, 2, 3])):
            _ask_arithmetic(chat, draw)
    elif kind < 0.9:
        for _ in range(draw.choice([1, 2, 3])):
            question, answer = string_question(draw)
            chat.say("user", question)
            chat.answer(answer)
    elif kind < 0.96:
        _memory_chat(chat, draw)
    else:
        chat.say("user", draw.choice(["Hello", "Hi", "Hello!", "Hi there", "Good morning"]))
        chat.answer("Hello, how can I help you?")
        chat.say("user", draw.choice(["Who are you?", "What can you do?", "What are you?"]))
        chat.answer("I am a very small language model. I know a little about Python.")
    return chat


def _ask_arithmetic(chat: Chat, draw: random.Random) -> None:
    question, steps, result = arithmetic(draw)
    chat.say("user", question)
    chat.answer(f"{steps}\nThe answer is {result}.")


def _memory_chat(chat: Chat, draw: random.Random) -> None:
    name, thing, number = draw.choice(NAMES), draw.choice(WORDS), draw.randint(10, 9999)
    chat.say("user", draw.choice([f"My name is {name}.", f"Hi, I am {name}."]))
    chat.answer(f"Hello {name}, how can I help you?")
    chat.say("user", f"Remember: the {thing} has the number {number}.")
    chat.answer(f"I will remember that the {thing} has the number {number}.")
    if draw.random() < 0.6:
        _ask_arithmetic(chat, draw)
    for _ in range(2):
        if draw.random() < 0.5:
            chat.say("user", "What is my name?")
            chat.answer(f"Your name is {name}.")
        else:
            chat.say("user", f"Which number has the {thing}?")
            chat.answer(f"The {thing} has the number {number}.")


def think_chat(draw: random.Random) -> Chat:
    chat = Chat()
    chat.say("system", EFFORT.format(draw.choice(["low", "high", "max"])))
    for _ in range(draw.choice([1, 1, 2])):
        if draw.random() < 0.7:
            question, steps, result = arithmetic(draw)
            chat.say("user", question)
            chat.answer(f"The answer is {result}.", steps)
        else:
            question, answer = string_question(draw)
            chat.say("user", question)
            chat.answer(answer.rsplit("\n", 1)[-1], answer if "\n" in answer else "This is easy.")
    return chat


def tool_chat(draw: random.Random, items: list[Item]) -> Chat:
    chat, names = Chat(), draw.sample(sorted(TOOLS), draw.randint(1, 4))
    name = draw.choice(names)
    chat.say("system", _declare(names), ' type="tool-declare"')
    thinking = draw.random() < 0.5
    if thinking:
        chat.say("system", EFFORT.format(draw.choice(["low", "high", "max"])))
    if name in ("add", "multiply"):
        a, b = draw.randint(2, 9999), draw.randint(2, 9999)
        question = f"Use the tool to {name} {a} {'and' if name == 'add' else 'by'} {b}."
        arguments, result = {"a": ("number", str(a)), "b": ("number", str(b))}, str(a + b if name == "add" else a * b)
        final = f"The result is {result}."
    elif name == "get_weather":
        city = draw.choice(CITIES)
        result = draw.choice(["sunny", "rainy", "cloudy", "windy"]) + f", {draw.randint(-5, 35)} degrees"
        question = draw.choice([f"What is the weather in {city}?", f"How is the weather in {city} today?"])
        arguments, final = {"city": ("string", city)}, f"In {city} it is {result}."
    else:
        item = draw.choice(items)
        question, arguments = f"Look up {item.name}.", {"name": ("string", item.name)}
        result = final = " ".join((item.doc or item.signature or "").split())[:160]
    chat.say("user", question)
    chat.answer("", f"I should call {name}." if thinking else None, (name, arguments))
    chat.say("tool", result, f' tool="{name}" index="1"')
    chat.answer(final, "The tool has answered." if thinking else None)
    return chat


def _declare(names: list[str]) -> str:
    declared = [
        {
            "function": {
                "description": TOOLS[name][0],
                "name": name,
                "parameters": {
                    "properties": {key: {"type": kind} for key, kind in TOOLS[name][1].items()},
                    "required": list(TOOLS[name][1]),
                    "type": "object",
                },
            },
            "type": "function",
        }
        for name in names
    ]
    text = json.dumps(declared, sort_keys=True, separators=(",", ":"))
    return f"# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{text}\n```"


def item_questions(item: Item, draw: random.Random) -> list[QuestionAnswer]:
    """Questions about a documented name, with answers."""
    name, kind, doc = item.name, item.kind, item.doc
    short = name.split(".", 1)[1] if name.count(".") > 1 and draw.random() < 0.3 else name
    pairs: list[QuestionAnswer] = []
    if doc:
        line = " ".join(re.split(r"\n\s*\n", doc.strip())[0].split())
        if 8 < len(line) < 420:
            pairs.append((_ask_about(short, kind, draw), _prefix(short, kind, draw) + line))
            owner = name.rsplit(".", 1)[0]
            if kind in ("function", "class") and "." in name and len(line) < 160:
                asked = [f"Which {kind} of {owner} has this description: {line}"]
                pairs.append(
                    (draw.choice([*asked, f"Name the {kind} in {owner} that fits: {line}"]), f"That is `{name}`.")
                )
        if 20 < len(doc) < 900:
            asked = [f"Write the docstring of {short}.", f"Show the docstring of `{short}`."]
            asked += [f"Give me the full documentation of {short}.", f"help({short})"]
            pairs.append((draw.choice(asked), draw.choice([f'"""{doc}"""', doc])))
    if item.signature and len(item.signature) < 300:
        asked = [f"What is the signature of {short}?", f"How is {short} declared?"]
        asked += [f"Show me how {short} is defined.", f"Which arguments does {short} take?"]
        pairs.append((draw.choice(asked), f"```python\n{item.signature}\n```"))
    if item.code:
        asked = [f"Show the source of {short}.", f"Write the {kind} {short}."]
        asked += [f"How is {short} implemented?", f"Implement {short} in Python."]
        pairs.append((draw.choice(asked), f"```python\n{item.code}\n```"))
    if kind != "module" and "." in name and draw.random() < 0.15:
        pairs.append((f"Is {short} a function, a method or a class?", f"`{short}` is a {kind}."))
    return pairs


def _ask_about(short: str, kind: str, draw: random.Random) -> str:
    return draw.choice(
        [
            f"What does {short} do?",
            f"What does `{short}` do?",
            f"What is {short} for?",
            f"Explain {short} in short.",
            f"Tell me about {short}.",
            f"Summarise the {kind} {short}.",
            f"I found {short} in some code. What is it?",
            f"what does {short} do",
            f"Describe {short}.",
        ]
    )


def _prefix(short: str, kind: str, draw: random.Random) -> str:
    return draw.choice(["", "", f"`{short}`: ", f"{short} is a {kind}. "])


def arithmetic(draw: random.Random) -> tuple[str, str, int]:
    """Question, steps, result."""
    kind = draw.random()
    if kind < 0.35:
        a, b = draw.randint(2, 999), draw.randint(2, 999)
        asked = [f"What is {a} + {b}?", f"Add {a} and {b}.", f"Compute {a} + {b}.", f"{a} + {b} = ?"]
        tens_a, tens_b, ones = a // 10 * 10, b // 10 * 10, a % 10 + b % 10
        steps = (
            f"{a} = {tens_a} + {a % 10} and {b} = {tens_b} + {b % 10}.\n{tens_a} + {tens_b} = {tens_a + tens_b}.\n"
            f"{a % 10} + {b % 10} = {ones}.\n{tens_a + tens_b} + {ones} = {a + b}."
        )
        return draw.choice(asked), steps, a + b
    if kind < 0.55:
        a, b = sorted((draw.randint(2, 999), draw.randint(2, 999)), reverse=True)
        asked = [f"What is {a} - {b}?", f"Subtract {b} from {a}.", f"Compute {a} - {b}."]
        tens = b // 10 * 10
        steps = f"{b} = {tens} + {b % 10}.\n{a} - {tens} = {a - tens}.\n{a - tens} - {b % 10} = {a - b}."
        return draw.choice(asked), steps, a - b
    if kind < 0.8:
        a, b = draw.randint(2, 99), draw.randint(2, 12)
        asked = [f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"Compute {a} times {b}."]
        tens = a // 10 * 10
        steps = (
            f"{a} = {tens} + {a % 10}.\n{tens} * {b} = {tens * b}.\n{a % 10} * {b} = {a % 10 * b}.\n"
            f"{tens * b} + {a % 10 * b} = {a * b}."
        )
        return draw.choice(asked), steps, a * b
    b, result = draw.randint(2, 12), draw.randint(2, 30)
    a = b * result
    return (
        draw.choice([f"What is {a} / {b}?", f"Divide {a} by {b}."]),
        f"{b} * {result} = {a}, so {a} / {b} = {result}.",
        result,
    )


def string_question(draw: random.Random) -> QuestionAnswer:
    letters = "abcdefghijklmnopqrstuvwxyz"
    word = draw.choice(WORDS) if draw.random() < 0.7 else "".join(draw.choices(letters, k=draw.randint(3, 7)))
    kind = draw.randrange(7)
    if kind == 0:
        steps = (
            f"The letters are {', '.join(word)}.\nBackwards: {', '.join(word[::-1])}.\nThe answer is '{word[::-1]}'."
        )
        return draw.choice([f"Reverse the word '{word}'.", f"What is '{word}' backwards?"]), steps
    if kind == 1:
        counted = ", ".join(f"{letter} {index}" for index, letter in enumerate(word, 1))
        asked = draw.choice([f"How many letters has '{word}'?", f"What is len('{word}')?"])
        return asked, f"Counting: {counted}.\nThe answer is {len(word)}."
    if kind == 2:
        return draw.choice([f"Write '{word}' in upper case.", f"What is '{word}'.upper()?"]), f"'{word.upper()}'"
    if kind == 3:
        index = draw.randrange(len(word))
        listed = ", ".join(f"{at} {letter}" for at, letter in enumerate(word))
        return f"What is '{word}'[{index}]?", f"Indices: {listed}.\nThe answer is '{word[index]}'."
    if kind == 4:
        numbers = draw.sample(range(1, 100), draw.randint(3, 6))
        return draw.choice([f"Sort these numbers: {numbers}", f"What is sorted({numbers})?"]), f"{sorted(numbers)}"
    if kind == 5:
        words = draw.sample(WORDS, draw.randint(2, 5))
        return f"Sort these words: {', '.join(words)}", ", ".join(sorted(words))
    first, count = draw.randint(1, 30), draw.randint(3, 8)
    return f"What is list(range({first}, {first + count}))?", f"{list(range(first, first + count))}"


def recall(draw: random.Random, filler: list[str]) -> str:
    """NAME = VALUE lines, perhaps a stretch of other text, then questions with answers."""
    style, count = draw.randrange(4), draw.randint(3, 24)
    table: dict[str, str] = {}
    while len(table) < count:
        if style < 2:
            name = f"{draw.choice(WORDS)}_{draw.choice(WORDS)}"
        else:
            name = f"{draw.choice(WORDS)}{draw.randint(1, 99)}".upper()
        table[name] = str(draw.randint(100, 99999)) if draw.random() < 0.6 else repr(draw.choice(WORDS))
    mark = ">>> " if style == 3 else ""
    text = ("# settings\n", "", "Table of values:\n\n", "")[style]
    text += "".join(f"{mark}{name} = {value}\n" for name, value in table.items())
    if draw.random() < 0.5:
        text += f"\n{draw.choice(filler)}\n"
    text += ("\n# questions\n", "\n", "\nQuestions:\n\n", "")[style]
    form = ("What is {}? {}\n", "assert {} == {}\n", "{}: {}\n", ">>> {}\n{}\n")[style]
    for name in [draw.choice(list(table)) for _ in range(draw.randint(4, 24))]:
        text += form.format(name, table[name])
    return text
