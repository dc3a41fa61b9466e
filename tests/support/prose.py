"""Sentences to read aloud: plain English without numbers, each one different."""

from __future__ import annotations

from collections.abc import Sequence

_WHEN = [
    "After breakfast", "Late in the evening", "On a cold morning", "During the storm", "Before sunrise",
    "In the middle of summer", "When the rain stopped", "At the end of the week", "Shortly after lunch",
    "On the way home", "While the kettle was boiling", "Every spring", "As soon as it was dark",
]  # fmt: skip
_WHO = [
    "the old sailor", "a young teacher", "my grandmother", "the village baker", "our neighbor", "a tall stranger",
    "the captain's brother", "the new doctor", "an honest farmer", "the girl with the umbrella",
    "the head of the school", "a tired policeman", "the owner of the hotel", "their youngest son",
    "the lady from the library", "a famous painter", "the driver of the bus",
]  # fmt: skip
_DID = [
    "painted a wooden boat", "opened the kitchen window", "carried a basket of apples", "wrote a long letter",
    "walked along the river", "repaired the garden gate", "bought fresh bread and butter",
    "told a story about a lost dog", "waited for the last train", "sang a quiet song",
    "looked for a pair of gloves", "planted a row of roses", "watched the birds above the field",
    "cleaned the dusty shelves", "drank a cup of hot tea", "found a silver coin in the grass",
    "borrowed a book about the moon", "sold a basket of fish", "played the piano for an hour",
    "drew a map of the island", "locked the heavy iron door", "climbed the stairs of the tower",
    "asked the way to the station", "made soup for the whole family", "took a picture of the bridge",
    "listened to the radio", "lit a candle in the window", "cut the bread into thin slices",
    "learned the names of the stars",
]  # fmt: skip
_AND = [
    "and nobody in the street noticed it", "because the weather was so pleasant",
    "and then went to sleep beside the fire", "although the shop was already closed",
    "while the children played in the yard", "and everybody was happy about it",
    "because a good friend had asked for it", "without saying a word to anybody",
    "and the cat watched from the roof", "until the church bells began to ring",
    "and came back with muddy shoes", "while snow was falling on the hills",
    "and forgot to close the door", "because there was nothing else to do",
    "as people in this valley have always done", "and thought about the sea",
    "before the guests arrived", "and promised to do it again", "while the wind was blowing from the north",
]  # fmt: skip


def sentences(n: int, first: int = 0) -> list[str]:
    """Return ``n`` sentences of 12 to 25 words, beginning with number ``first``. The first 121,771 are all different,
    because the lengths of the lists are different primes."""

    def word(table: Sequence[str], number: int) -> str:
        return table[number % len(table)]

    return [
        f"{word(_WHEN, number)} {word(_WHO, number)} {word(_DID, number)}, {word(_AND, number)}."
        for number in range(first, first + n)
    ]


GERMAN = [
    "Am frühen Morgen ging der alte Lehrer durch den Wald.",
    "Die Kinder spielten im Garten, weil die Sonne schien.",
    "Meine Großmutter hat jeden Sonntag einen Kuchen gebacken.",
    "Danach tranken wir Kaffee und sprachen über das Wetter.",
    "Der Zug nach München kam heute leider viel zu spät.",
]
