"""Finds tokens at which a text may be cut so that its pieces, encoded separately, have the tokens of the whole.

`tokenizers` takes added tokens out of a text first, from left to right and the longest of those that begin at one
place. What stands between them is then normalized and split on its own, and only the very beginning of a text is
special (SentencePiece's `▁`). So a cut BEFORE an added token changes nothing, if that token

- is taken out before anything is normalized;
- takes no white space from its left (`lstrip`), and does not ask what stands beside it (`single_word`);
- begins with neither a letter nor a space: an added token before it may ask for a word's end, or take the white space
  after it (`rstrip`);
- overlaps no added token, itself included: then every place where its text stands is a place where it is taken out.
"""

from collections.abc import Iterable

from tokenizers import AddedToken


def safe_cuts(added: Iterable[AddedToken]) -> tuple[str, ...]:
    """The safe tokens, shortest first."""
    taken_first = [token for token in added if not token.normalized and token.content]
    texts = [token.content for token in taken_first]
    safe = []
    for token in taken_first:
        text, first = token.content, token.content[0]
        is_mark = first.isascii() and not (first.isalnum() or first == "_" or first.isspace())
        if is_mark and not (token.lstrip or token.single_word):
            beginnings = tuple(text[:end] for end in range(1, len(text)))
            overlaps = any((other != text and text in other) or other.endswith(beginnings) for other in texts)
            if not overlaps:
                safe.append(text)
    return tuple(sorted(safe, key=len))
