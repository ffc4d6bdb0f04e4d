"""Tokens of VNN-LIB 1.0 (an SMT-LIB 2 subset), at the speed of the regular-expression engine.

Tokens are plain strings without a place: a file of 20 MB has millions of them, and only an error
needs to know where one stood. `locate` finds that out afterwards by counting.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice

_COMMENT = re.compile(r";[^\n]*")
_TOKEN = re.compile(r"[()]|[^\s()]+")
_CHUNK = 1 << 20  # characters tokenised at once: bounds the number of token strings alive


def without_comments(text: str) -> str:
    """`text` with comments removed. Line and column of everything that is left stay the same."""
    return _COMMENT.sub("", text) if ";" in text else text


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        cut = text.find("(", start + _CHUNK)  # no token contains a parenthesis, so none is cut in two
        end = cut if cut >= 0 else len(text)
        yield text[start:end]
        start = end


def tokens(text: str) -> Iterator[str]:
    """Parentheses and words of `text`, which must be free of comments, in order."""
    return chain.from_iterable(map(_TOKEN.findall, _chunks(text)))


def _element_offset(text: str, start: int, element: int) -> int:
    """Offset of an element of the list that token `start` opens, or of the parenthesis that closes it."""
    depth, seen = 0, -1
    for match in islice(_TOKEN.finditer(text), start, None):
        token = match.group()
        if depth == 1:
            seen += 1
            if seen == element or token == ")":
                return match.start()
        depth += {"(": 1, ")": -1}.get(token, 0)
    return len(text.rstrip())


def locate(text: str, start: int, element: int | None = None) -> tuple[int, int]:
    """Line and column, both from 1, of a token.

    Args:
        text: comment-free text.
        start: index of the token. Past the last one, the end of the text is meant.
        element: if given, `start` is an opening parenthesis, and the place of the list's element
            with this number (0 is the operator) is meant; past the last one, of the closing one.
    """
    if element is not None:
        offset = _element_offset(text, start, element)
    else:
        match = next(islice(_TOKEN.finditer(text), start, None), None)
        offset = match.start() if match else len(text.rstrip())
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
