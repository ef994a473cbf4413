"""Text on its way out: token ids to text one by one, and where to stop in it."""

from collections.abc import Callable, Sequence
from typing import Any

# A character has at most four bytes, so that of one that is cut short at most three tokens are there.
_REPLACEMENT = "\ufffd"
_MOST_OF_A_CHARACTER = 3
_LONGEST_WAIT = 8
_LONGEST_CONTEXT = 256


class Streamer:
    """Token ids to text as they come. All that `put` and `finish` give, put together, is what decoding them gives.

    A character that several tokens make up comes with the last of them, so half a character is never shown. What
    came before decides how a token looks, for one whether the first word has a space in front: that is `context`.

    (`tokenizers.decoders.DecodeStream` does the same, but gives up on bytes that are no UTF-8, which models do
    produce, and has no end at which to ask for the rest.)
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Any = ()):
        """**Arguments:**

        - `decode`: ids to text, with U+FFFD for what is no UTF-8.
        - `context`: the ids before the first one, whose text isn't given out.
        """
        self._decode = decode
        # The ids that are decoded together. Those from `_recent` on came since the text was last complete; of what
        # they all say, `_shown` characters have been given out.
        self._ids = [int(i) for i in context]
        self._recent = len(self._ids)
        self._shown = len(decode(self._ids).rstrip(_REPLACEMENT))

    def put(self, token: Any) -> str:
        """The text that `token` completes; often none. Raises what `decode` raises, and then forgets the token."""
        ids = [*self._ids, int(token)]
        text = self._decode(ids)
        self._ids = ids
        waiting = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(ids) - self._recent > _LONGEST_WAIT:
            # That many tokens aren't one character: most of what waits is no text at all.
            waiting = min(waiting, _MOST_OF_A_CHARACTER)
        ready = len(text) - waiting
        out = text[self._shown : ready]
        self._shown = max(self._shown, ready)
        self._forget(complete=bool(out) and not waiting, waiting=waiting)
        return out

    def _forget(self, *, complete: bool, waiting: int) -> None:
        """Drops ids that are no longer needed as context: a long text mustn't take ever longer."""
        kept = self._ids[self._recent :] if complete else self._ids
        if len(kept) > _LONGEST_CONTEXT:
            kept = kept[-_LONGEST_CONTEXT // 8 :]
        dropped = len(self._ids) - len(kept)
        # Tokens that say nothing by themselves would leave the next one at a beginning, where it looks different.
        if dropped and (text := self._decode(kept)):
            self._ids, self._shown = kept, len(text) - waiting
            self._recent = max(0, self._recent - dropped)
        if complete:
            self._recent = len(self._ids)

    def finish(self) -> str:
        """What is left when no more ids come. Half a character shows as U+FFFD."""
        text = self._decode(self._ids)
        out = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return out


class StopTexts:
    """Ends a text where one of `stops` appears in it, even in pieces. The stop itself isn't part of the text.

    `stopped` says whether one has appeared. Raises ValueError for an empty one.
    """

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise ValueError("an empty text can't be stopped at: it is everywhere")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def put(self, piece: str) -> str:
        """What of the text so far is certain to come before any stop. Nothing once stopped."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if found:
            # The one that was complete first, however long the pieces are that text comes in.
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        # The end of the text may be the beginning of a stop.
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        begun = range(max(0, len(text) - longest), len(text))
        ready = next((at for at in begun if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))
        self._held = text[ready:]
        return text[:ready]

    def finish(self) -> str:
        """What was held back, when no more comes."""
        held, self._held = self._held, ""
        return held
