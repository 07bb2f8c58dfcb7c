"""The words of the built-in German-English grammar, one row a word: what inflection cannot know by rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """A noun or, without plural, a name. `kind` decides which verbs and adjectives go with it."""

    german: str
    gender: str  # m, f, n
    plural: str
    english: str
    english_plural: str
    kind: str
    place: str = ""  # preposition that makes it a location
    weak: bool = False  # takes the plural's form in every case but the nominative


@dataclass(frozen=True)
class Verb:
    """A verb with its frame: none, acc, dat, dat acc, goal, place, reflexive, dass, ob."""

    german: str  # infinitive without the separable prefix
    third: str  # third person singular, also without it
    participle: str
    english: str  # a second word is a particle: "pick up"
    past: str
    english_participle: str
    frame: str
    objects: str = ""  # kinds of noun
    subjects: str = "person"
    prefix: str = ""
    auxiliary: str = "haben"
    stative: bool = False  # no manner, no passive, no imperative


@dataclass(frozen=True)
class Adjective:
    """An adjective for nouns of some kinds. `stem` takes the endings."""

    german: str
    stem: str
    english: str
    kinds: str
    passing: bool = False  # may be true today only


@dataclass(frozen=True)
class Determiner:
    """What opens a noun phrase. `kind` is "der", "ein" or "number", and decides the endings."""

    stem: str
    kind: str
    english: str
    english_plural: str


@dataclass(frozen=True)
class Adverbial:
    """A time, frequency or manner. English word i translates the German word `order[i]`."""

    german: str
    english: str
    order: tuple[int, ...]
    modes: str  # of present, perfect, modal, passive
    role: str = "time"  # or "habit"; "frequency", which stands before the English verb; "manner"
    past: bool = False  # a perfect with it is an English simple past


@dataclass(frozen=True)
class Preposition:
    """A preposition and the case it governs here."""

    german: str
    english: str
    case: str


THINGS = "thing opening device vehicle food text building term"
BEINGS = "person animal"

NOUNS = (
    Noun("Mann", "m", "Männer", "man", "men", "person"),
    Noun("Junge", "m", "Jungen", "boy", "boys", "person", weak=True),
    Noun("Lehrer", "m", "Lehrer", "teacher", "teachers", "person"),
    Noun("Bruder", "m", "Brüder", "brother", "brothers", "person"),
    Noun("Nachbar", "m", "Nachbarn", "neighbor", "neighbors", "person", weak=True),
    Noun("Frau", "f", "Frauen", "woman", "women", "person"),
    Noun("Schwester", "f", "Schwestern", "sister", "sisters", "person"),
    Noun("Ärztin", "f", "Ärztinnen", "doctor", "doctors", "person"),
    Noun("Tante", "f", "Tanten", "aunt", "aunts", "person"),
    Noun("Mädchen", "n", "Mädchen", "girl", "girls", "person"),
    Noun("Hund", "m", "Hunde", "dog", "dogs", "animal"),
    Noun("Vogel", "m", "Vögel", "bird", "birds", "animal"),
    Noun("Katze", "f", "Katzen", "cat", "cats", "animal"),
    Noun("Kuh", "f", "Kühe", "cow", "cows", "animal"),
    Noun("Pferd", "n", "Pferde", "horse", "horses", "animal"),
    Noun("Tisch", "m", "Tische", "table", "tables", "thing"),
    Noun("Ball", "m", "Bälle", "ball", "balls", "thing"),
    Noun("Korb", "m", "Körbe", "basket", "baskets", "thing"),
    Noun("Jacke", "f", "Jacken", "jacket", "jackets", "thing"),
    Noun("Tasse", "f", "Tassen", "cup", "cups", "thing"),
    Noun("Blume", "f", "Blumen", "flower", "flowers", "thing"),
    Noun("Bild", "n", "Bilder", "picture", "pictures", "thing"),
    Noun("Kleid", "n", "Kleider", "dress", "dresses", "thing"),
    Noun("Küchentisch", "m", "Küchentische", "kitchen table", "kitchen tables", "thing"),
    Noun("Kaffeetasse", "f", "Kaffeetassen", "coffee cup", "coffee cups", "thing"),
    Noun("Winterjacke", "f", "Winterjacken", "winter jacket", "winter jackets", "thing"),
    Noun("Koffer", "m", "Koffer", "suitcase", "suitcases", "opening"),
    Noun("Tür", "f", "Türen", "door", "doors", "opening"),
    Noun("Fenster", "n", "Fenster", "window", "windows", "opening"),
    Noun("Haustür", "f", "Haustüren", "house door", "house doors", "opening"),
    Noun("Gartentor", "n", "Gartentore", "garden gate", "garden gates", "opening"),
    Noun("Computer", "m", "Computer", "computer", "computers", "device"),
    Noun("Lampe", "f", "Lampen", "lamp", "lamps", "device"),
    Noun("Radio", "n", "Radios", "radio", "radios", "device"),
    Noun("Wagen", "m", "Wagen", "car", "cars", "vehicle"),
    Noun("Fahrrad", "n", "Fahrräder", "bicycle", "bicycles", "vehicle"),
    Noun("Apfel", "m", "Äpfel", "apple", "apples", "food"),
    Noun("Kuchen", "m", "Kuchen", "cake", "cakes", "food"),
    Noun("Suppe", "f", "Suppen", "soup", "soups", "food"),
    Noun("Ei", "n", "Eier", "egg", "eggs", "food"),
    Noun("Brief", "m", "Briefe", "letter", "letters", "text"),
    Noun("Zeitung", "f", "Zeitungen", "newspaper", "newspapers", "text"),
    Noun("Buch", "n", "Bücher", "book", "books", "text"),
    Noun("Schulbuch", "n", "Schulbücher", "school book", "school books", "text"),
    Noun("Bahnhof", "m", "Bahnhöfe", "station", "stations", "building", place="an"),
    Noun("Schule", "f", "Schulen", "school", "schools", "building", place="in"),
    Noun("Brücke", "f", "Brücken", "bridge", "bridges", "building", place="auf"),
    Noun("Haus", "n", "Häuser", "house", "houses", "building", place="in"),
    Noun("Stadtpark", "m", "Stadtparks", "city park", "city parks", "place", place="in"),
    Noun("Garten", "m", "Gärten", "garden", "gardens", "place", place="in"),
    Noun("Fluss", "m", "Flüsse", "river", "rivers", "place", place="an"),
    Noun("Straße", "f", "Straßen", "street", "streets", "place", place="auf"),
    Noun("Küche", "f", "Küchen", "kitchen", "kitchens", "place", place="in"),
    Noun("Dorf", "n", "Dörfer", "village", "villages", "place", place="in"),
)

NEVER_OWNED = ("Mann", "Frau")  # "meine Frau" is a wife

NAMES = (
    Noun("Anna", "f", "", "Anna", "", "person"),
    Noun("Clara", "f", "", "Clara", "", "person"),
    Noun("Max", "m", "", "Max", "", "person"),
    Noun("Paul", "m", "", "Paul", "", "person"),
)

# A noun of two senses, and for each sense a noun of the same gender that says which one it is.
TERMS = (
    (Noun("Bank", "f", "", "bench", "", "term"), Noun("Gartenbank", "f", "", "garden bench", "", "thing")),
    (Noun("Bank", "f", "", "bank", "", "term"), Noun("Firma", "f", "", "company", "", "thing")),
    (Noun("Schloss", "n", "", "castle", "", "term"), Noun("Gebäude", "n", "", "building", "", "thing")),
    (Noun("Schloss", "n", "", "lock", "", "term"), Noun("Gerät", "n", "", "device", "", "thing")),
    (Noun("Birne", "f", "", "pear", "", "term"), Noun("Frucht", "f", "", "fruit", "", "thing")),
    (Noun("Birne", "f", "", "bulb", "", "term"), Noun("Lampe", "f", "", "lamp", "", "thing")),
    (Noun("Hahn", "m", "", "rooster", "", "term"), Noun("Vogel", "m", "", "bird", "", "thing")),
    (Noun("Hahn", "m", "", "tap", "", "term"), Noun("Wasserhahn", "m", "", "water tap", "", "thing")),
)

VERBS = (
    Verb("sehen", "sieht", "gesehen", "see", "saw", "seen", "acc", f"{BEINGS} {THINGS}", BEINGS, stative=True),
    Verb("finden", "findet", "gefunden", "find", "found", "found", "acc", f"{BEINGS} thing text term", stative=True),
    Verb("haben", "hat", "gehabt", "have", "had", "had", "acc", "animal thing vehicle text", stative=True),
    Verb("kaufen", "kauft", "gekauft", "buy", "bought", "bought", "acc", "animal thing device vehicle food text term"),
    Verb("verkaufen", "verkauft", "verkauft", "sell", "sold", "sold", "acc", "animal thing device vehicle text term"),
    Verb("lesen", "liest", "gelesen", "read", "read", "read", "acc", "text"),
    Verb("essen", "isst", "gegessen", "eat", "ate", "eaten", "acc", "food"),
    Verb("tragen", "trägt", "getragen", "carry", "carried", "carried", "acc", "thing"),
    Verb("bauen", "baut", "gebaut", "build", "built", "built", "acc", "building"),
    Verb("besuchen", "besucht", "besucht", "visit", "visited", "visited", "acc", "person"),
    Verb("fangen", "fängt", "gefangen", "catch", "caught", "caught", "acc", "animal", BEINGS),
    Verb("waschen", "wäscht", "gewaschen", "wash", "washed", "washed", "acc", "animal vehicle"),
    Verb("reparieren", "repariert", "repariert", "repair", "repaired", "repaired", "acc", "device vehicle"),
    Verb("rufen", "ruft", "angerufen", "call", "called", "called", "acc", "person", prefix="an"),
    Verb("laden", "lädt", "eingeladen", "invite", "invited", "invited", "acc", "person", prefix="ein"),
    Verb("holen", "holt", "abgeholt", "pick up", "picked", "picked", "acc", "person", prefix="ab"),
    Verb("machen", "macht", "aufgemacht", "open", "opened", "opened", "acc", "opening", prefix="auf"),
    Verb("machen", "macht", "zugemacht", "close", "closed", "closed", "acc", "opening", prefix="zu"),
    Verb("machen", "macht", "angemacht", "turn on", "turned", "turned", "acc", "device", prefix="an"),
    Verb("machen", "macht", "ausgemacht", "turn off", "turned", "turned", "acc", "device", prefix="aus"),
    Verb("werfen", "wirft", "weggeworfen", "throw away", "threw", "thrown", "acc", "thing food text", prefix="weg"),
    Verb("helfen", "hilft", "geholfen", "help", "helped", "helped", "dat", "person"),
    Verb("danken", "dankt", "gedankt", "thank", "thanked", "thanked", "dat", "person"),
    Verb("folgen", "folgt", "gefolgt", "follow", "followed", "followed", "dat", "person", BEINGS, auxiliary="sein"),
    Verb("geben", "gibt", "gegeben", "give", "gave", "given", "dat acc", "thing food text"),
    Verb("zeigen", "zeigt", "gezeigt", "show", "showed", "shown", "dat acc", "thing text vehicle"),
    Verb("schicken", "schickt", "geschickt", "send", "sent", "sent", "dat acc", "thing text"),
    Verb("schlafen", "schläft", "geschlafen", "sleep", "slept", "slept", "none", subjects=BEINGS, stative=True),
    Verb("warten", "wartet", "gewartet", "wait", "waited", "waited", "none", subjects=BEINGS, stative=True),
    Verb("arbeiten", "arbeitet", "gearbeitet", "work", "worked", "worked", "none"),
    Verb("singen", "singt", "gesungen", "sing", "sang", "sung", "none"),
    Verb("tanzen", "tanzt", "getanzt", "dance", "danced", "danced", "none"),
    Verb("stehen", "steht", "aufgestanden", "get up", "got", "gotten", "none", "", BEINGS, "auf", "sein"),
    Verb("kommen", "kommt", "angekommen", "arrive", "arrived", "arrived", "none", "", BEINGS, "an", "sein"),
    Verb(
        "schlafen", "schläft", "eingeschlafen", "fall asleep", "fell", "fallen", "none", "", BEINGS, "ein", "sein", True
    ),
    Verb("gehen", "geht", "gegangen", "go", "went", "gone", "goal", auxiliary="sein"),
    Verb("laufen", "läuft", "gelaufen", "run", "ran", "run", "goal", subjects=BEINGS, auxiliary="sein"),
    Verb("kommen", "kommt", "gekommen", "come", "came", "come", "goal", subjects=BEINGS, auxiliary="sein"),
    Verb("stehen", "steht", "gestanden", "stand", "stood", "stood", "place", "", "thing vehicle", stative=True),
    Verb("liegen", "liegt", "gelegen", "lie", "lay", "lain", "place", "", "thing text", stative=True),
    Verb("setzen", "setzt", "gesetzt", "sit down", "sat", "sat", "reflexive"),
    Verb("verstecken", "versteckt", "versteckt", "hide", "hid", "hidden", "reflexive", subjects=BEINGS),
    Verb("ruhen", "ruht", "ausgeruht", "rest", "rested", "rested", "reflexive", "", BEINGS, "aus"),
    Verb("glauben", "glaubt", "geglaubt", "think", "thought", "thought", "dass", stative=True),
    Verb("sagen", "sagt", "gesagt", "say", "said", "said", "dass", stative=True),
    Verb("fragen", "fragt", "gefragt", "ask", "asked", "asked", "ob", stative=True),
)

ADJECTIVES = (
    Adjective("alt", "alt", "old", f"{BEINGS} {THINGS} place"),
    Adjective("klein", "klein", "small", f"{BEINGS} {THINGS} place"),
    Adjective("groß", "groß", "big", f"{BEINGS} {THINGS} place"),
    Adjective("schön", "schön", "beautiful", f"{BEINGS} {THINGS} place"),
    Adjective("jung", "jung", "young", BEINGS),
    Adjective("müde", "müd", "tired", BEINGS, True),
    Adjective("krank", "krank", "sick", BEINGS, True),
    Adjective("hungrig", "hungrig", "hungry", BEINGS, True),
    Adjective("traurig", "traurig", "sad", "person", True),
    Adjective("klug", "klug", "clever", BEINGS),
    Adjective("neu", "neu", "new", f"{THINGS} place"),
    Adjective("teuer", "teur", "expensive", THINGS, True),
    Adjective("schwer", "schwer", "heavy", "thing opening device text term"),
    Adjective("rot", "rot", "red", THINGS),
    Adjective("grün", "grün", "green", THINGS),
    Adjective("schmutzig", "schmutzig", "dirty", f"animal {THINGS} place", True),
)

THE = Determiner("d", "der", "the", "the")
THIS = Determiner("dies", "der", "this", "these")
A = Determiner("ein", "ein", "a", "")
NO = Determiner("kein", "ein", "no", "no")
MY = Determiner("mein", "ein", "my", "my")
OUR = Determiner("unser", "ein", "our", "our")
NUMBERS = (
    Determiner("zwei", "number", "two", "two"),
    Determiner("drei", "number", "three", "three"),
    Determiner("vier", "number", "four", "four"),
)

ADVERBIALS = (
    Adverbial("heute", "today", (0,), "present perfect modal passive"),
    Adverbial("jetzt", "now", (0,), "present modal passive"),
    Adverbial("bald", "soon", (0,), "modal"),
    Adverbial("morgen", "tomorrow", (0,), "modal"),
    Adverbial("nächste Woche", "next week", (0, 1), "modal"),
    Adverbial("gestern", "yesterday", (0,), "perfect", past=True),
    Adverbial("letzte Woche", "last week", (0, 1), "perfect", past=True),
    Adverbial("vor zwei Tagen", "two days ago", (1, 2, 0), "perfect", past=True),
    Adverbial("am Montag", "on Monday", (0, 1), "present perfect modal passive", past=True),
    Adverbial("am Sonntag", "on Sunday", (0, 1), "present perfect modal passive", past=True),
    Adverbial("am Morgen", "in the morning", (0, 0, 1), "present perfect modal passive", past=True),
    Adverbial("am Abend", "in the evening", (0, 0, 1), "present perfect modal passive", past=True),
    Adverbial("jeden Tag", "every day", (0, 1), "present passive", "habit"),
    Adverbial("oft", "often", (0,), "present perfect passive", "frequency"),
    Adverbial("nie", "never", (0,), "present perfect passive", "frequency"),
    Adverbial("manchmal", "sometimes", (0,), "present passive", "frequency"),
    Adverbial("schon", "already", (0,), "perfect", "frequency"),
    Adverbial("langsam", "slowly", (0,), "present perfect modal passive", "manner"),
    Adverbial("schnell", "fast", (0,), "present perfect modal passive", "manner"),
    Adverbial("vorsichtig", "carefully", (0,), "present perfect modal passive", "manner"),
)

PLACES = {
    "in": Preposition("in", "in", "dat"),
    "an": Preposition("an", "at", "dat"),
    "auf": Preposition("auf", "on", "dat"),
}
BEFORE = Preposition("vor", "in front of", "dat")
BEHIND = Preposition("hinter", "behind", "dat")
INTO = Preposition("in", "into", "acc")
TO = Preposition("zu", "to", "dat")
BY = Preposition("von", "by", "dat")

STATEMENT_PARTICLES = ("ja", "doch", "eben")
REASONS = (("weil", "because"), ("obwohl", "although"))
OCCASIONS = (("wenn", "when"), ("bevor", "before"))
QUESTION_WORDS = (("wann", "when"), ("wo", "where"), ("warum", "why"))
