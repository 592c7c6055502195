"""Word lists of the demo model's training data: names, places, things, phrases. Plain constants, no behaviour."""

# ruff: noqa: SIM905 - lists of words read better as text

from __future__ import annotations

FIRST = (
    "Dana Omar Lucia Ken Priya Marta Ivan Chloe Noah Aiko Samir Ingrid Tomas Leila Victor Grace Hana Pedro Nadia Felix "
    "Ruth Oscar Yara Milo Erin Jonas Tara Luis Mina Boris Clara Hugo Sofia Ravi Elena Paul Zoe Karim Anna Mateo "
    "Alice Bruno Carla Dmitri Emma Fatima George Helen Isaac Julia Kofi Laura Marco Nina Olga Peter Quinn Rosa Stefan "
    "Tina Uma Vera Walter Ximena Yusuf Zara Adam Bella Cyrus Daphne Eli Freya Gita Henry Iris Jack Kira Leo Maya Nils "
    "Otto Petra Rana Simon Thea Ulla Vince Wanda Ada Ben Cora Dev Eva Finn Gus Hal Ida Joel Kate Liam Mei Ned Ola Pia "
    "Rex Sven Tess Vito Wes Amir Beata Cedric Dora Emil Flora Gordon Heidi Ismail Jana Kurt Lena Martin Nora Pavel "
    "Rita Salma Timo Viola Zeno José Zoë Łukasz Renée Jürgen Søren"
).split()

LAST = (
    "Reyes Haddad Moretti Tanaka Sharma Kowalski Petrov Dubois Fischer Sato Nasser Larsen Novak Farouk Hughes Okafor "
    "Kim Alvarez Costa Weber Klein Lind Aziz Brown Walsh Becker Singh Ortega Park Volkov Rossi Meyer Silva Iyer Popa "
    "Grant Young Malik Berg Diaz Ahmed Baker Carter Duarte Evans Ferrari Garcia Hansen Ibrahim Jensen Keller Lopez "
    "Mason Nguyen Olsen Perez Quist Rahman Schmidt Torres Ueda Vargas Wagner Xu Yilmaz Zimmer Abbott Bauer Chen Doyle "
    "Egger Fuchs Gomez Huber Ito Jung Kaya Lang Mori Nagy Ozturk Patel Ramos Sousa Toth Urban Vidal Wolf Yang Zhao "
    "Archer Bishop Clarke Dalton Ellis Foster Gibson Harper Irwin Jacobs Knight Lambert Murphy Norris Owens Porter "
    "Quigley Russo Shaw Tucker Vance Webb York Zeller Núñez Müller Håkon Çelik"
).split()

CITIES = (
    "Lisbon Oslo Kyoto Quito Cairo Dublin Lyon Turin Perth Lagos Austin Porto Ghent Malmo Split Cork Leeds Basel Graz "
    "Tunis Accra Bergen Bonn Boston Bristol Denver Dakar Delhi Essen Geneva Hanoi Havana Izmir Jakarta Kigali Krakow "
    "Lima London Madrid Milan Nairobi Naples Nice Odense Osaka Paris Prague Riga Rome Seoul Sofia Tampa Tokyo Utrecht "
    "Vienna Vilnius Warsaw York Zagreb Zurich"
).split()

ITEMS = (
    "lamp desk chair notebook monitor keyboard backpack kettle jacket bicycle headset router pillow blanket camera "
    "tripod mug shelf fan heater drill hammer tent stove rope printer cable charger clock mirror bottle candle carpet "
    "cushion drawer easel fork guitar helmet iron jar kite ladder mixer napkin oven pan quilt radio saddle table "
    "umbrella vase wallet bench bowl bucket cooler crate curtain folder grill hose jug lantern mop plate poster "
    "puzzle rack ruler scarf sofa speaker spoon stool suitcase teapot toaster tray tumbler vest"
).split()

COLORS = "blue red green black white grey yellow orange purple brown silver navy pink beige teal gold".split()

MONTHS = "January February March April May June July August September October November December".split()

NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()

SERVICES = "auth billing search cart mailer gateway cache worker indexer scheduler proxy storage".split()

NOTES = (
    "gift wrap;leave at the door;call before delivery;fragile;ring twice;no rush;new address;deliver after six;"
    "left with neighbour;pay on pickup;handle with care;back entrance;weekend only;keep cold;signature needed;"
    "split delivery;birthday gift;use the side gate;return the crate;second floor;ask for the manager;paid in cash;"
    "send the invoice;check the colour;add a card;do not bend;deliver before noon;leave in the garage;office hours only"
).split(";")

PROBLEMS = (
    "the screen stays black;login fails after the update;the parcel never arrived;the invoice total is wrong;"
    "the app crashes on start;the battery drains overnight;two items are missing;the refund is late;"
    "the cable is broken;notifications do not arrive;the handle came off;the motor makes a loud noise;"
    "the wrong size was sent;the discount was not applied;the page does not load;the password cannot be reset;"
    "the box was open;the light keeps blinking;it will not turn on;the lid does not close;the colour is wrong;"
    "payment was taken twice;the manual is missing;the button is stuck;it smells of smoke"
).split(";")

EVENTS = "meeting call review lunch interview workshop dinner training demo checkup".split()

TODO = (
    "buy milk;water the plants;pay the rent;book the dentist;clean the garage;renew the passport;call the bank;"
    "fix the bike;send the report;feed the cat;order new tyres;pick up the parcel;wash the car;back up the laptop"
).split(";")

MESSAGES = (
    "running ten minutes late;see you at the station;the keys are on the table;dinner is ready;happy birthday;"
    "the train was cancelled;please call me back;thanks for the flowers;meeting moved to noon;bring an umbrella"
).split(";")

SONGS = (
    "Blue Harbour;Night Train;Golden Fields;Paper Moon;Slow River;Winter Light;City Rain;Open Road;Silver Lake".split(
        ";"
    )
)

CURRENCIES = "EUR USD GBP JPY CHF SEK NOK CAD AUD INR".split()

SYLLABLES = (
    "ba be bi bo da de di do fa fe ga go ha he ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re ri ro "
    "sa se si so ta te ti to va ve vi vo za ze zu bran cor del fen gar hol jin kel lin mar nor pel quin ros stan tor "
    "ul vel wen yor zan"
).split()

# Answers of the plain-chat task; each list of questions shares one answer.
CHAT = (
    (
        ("Hello", "Hi", "Hello there", "Good morning", "Hey", "Hi there!", "Hello!"),
        "Hello! Give me an order, a contact, a log line, a calendar note or a ticket and I turn it into JSON.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am the demo model inside coli, a tiny sparse mixture of experts that turns text into JSON.",
    ),
    (
        ("What can you do?", "How can you help me?", "Help", "What do you do?"),
        "I read short texts about orders, contacts, logs, events and tickets and write one JSON object for each.",
    ),
    (
        ("How do you work?", "How are you built?", "How many experts do you have?"),
        "Each layer has 32 small experts and a router that picks a few of them for every token.",
    ),
    (
        ("Thanks", "Thank you", "Thanks a lot!", "Thank you very much."),
        "You are welcome.",
    ),
    (
        ("Goodbye", "Bye", "See you later", "Good night"),
        "Goodbye!",
    ),
    (
        ("Write a poem.", "Tell me a joke.", "What is the capital of France?", "Write some code.", "Translate this."),
        "I cannot do that: I was only trained to turn short texts into JSON.",
    ),
)
