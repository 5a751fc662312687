"""What the callers of ``llmgw bench`` ask for.

A load is a list of conversations; the turns of one follow each other, each prompt
holding all before it. The same seed gives the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from msgspec import Struct

WORDS = (
    "gateway",
    "server",
    "queue",
    "token",
    "prompt",
    "slot",
    "cache",
    "model",
    "stream",
    "answer",
    "route",
)


class Turn(Struct, frozen=True):
    """:param words: of the question.
    :param tokens: most tokens of the answer.
    """

    words: str
    tokens: int


Conversation = tuple[Turn, ...]


def mixed(dice: Random, count: int) -> list[Conversation]:
    """Questions of three sizes that share nothing: chats, long documents, short ones with short answers."""
    sizes = ((60, 24), (400, 12), (25, 4))
    shapes = dice.choices(sizes, (60, 15, 25), k=count)
    return [(Turn(_words(dice, words), tokens),) for words, tokens in shapes]


def chat(dice: Random, count: int) -> list[Conversation]:
    """Conversations of four turns behind one of two beginnings of a hundred words."""
    heads = [_words(dice, 100) for _ in range(2)]
    made: list[Conversation] = []
    left = count
    while left > 0:
        turns = min(4, left)
        left -= turns
        head = dice.choice(heads)
        words = [f"{head} {_words(dice, 40)}", *(_words(dice, 40) for _ in range(turns - 1))]
        made.append(tuple(Turn(each, 16) for each in words))
    return made


def marked(conversations: list[Conversation], mark: str) -> list[Conversation]:
    """The same, each beginning with ``mark``, so that no server has read any of it before.

    Else whoever is measured later finds in the servers' caches what an earlier one has asked.
    """
    return [(Turn(f"{mark} {first.words}", first.tokens), *rest) for first, *rest in conversations]


LOADS: Mapping[str, Callable[[Random, int], list[Conversation]]] = {"mixed": mixed, "chat": chat}
"""Loads by name; each makes so many requests in all."""


def _words(dice: Random, count: int) -> str:
    return " ".join(dice.choices(WORDS, k=count))
