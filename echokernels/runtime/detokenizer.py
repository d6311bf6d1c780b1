"""Streaming: the text that each new token adds, and where a stop string ends it.

Tokens are bytes (see `token_bytes`), so one incremental UTF-8 decoder gives the text: a character
split over tokens comes out when its last byte is there, and a token costs the same however long
the output is. With stop strings, text that could be the beginning of one is held back:

    | given to the caller ............ | held: the longest end that begins a stop string |
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from echokernels.runtime.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one growing output.

    What `push` and `finish` return joins to `tokenizer.decode(output_ids)`, cut at the first stop
    string. One thing depends on `prompt_ids`: a sentencepiece output keeps its leading space if
    the prompt has text that it goes on from. With `include_stop_str` the text ends after the stop
    string, else before it. Of several stop strings the one that is complete first counts, and the
    longest of those complete at once. Raises ValueError for an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str: bool = False,
    ) -> None:
        if not all(stop):
            raise ValueError(f"stop is {stop!r}, must be strings of at least one character")
        self._token_bytes = tokenizer.token_bytes
        self._hidden_ids = self._token_bytes.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        begins_text = all(token_id in self._hidden_ids for token_id in prompt_ids)
        self._spaces_to_strip = self._token_bytes.num_leading_spaces if begins_text else 0
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._include_stop_str = include_stop_str
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text."""

    def push(self, token_id: int) -> str:
        """The text that became certain with `token_id`; empty after a stop string."""
        if self.stopped is not None or token_id in self._hidden_ids:
            return ""
        return self._add(self._utf8.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """The text that was still held back. U+FFFD stands for a character left incomplete."""
        if self.stopped is not None:
            return ""
        text = self._add(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _add(self, text: str) -> str:
        """Takes `text` in and returns what can be given out."""
        text = self._held + self._strip_start(text)
        ends = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if ends:
            end, start, self.stopped = min(ends)
            self._held = ""
            return text[: end if self._include_stop_str else start]
        split = len(text) - self._num_to_hold(text)
        self._held = text[split:]
        return text[:split]

    def _num_to_hold(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop string begins."""
        for length in range(min(len(text), self._longest_stop - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _strip_start(self, text: str) -> str:
        while text and self._spaces_to_strip:
            if text[0] != " ":
                self._spaces_to_strip = 0
            else:
                text = text[1:]
                self._spaces_to_strip -= 1
        return text
