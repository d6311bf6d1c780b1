"""The bytes that each token stands for.

In both families of tokenizers that language models use, a token is a string of bytes and the text
of a sequence is the join of its tokens' bytes, read as UTF-8:

- byte level (GPT-2): every byte is written as one printable character of the vocabulary, so that
  `Ġ` stands for the space. Source: Radford et al., "Language Models are Unsupervised Multitask
  Learners", 2019.
- sentencepiece: `▁` stands for the space, `<0xE4>` for a byte. The leading space that encoding
  adds is taken from the start of a text.

This makes decoding exact under streaming: an incremental UTF-8 decoder over the bytes gives the
same text as decoding all at once, at constant cost per token. Bytes that are no UTF-8 become
U+FFFD, one for each maximal part of a character, and leave their neighbours alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class TokenBytes:
    """Maps token ids to bytes for the decoder of a `tokenizers.Tokenizer`.

    `num_leading_spaces` is how many spaces a text loses at its start. Raises ValueError for a
    decoder of another family.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = json.loads(backend.to_str())["decoder"]
        self._piece_to_bytes, self.num_leading_spaces = _read_decoder(decoder)
        self._bytes: dict[int, bytes] = {}
        if self._piece_to_bytes is _byte_level_piece:  # added tokens are not in its alphabet
            self._bytes = {token_id: token.content.encode() for token_id, token in added.items()}

    def __call__(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id without a token (models pad their vocabulary).

        Raises ValueError for a negative id.
        """
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if token_id < 0:
            raise ValueError(f"token id {token_id}: ids must be at least 0")
        piece = self._backend.id_to_token(token_id)
        result = b"" if piece is None else self._piece_to_bytes(piece)
        self._bytes[token_id] = result
        return result

    def join(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """The bytes of a whole text, before any leading space is removed."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self(token_id) for token_id in token_ids if token_id not in hidden)


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:  # a token that was put into the vocabulary as plain text
        return piece.encode()


def _sentencepiece_piece(piece: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(_SPACE_MARK, " ").encode()


def _read_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """The family of a `tokenizer.json` decoder: (piece -> bytes, spaces removed at the start)."""
    steps = (decoder or {}).get("decoders", [decoder])
    kinds = {step["type"] for step in steps if step}
    if kinds == {"ByteLevel"}:
        return _byte_level_piece, 0
    # "Metaspace" or a replacement is what says that the mark is a space; the others are optional.
    if kinds & {"Metaspace", "Replace"} and all(_is_sentencepiece_step(step) for step in steps):
        return _sentencepiece_piece, sum(_stripped_spaces(step) for step in steps)
    raise ValueError(
        f"tokenizer decoder {json.dumps(decoder)[:200]} is not supported; supported are ByteLevel "
        "and the sentencepiece steps Replace, ByteFallback, Fuse, Strip and Metaspace"
    )


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteFallback" | "Fuse"}:
            return True
        case {"type": "Replace", "pattern": {"String": mark}, "content": " "}:
            return mark == _SPACE_MARK
        case {"type": "Strip", "content": " ", "stop": 0}:
            return True
        case {"type": "Metaspace", "replacement": mark}:
            return mark == _SPACE_MARK
        case _:
            return False


def _stripped_spaces(step: dict[str, Any]) -> int:
    match step:
        case {"type": "Strip", "start": start}:
            return start
        case {"type": "Metaspace", "prepend_scheme": "always" | "first"}:
            return 1
        case _:
            return 0
