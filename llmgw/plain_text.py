"""Text of strangers, made fit for a line of a log and for a terminal."""

from __future__ import annotations


def plain(text: str, most: int) -> str:
    """``text`` with what is not printable escaped, and of at most ``most`` characters: beginning and end
    stay, since either may say what it is about."""
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
            for char in text[: most + 1] + text[max(most + 1, len(text) - most) :]
        )
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end - 1]}…{text[-end:]}"
