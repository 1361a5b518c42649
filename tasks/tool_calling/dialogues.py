"""Small tool-use dialogues, made here: one call, several, after earlier turns, from a tool's result, and none.

Every value that a call needs stands in the dialogue, in the form in which the call needs it, so that exactly one set of
calls is right (except for optional arguments that equal their default).
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from verl_tasks import tool_calls

# fmt: off
CITIES = [
    "Oslo", "Lima", "Rome", "Cairo", "Paris", "Tokyo", "Delhi", "Quito", "Berlin", "Madrid", "Lisbon",
    "Dublin", "Vienna", "Prague", "Warsaw", "Athens",
]
PEOPLE = [
    "Ann", "Ben", "Carla", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo", "Mia", "Nils",
    "Olga", "Paul", "Rosa", "Sam", "Tina", "Uwe",
]
ROOMS = ["kitchen", "hall", "office", "bedroom", "garage", "attic", "cellar", "studio"]
CURRENCIES = ["USD", "EUR", "GBP", "JPY", "NOK", "CHF"]
LANGUAGES = ["German", "French", "Spanish", "Italian", "Polish"]
FOODS = [
    "rice", "eggs", "tofu", "beans", "leeks", "kale", "pasta", "corn", "lentils", "carrots", "potatoes",
    "mushrooms",
]
GOODS = ["pens", "mugs", "lamps", "towels", "candles", "folders", "batteries", "notebooks"]
STOCKS = ["ACME", "BOLT", "CRUX", "DYNE", "ECHO", "FLUX", "GRID", "HELM"]
ARTISTS = ["Abba", "Bach", "Blur", "Cher", "Coldplay", "Dvorak", "Elgar", "Mozart", "Muse", "Nirvana", "Queen", "Sade"]
NOTES = [
    "good morning", "see you soon", "where are you", "thank you", "happy birthday", "the train is late",
    "call me back",
]
# fmt: on

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": name} for name in ("string", "integer", "number", "boolean"))
STRINGS = {"type": "array", "items": STRING}


Ask = Callable[[random.Random], tuple[str, dict]]
Result = Callable[[random.Random], dict]


@dataclass(frozen=True)
class Tool:
    """A function: its schema, ``ask`` for a request in words with the arguments that it needs, and a ``result``."""

    name: str
    description: str
    properties: dict[str, dict]
    ask: Ask
    result: Result

    def schema(self) -> dict:
        """OpenAI's schema; an argument without a default is required."""
        required = [name for name, value in self.properties.items() if "default" not in value]
        parameters = {"type": "object", "properties": self.properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def tool(
    name: str, description: str, properties: dict[str, dict], result: Result = lambda rng: {"status": "ok"}
) -> Callable[[Ask], Tool]:
    """Decorator: the Tool ``name`` that is asked for as the function says."""
    return lambda ask: Tool(name, description, properties, ask, result)


@dataclass(frozen=True)
class Dialogue:
    """Messages up to the assistant's turn, its tools, the right ``calls`` (none: ``text`` is the answer)."""

    messages: list[dict]
    tools: list[dict]
    calls: list[dict]
    thought: str
    text: str = ""

    def demonstration(self, thinking: bool) -> str:
        """The response that a model should write."""
        return (f"<think>{self.thought}</think>\n" if thinking else "") + (
            tool_calls.render_calls(self.calls) or self.text
        )


def _forecast(rng: random.Random) -> dict:
    return {"celsius": rng.randint(-9, 35), "sky": rng.choice(["clear", "rain", "snow"])}


@tool("weather", "Forecast for a city", {"city": STRING, "days": {**INTEGER, "default": 1}}, _forecast)
def WEATHER(rng: random.Random) -> tuple[str, dict]:
    city, days = rng.choice(CITIES), rng.randint(2, 9)
    today = f"What is the weather in {city}?", {"city": city}
    return rng.choice([today, (f"How will the weather in {city} be for {days} days?", {"city": city, "days": days})])


def _cents(field: str) -> Callable[[random.Random], dict]:
    """A result whose ``field`` is an amount of money."""
    return lambda rng: {field: rng.randint(100, 99_999) / 100}


@tool("convert", "Convert money", {"amount": NUMBER, "source": STRING, "target": STRING}, _cents("amount"))
def CONVERT(rng: random.Random) -> tuple[str, dict]:
    amount = rng.choice([rng.randint(2, 900), rng.randint(11, 9999) / 10])
    source, target = rng.sample(CURRENCIES, 2)
    return f"Convert {amount} {source} to {target}.", {"amount": amount, "source": source, "target": target}


@tool("set_alarm", "Set an alarm", {"time": STRING, "daily": {**BOOLEAN, "default": False}})
def ALARM(rng: random.Random) -> tuple[str, dict]:
    time = f"{rng.randint(5, 22):02d}:{rng.choice(['00', '15', '30', '45'])}"
    if rng.random() < 0.5:
        return f"Wake me at {time} every day.", {"time": time, "daily": True}
    return f"Set an alarm for {time}.", {"time": time}


@tool("send_message", "Send a text message", {"to": STRING, "text": STRING})
def MESSAGE(rng: random.Random) -> tuple[str, dict]:
    person, text = rng.choice(PEOPLE), rng.choice(NOTES)
    return f'Send {person} the message "{text}".', {"to": person, "text": text}


@tool("set_light", "Switch a light", {"room": STRING, "on": BOOLEAN, "percent": {**INTEGER, "default": 100}})
def LIGHT(rng: random.Random) -> tuple[str, dict]:
    room, percent = rng.choice(ROOMS), rng.randrange(5, 100, 5)
    dimmed = {"room": room, "on": True, "percent": percent}
    on, off = ((f"Turn the {room} light {word}.", {"room": room, "on": word == "on"}) for word in ("on", "off"))
    return rng.choice([off, on, (f"Turn the {room} light on at {percent} %.", dimmed)])


@tool("order", "Order from the shop", {"item": STRING, "count": {**INTEGER, "default": 1}})
def ORDER(rng: random.Random) -> tuple[str, dict]:
    item, count = rng.choice(GOODS), rng.randint(2, 60)
    return f"Order {count} {item}.", {"item": item, "count": count}


def _price(rng: random.Random) -> dict:
    return {"price": rng.randint(1000, 99_999) / 100, "currency": "USD"}


@tool("price", "Price of a stock", {"symbol": STRING}, _price)
def STOCK(rng: random.Random) -> tuple[str, dict]:
    symbol = rng.choice(STOCKS)
    return f"What is the price of {symbol}?", {"symbol": symbol}


LANGUAGE = {**STRING, "enum": LANGUAGES}


@tool("translate", "Translate a text", {"text": STRING, "language": LANGUAGE}, lambda rng: {"text": "..."})
def TRANSLATE(rng: random.Random) -> tuple[str, dict]:
    text, language = rng.choice(NOTES), rng.choice(LANGUAGES)
    return f'Translate "{text}" into {language}.', {"text": text, "language": language}


def _dishes(rng: random.Random) -> dict:
    return {"recipes": [f"{rng.choice(FOODS)} {dish}" for dish in ("soup", "salad")]}


@tool("recipes", "Recipes with these foods", {"foods": STRINGS, "minutes": {**INTEGER, "default": 60}}, _dishes)
def RECIPES(rng: random.Random) -> tuple[str, dict]:
    foods, minutes = rng.sample(FOODS, rng.randint(1, 3)), rng.randrange(10, 60, 5)
    words = f"Find recipes with {' and '.join(foods)}"
    if rng.random() < 0.5:
        return f"{words}.", {"foods": foods}
    return f"{words} that take at most {minutes} minutes.", {"foods": foods, "minutes": minutes}


@tool("play", "Play music", {"artist": STRING, "shuffle": {**BOOLEAN, "default": False}})
def MUSIC(rng: random.Random) -> tuple[str, dict]:
    artist = rng.choice(ARTISTS)
    if rng.random() < 0.5:
        return f"Play {artist}, shuffled.", {"artist": artist, "shuffle": True}
    return f"Play {artist}.", {"artist": artist}


@tool("meeting", "Plan a meeting", {"guests": STRINGS, "day": STRING})
def MEETING(rng: random.Random) -> tuple[str, dict]:
    guests, day = rng.sample(PEOPLE, rng.randint(1, 2)), f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return f"Plan a meeting with {' and '.join(guests)} on {day}.", {"guests": guests, "day": day}


@tool("loan", "Monthly payment of a loan", {"amount": NUMBER, "rate": NUMBER, "years": INTEGER}, _cents("payment"))
def LOAN(rng: random.Random) -> tuple[str, dict]:
    amount, rate, years = rng.randint(1, 90) * 1000, rng.randint(11, 79) / 10, rng.randint(2, 30)
    words = f"What does a loan of {amount} at {rate} percent over {years} years cost a month?"
    return words, {"amount": amount, "rate": rate, "years": years}


def _phone(rng: random.Random) -> dict:
    return {"phone": f"+47{rng.randint(10_000_000, 99_999_999)}"}


@tool("contact", "Phone number of a person", {"name": STRING}, _phone)
def CONTACT(rng: random.Random) -> tuple[str, dict]:
    person = rng.choice(PEOPLE)
    return f"What is the number of {person}?", {"name": person}


TOOLS = [
    WEATHER, CONVERT, ALARM, MESSAGE, LIGHT, ORDER, STOCK, TRANSLATE, RECIPES, MUSIC, MEETING, LOAN, CONTACT
]  # fmt: skip
# Two calls of these with one argument each are at most 64 tokens of SmolLM2.
SHORT = [WEATHER, STOCK, MUSIC, CONTACT]


@dataclass(frozen=True)
class Difficulty:
    """Limits of the generated dialogues."""

    tools: int  # in a dialogue
    calls: int  # at once
    arguments: int  # of each of several calls
    repeated: list[Tool]  # for several calls and for earlier turns
    kinds: dict[str, int]  # weights


DIFFICULTIES = {
    "easy": Difficulty(2, 2, 1, SHORT, {"one": 50, "several": 20, "later": 15, "none": 15}),
    "hard": Difficulty(6, 3, 3, TOOLS, {"one": 25, "several": 30, "later": 15, "chained": 15, "none": 15}),
}


def dialogues(rng: random.Random, difficulty: str) -> Iterator[Dialogue]:
    """An endless stream of dialogues; repeats occur."""
    level = DIFFICULTIES[difficulty]
    makers = {"one": _one, "several": _several, "later": _later, "chained": _chained, "none": _none}
    while True:
        (kind,) = rng.choices(list(level.kinds), list(level.kinds.values()))
        yield makers[kind](rng, level)


def _one(rng: random.Random, level: Difficulty) -> Dialogue:
    tool = rng.choice(TOOLS)
    words, arguments = tool.ask(rng)
    return _dialogue(rng, level, [_user(words)], [(tool, arguments)])


def _several(rng: random.Random, level: Difficulty) -> Dialogue:
    """Calls at once: of one function with different arguments, or of different ones."""
    count = rng.randint(2, level.calls)
    while True:
        tools = [rng.choice(level.repeated)] * count if rng.random() < 0.5 else rng.sample(level.repeated, count)
        requests = [(tool, *tool.ask(rng)) for tool in tools]
        if len({words for _, words, _ in requests}) == count and all(len(r[2]) <= level.arguments for r in requests):
            break  # no request twice
    words = " ".join(words for _, words, _ in requests)
    return _dialogue(rng, level, [_user(words)], [(tool, arguments) for tool, _, arguments in requests])


def _later(rng: random.Random, level: Difficulty) -> Dialogue:
    """A second request after one that was answered."""
    tool, history = _answered(rng, level)
    second = tool if rng.random() < 0.5 else rng.choice(TOOLS)
    words, arguments = second.ask(rng)
    return _dialogue(rng, level, [*history, _user(words)], [(second, arguments)], also=tool)


def _chained(rng: random.Random, level: Difficulty) -> Dialogue:
    """The call needs what another one returned."""
    if rng.random() < 0.5:
        symbol, currency, found = rng.choice(STOCKS), rng.choice(CURRENCIES[1:]), STOCK.result(rng)
        words, first, asked = f"What is {symbol} worth in {currency}?", STOCK, {"symbol": symbol}
        second = (CONVERT, {"amount": found["price"], "source": found["currency"], "target": currency})
    else:
        person, text, found = rng.choice(PEOPLE), rng.choice(NOTES), CONTACT.result(rng)
        words, first, asked = f'Send "{text}" to the phone number of {person}.', CONTACT, {"name": person}
        second = (MESSAGE, {"to": found["phone"], "text": text})
    messages = [_user(words), _called(first, asked), _returned(first, found)]
    return _dialogue(rng, level, messages, [second], also=first)


def _none(rng: random.Random, level: Difficulty) -> Dialogue:
    """Nothing to call: no tool does what is asked, or nothing is asked."""
    if rng.random() < 0.3:
        tool, history = _answered(rng, level)
        thanks = rng.choice(["Thanks, that is all.", "Thank you!", "Great, nothing else."])
        said = {"thought": "Nothing to do.", "text": "Welcome."}
        return _dialogue(rng, level, [*history, _user(thanks)], [], also=tool, **said)
    missing = rng.choice(TOOLS)
    said = {"thought": "No tool does this.", "text": "None of my tools can do that."}
    return _dialogue(rng, level, [_user(missing.ask(rng)[0])], [], without=missing, **said)


def _answered(rng: random.Random, level: Difficulty) -> tuple[Tool, list[dict]]:
    """A request with its call, result and answer. No prompt of one turn begins so: its answer would stand here."""
    tool = rng.choice(level.repeated)
    (words, arguments), result = tool.ask(rng), tool.result(rng)
    answer = ", ".join(f"{name}: {value}" for name, value in result.items())
    said = {"role": "assistant", "content": answer}
    return tool, [_user(f"Hi! {words}"), _called(tool, arguments), _returned(tool, result), said]


def _dialogue(
    rng: random.Random,
    level: Difficulty,
    messages: list[dict],
    calls: list[tuple[Tool, dict]],
    also: Tool | None = None,
    without: Tool | None = None,
    thought: str = "",
    text: str = "",
) -> Dialogue:
    """With the tools that are called, ``also``, and others at random, in random order, never ``without``."""
    needed = {tool.name: tool for tool in [tool for tool, _ in calls] + ([also] if also else [])}
    others = [tool for tool in TOOLS if tool.name not in needed and tool is not without]
    fewest = 0 if needed else 1
    tools = [*needed.values(), *rng.sample(others, rng.randint(fewest, max(level.tools - len(needed), fewest)))]
    rng.shuffle(tools)
    counts = Counter(tool.name for tool, _ in calls)
    names = " and ".join(name if count == 1 else f"{name} {count} times" for name, count in counts.items())
    thought = thought or f"I need {names}."
    made = [{"name": tool.name, "arguments": arguments} for tool, arguments in calls]
    return Dialogue(messages, [tool.schema() for tool in tools], made, thought, text)


def _user(words: str) -> dict:
    return {"role": "user", "content": words}


def _called(tool: Tool, arguments: dict) -> dict:
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _returned(tool: Tool, result: dict) -> dict:
    return {"role": "tool", "name": tool.name, "content": json.dumps(result)}
