"""Training and test data of the demo model: seeded generators of (prompt, answer) pairs.

Every task is a pure function of a random.Random. Values are copied from the text letter by letter wherever a person
would do so (names, ids, amounts, phrases); only dates, clock times, small number words and a few states are rewritten.
Knows nothing of tokens or tensors; called by train_demo.py, demo_eval.py and the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from random import Random

import demo_words as words

Value = str | int | Decimal | dict[str, "Value"]
Record = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Sample:
    """One exchange: `prompt` is the user's turn, `answer` the only accepted reply."""

    task: str
    prompt: str
    answer: str


def render(value: Value) -> str:
    """Compact JSON that keeps a Decimal's digits (12.50 stays 12.50) and non-ASCII letters."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{render(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Decimal):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def invented(rng: Random) -> str:
    """A capitalized made-up word, so that copying does not depend on having seen the name."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def first_name(rng: Random) -> str:
    return invented(rng) if rng.random() < 0.15 else rng.choice(words.FIRST)


def last_name(rng: Random) -> str:
    return invented(rng) if rng.random() < 0.15 else rng.choice(words.LAST)


def city(rng: Random) -> str:
    return invented(rng) if rng.random() < 0.1 else rng.choice(words.CITIES)


def number(rng: Random, low_digits: int, high_digits: int) -> int:
    """Digit count first, so that short and long numbers are equally frequent."""
    digits = rng.randint(low_digits, high_digits)
    return rng.randint(10 ** (digits - 1), 10**digits - 1)


def money(rng: Random) -> Decimal:
    return Decimal(number(rng, 3, 5)).scaleb(-2)


def date(rng: Random) -> tuple[str, str]:
    """(ISO form, a way of writing it)."""
    year, month, day = rng.randint(2019, 2029), rng.randint(1, 12), rng.randint(1, 28)
    iso, name = f"{year}-{month:02d}-{day:02d}", words.MONTHS[month - 1]
    return iso, rng.choice((iso, f"{day} {name} {year}", f"{name} {day}, {year}"))


def clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def fill(rng: Random, templates: Sequence[str], **values: object) -> str:
    """A filled template, half of the time with a capital; an address is a value and keeps its letters."""
    template = rng.choice(templates)
    text = template.format(**values)
    return text if template.startswith("{email}") or rng.random() < 0.5 else text[0].upper() + text[1:]


ORDER_STATUS = {
    "open": ("open", "open", "still open"),
    "paid": ("paid", "paid", "already paid"),
    "shipped": ("shipped", "shipped", "on its way"),
    "cancelled": ("cancelled", "cancelled", "called off"),
}
PRIORITY = {
    "low": ("low priority", "low priority", "not urgent"),
    "normal": ("normal priority", "normal priority"),
    "high": ("high priority", "high priority", "urgent"),
}
ORDER_TEMPLATES = (
    "order {id} from {customer} is {state}, {prio}, total {total}{tail}",
    "{customer} placed order {id} for {total}; it is {state} and {prio}{tail}",
    "order {id}: {customer}, {total}, {state}, {prio}{tail}",
    "{state}: order no. {id}, customer {customer}, {prio}, amount {total}{tail}",
    "#{id} {customer} {total} {state} {prio}{tail}",
    "{customer} owes {total} for order {id}, which is {state} ({prio}){tail}",
    "we have an order of {total} from {customer}, number {id}, {prio}, {state}{tail}",
    "{prio} order {id} by {customer} over {total} is {state}{tail}",
)


def order(rng: Random) -> tuple[str, Record]:
    """The record of grammars/ndjson-order.gbnf."""
    status, priority = rng.choice(tuple(ORDER_STATUS)), rng.choice(tuple(PRIORITY))
    note = "" if rng.random() < 0.25 else rng.choice(words.NOTES)
    tail = rng.choice((f". Note: {note}.", f", note: {note}", f'. Notes: "{note}"', f" - {note}")) if note else "."
    record: Record = {
        "id": number(rng, 3, 5),
        "customer": f"{first_name(rng)} {last_name(rng)}",
        "status": status,
        "priority": priority,
        "total": money(rng),
        "notes": note,
    }
    state, prio = rng.choice(ORDER_STATUS[status]), rng.choice(PRIORITY[priority])
    return fill(rng, ORDER_TEMPLATES, **record, state=state, prio=prio, tail=tail), record


SALE_TEMPLATES = (
    "{customer} bought {count} {color} {thing} at {price} each on {when}.",
    "sold on {when}: {count} {color} {thing} to {customer}, {price} apiece.",
    "on {when} {customer} took {count} {color} {thing} for {price} each",
    "{count} x {color} {thing}, unit price {price}, buyer {customer}, {when}",
    "{when} - {customer} - {count} {color} {thing} - {price}",
    "please bill {customer} for {count} {color} {thing}, {price} per piece, sold {when}.",
)


def sale(rng: Random) -> tuple[str, Record]:
    quantity = rng.choice((1, rng.randint(2, 12), rng.randint(13, 99)))
    iso, when = date(rng)
    record: Record = {
        "customer": f"{first_name(rng)} {last_name(rng)}",
        "item": rng.choice(words.ITEMS),
        "color": rng.choice(words.COLORS),
        "quantity": quantity,
        "price": money(rng),
        "date": iso,
    }
    thing = f"{record['item']}s" if quantity > 1 else record["item"]
    count = words.NUMBER_WORDS[quantity] if quantity <= 12 and rng.random() < 0.4 else quantity
    return fill(rng, SALE_TEMPLATES, **record, count=count, thing=thing, when=when), record


CONTACT_TEMPLATES = (
    "you can reach {first} {last} in {city} at {phone} or {email}.",
    "{first} {last}, {city}. Phone {phone}, email {email}.",
    "contact: {last}, {first}; lives in {city}; mail {email}; tel {phone}",
    "{first} {last} moved to {city}, the new number is {phone} and the mail is {email}.",
    "write to {email} or call {phone} and ask for {first} {last} from {city}.",
    "{email} belongs to {first} {last} ({city}, {phone})",
)


def contact(rng: Random) -> tuple[str, Record]:
    first, last = first_name(rng), last_name(rng)
    local = rng.choice((f"{first}.{last}", f"{first}{rng.randint(1, 99)}", f"{first[0]}{last}", last)).lower()
    domain = rng.choice(("mail", "post", "home", "office", "inbox"))
    record: Record = {
        "first": first,
        "last": last,
        "city": city(rng),
        "phone": f"{rng.randint(200, 999)}-{rng.randint(1000, 9999)}",
        "email": f"{local}@{domain}.test",
    }
    return fill(rng, CONTACT_TEMPLATES, **record), record


LOG_TEMPLATES = (
    "{time} {level} [{service}] code={code} took {ms}ms",
    "[{level}] {service} at {time} returned {code} after {ms} ms",
    "{service}: {level} {code} ({ms} ms) {time}",
    "{time} {service} {level} status {code} in {ms} ms",
    "level={level} service={service} time={time} code={code} ms={ms}",
    "the {service} service logged {level} at {time}: code {code}, {ms} ms",
)


def log(rng: Random) -> tuple[str, Record]:
    record: Record = {
        "time": f"{clock(rng)}:{rng.randint(0, 59):02d}",
        "level": rng.choice(("DEBUG", "INFO", "WARN", "ERROR")),
        "service": rng.choice(words.SERVICES),
        "code": rng.randint(100, 599),
        "ms": number(rng, 1, 4),
    }
    return rng.choice(LOG_TEMPLATES).format(**record), record


EVENT_TEMPLATES = (
    "{kind} with {person} on {when} at {time} in {city}, {minutes} minutes.",
    "please book a {minutes}-minute {kind} with {person}, {city}, {when}, {time}.",
    "{when} {time} - {kind} ({minutes} min), {person}, {city}",
    "{person} invites you to a {kind} in {city} on {when} from {time}, for {minutes} minutes.",
    "calendar: {kind}, {when}, {time}, {minutes} min, {city}, with {person}",
    "at {time} on {when} there is a {kind} of {minutes} minutes with {person} in {city}.",
)


def event(rng: Random) -> tuple[str, Record]:
    iso, when = date(rng)
    record: Record = {
        "kind": rng.choice(words.EVENTS),
        "with": f"{first_name(rng)} {last_name(rng)}",
        "date": iso,
        "time": clock(rng),
        "city": city(rng),
        "minutes": rng.choice((10, 15, 20, 30, 45, 50, 60, 75, 90, 120)),
    }
    return fill(rng, EVENT_TEMPLATES, **record, person=record["with"], when=when), record


TICKET_TEMPLATES = (
    "ticket {ticket} from {reporter}: {problem} ({product}), {prio}.",
    "{reporter} writes about a {product}: {problem}. Ticket {ticket}, {prio}.",
    "#{ticket} {product} - {problem} - reported by {reporter} - {prio}",
    "{prio}: {reporter} has a {product}, {problem}, see ticket {ticket}",
    "new ticket {ticket}, {prio}, {product}: {problem}. Reporter: {reporter}.",
    "{reporter} called, {problem}; it is a {product}, ticket {ticket}, {prio}.",
)


def ticket(rng: Random) -> tuple[str, Record]:
    priority = rng.choice(tuple(PRIORITY))
    record: Record = {
        "ticket": number(rng, 3, 5),
        "reporter": f"{first_name(rng)} {last_name(rng)}",
        "product": rng.choice(words.ITEMS),
        "problem": rng.choice(words.PROBLEMS),
        "priority": priority,
    }
    return fill(rng, TICKET_TEMPLATES, **record, prio=rng.choice(PRIORITY[priority])), record


RECORDS: dict[str, Callable[[Random], tuple[str, Record]]] = {
    "order": order,
    "sale": sale,
    "contact": contact,
    "log": log,
    "event": event,
    "ticket": ticket,
}
PREFIXES = ("", "", "{task}: ", "{task}: ", "{task} to JSON: ", "Turn this {task} into JSON: ", "Extract the {task}: ")


def record_sample(rng: Random, task: str) -> Sample:
    text, record = RECORDS[task](rng)
    return Sample(task, rng.choice(PREFIXES).format(task=task) + text, render(record))


def ndjson(rng: Random, low: int = 2, high: int = 4) -> Sample:
    """Several records of one kind, one per line in, one per line out; orders are twice as frequent."""
    task = rng.choice((*RECORDS, "order"))
    pairs = [RECORDS[task](rng) for _ in range(rng.randint(low, high))]
    head = rng.choice(("{task}s:\n", "{task}s to NDJSON:\n", "Turn these {task}s into NDJSON:\n")).format(task=task)
    return Sample(
        "ndjson", head + "\n".join(text for text, _ in pairs), "\n".join(render(record) for _, record in pairs)
    )


def call(rng: Random) -> Sample:
    """A request -> {"name": function, "arguments": {...}}."""
    iso, when = date(rng)
    a, b = rng.sample(words.CURRENCIES, 2)
    start, goal = rng.sample(words.CITIES, 2)
    place, time, person = city(rng), clock(rng), first_name(rng)
    people, minutes, amount = rng.randint(2, 12), rng.randint(2, 90), number(rng, 2, 4)
    unit, text, todo, song = (
        rng.choice(("celsius", "fahrenheit")),
        rng.choice(words.MESSAGES),
        rng.choice(words.TODO),
        rng.choice(words.SONGS),
    )
    singer = f"{first_name(rng)} {last_name(rng)}"
    requests: tuple[tuple[str, Record, tuple[str, ...]], ...] = (
        (
            "get_weather",
            {"city": place, "unit": unit},
            (
                f"What is the weather in {place} in {unit}?",
                f"weather {place}, {unit}",
                f"How warm is it in {place}? Use {unit}.",
            ),
        ),
        (
            "set_timer",
            {"minutes": minutes},
            (f"Set a timer for {minutes} minutes.", f"wake me in {minutes} minutes", f"timer {minutes} min"),
        ),
        (
            "send_message",
            {"to": person, "text": text},
            (f"Tell {person}: {text}.", f'Send "{text}" to {person}.', f"message {person} that {text}"),
        ),
        (
            "convert",
            {"amount": amount, "from": a, "to": b},
            (f"How much is {amount} {a} in {b}?", f"convert {amount} {a} to {b}", f"{amount} {a} in {b} please"),
        ),
        (
            "book_table",
            {"city": place, "people": people, "time": time},
            (f"Book a table for {people} in {place} at {time}.", f"table at {time}, {place}, {people} people"),
        ),
        ("play_song", {"title": song, "artist": singer}, (f"Play {song} by {singer}.", f"put on {singer}, {song}")),
        (
            "add_todo",
            {"text": todo, "due": iso},
            (f"Remind me to {todo} on {when}.", f"todo: {todo}, due {when}", f"I must {todo} by {when}."),
        ),
        (
            "find_trains",
            {"from": start, "to": goal, "date": iso},
            (f"Trains from {start} to {goal} on {when}?", f"I want to go from {start} to {goal} on {when}."),
        ),
    )
    name, arguments, phrasings = rng.choice(requests)
    head = rng.choice(("", "", "call: ", "Which function call? "))
    return Sample("call", head + rng.choice(phrasings), render({"name": name, "arguments": arguments}))


def sentence(rng: Random) -> Sample:
    """Plain English out: a record in note form becomes a sentence, or small talk with fixed answers."""
    if rng.random() < 0.35:
        questions, answer = rng.choice(words.CHAT)
        return Sample("sentence", rng.choice(questions), answer)
    name, n, where = f"{first_name(rng)} {last_name(rng)}", number(rng, 3, 5), city(rng)
    item, note, time, kind = rng.choice(words.ITEMS), rng.choice(words.NOTES), clock(rng), rng.choice(words.EVENTS)
    status = rng.choice(tuple(ORDER_STATUS))
    notes, answer = rng.choice(
        (
            (f"order {n}, {name}, {status}", f"Order {n} from {name} is {status}."),
            (f"{kind}, {name}, {time}, {where}", f"The {kind} with {name} starts at {time} in {where}."),
            (f"ticket {n}, {item}, {name}", f"{name} opened ticket {n} about a {item}."),
            (f"order {n}, note {note}", f"Order {n} has the note: {note}."),
            (f"{name}, {where}", f"{name} lives in {where}."),
        )
    )
    return Sample("sentence", rng.choice(("sentence: ", "Write a sentence: ")) + notes, answer)


TASKS: dict[str, Callable[[Random], Sample]] = {
    **{task: (lambda rng, task=task: record_sample(rng, task)) for task in RECORDS},
    "ndjson": ndjson,
    "call": call,
    "sentence": sentence,
}
WEIGHTS = {
    "order": 14,
    "sale": 14,
    "contact": 12,
    "log": 8,
    "event": 12,
    "ticket": 12,
    "ndjson": 16,
    "call": 12,
    "sentence": 10,
}


def sample(rng: Random, longest: int = 4) -> Sample:
    """One sample of the training mixture; NDJSON has at most `longest` records (1: none)."""
    task = rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
    if task == "ndjson" and longest < 2:
        task = "order"
    return ndjson(rng, 2, longest) if task == "ndjson" else TASKS[task](rng)


def random_value(rng: Random) -> str:
    """A value of any kind: word, made-up name, number, amount, code, short phrase."""
    return rng.choice(
        (
            lambda: rng.choice(words.FIRST),
            lambda: f"{invented(rng)} {rng.choice(words.LAST)}",
            lambda: str(number(rng, 1, 6)),
            lambda: str(money(rng)),
            lambda: rng.choice(words.NOTES),
            lambda: f"{rng.choice(words.COLORS)} {rng.choice(words.ITEMS)}",
            lambda: f"{clock(rng)}:{rng.randint(0, 59):02d}",
            lambda: f"{rng.randint(200, 999)}-{rng.randint(1000, 9999)}",
        )
    )()


FIELDS = ("id", "customer", "total", "city", "time", "date", "phone")


def copying(rng: Random) -> Sample:
    """Curriculum: repeat a list, or look values up by key. Teaches copying before any schema is known."""
    values = [random_value(rng) for _ in range(rng.randint(2, 5))]
    if rng.random() < 0.5:
        text = rng.choice((", ", " ", "; ", "\n", " - ")).join(values)
        return Sample("copy", f"copy: {text}", text)
    keys = rng.sample((*words.COLORS, *words.ITEMS, *FIELDS), len(values))
    pairs = list(zip(keys, values, strict=True))
    text = rng.choice((", ", "; ", "\n")).join(f"{key} {value}" for key, value in pairs)
    wanted = rng.sample(pairs, rng.randint(1, len(pairs)))
    asked = " ".join(key for key, _ in wanted)
    return Sample("lookup", f"{asked}: {text}", render(dict(wanted)))
