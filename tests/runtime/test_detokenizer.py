"""Streaming: equal to decoding all at once, never a part of a character or of a stop string."""

from itertools import chain

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from echokernels.runtime.detokenizer import IncrementalDetokenizer
from echokernels.runtime.tokenizer import Tokenizer
from tests.runtime.model_files import byte_level_backend, sentencepiece_vocabulary

# Space, newline, bytes of UTF-8 characters that are 2, 3 and 4 long, and a byte that never occurs.
_ALPHABET = {0x20: "Ġ", 0x0A: "Ċ", 0x96: "ĸ", 0x98: "ĺ", 0x9F: "Ł", 0x80: "Ģ", 0x84: "Ħ"}


def byte_level(*pieces: bytes) -> Tokenizer:
    """A byte-level tokenizer whose ids 0, 1, ... are `pieces`."""

    def written(piece: bytes) -> str:
        return "".join(_ALPHABET.get(byte, chr(byte)) for byte in piece)

    backend = Backend(models.BPE({written(piece): i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in range(len(pieces))] == [*pieces]
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokens, _, _ = sentencepiece_vocabulary()
    backend = Backend(models.BPE({t: i for i, t in enumerate(tokens)}, [], byte_fallback=True))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend)


BYTE_LEVEL = Tokenizer(byte_level_backend())
SENTENCEPIECE = sentencepiece()
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"]
)


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    """What each token gives, and at the end what `finish` gives."""
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, and texts: random bytes alone would hardly ever make a character."""
    token_ids = st.lists(st.integers(0, tokenizer.vocab_size), max_size=20)
    texts = st.text("aé世😀 the.", max_size=8).map(lambda text: tokenizer.encode(text, False))
    return st.lists(token_ids | texts, max_size=4).map(lambda parts: [*chain(*parts)])


@TOKENIZERS
@given(data=st.data(), skip=st.booleans())
def test_stream_equals_decoding_all_at_once(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(ids_of(tokenizer))
    deltas = stream(IncrementalDetokenizer(tokenizer, [], skip), ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip)


@TOKENIZERS
@given(data=st.data())
def test_text_comes_as_soon_as_it_is_certain(tokenizer: Tokenizer, data: st.DataObject) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = data.draw(ids_of(tokenizer))
    text = ""
    for n, token_id in enumerate(ids, 1):
        text += detokenizer.push(token_id)
        # Missing is at most one character that is still incomplete, which decodes to one U+FFFD.
        assert tokenizer.decode(ids[:n]) in (text, text + "\ufffd")


A36_SPLITS = {
    "3 bytes over 2 tokens": ([b"A \xe4", b"\xb8\x96", b"b"], ["A ", "世", "b"]),
    "3 bytes over 3 tokens": ([b"\xe4", b"\xb8", b"\x96b"], ["", "", "世b"]),
    "4 bytes over 2 tokens": ([b"\xf0\x9f", b"\x98\x80"], ["", "😀"]),
    "4 bytes over 3 tokens": ([b"a\xf0", b"\x9f\x98", b"\x80b"], ["a", "", "😀b"]),
    "4 bytes over 4 tokens": ([b"\xf0", b"\x9f", b"\x98", b"\x80"], ["", "", "", "😀"]),
    # The end of one character and the beginning of the next in one token, twice: with "?" for the
    # incomplete part, decoding gives "A 世?", "A 世é?", "A 世éé".
    "rolling": ([b"A \xe4\xb8\x96\xc3", b"\xa9\xc3", b"\xa9"], ["A 世", "é", "é"]),
}


@pytest.mark.parametrize(("pieces", "deltas"), A36_SPLITS.values(), ids=[*A36_SPLITS])
def test_a36_character_split_over_tokens(pieces: list[bytes], deltas: list[str]) -> None:
    distinct = list(dict.fromkeys(pieces))
    ids = [distinct.index(piece) for piece in pieces]
    tokenizer = byte_level(*distinct)
    assert stream(IncrementalDetokenizer(tokenizer), ids) == [*deltas, ""]
    assert tokenizer.decode(ids) == "".join(deltas)


def test_a36_bytes_that_stay_invalid() -> None:
    tokenizer = byte_level(b"a\xe4\xb8", b"b", b"\xff", b"\xf0\x9f")
    # Certain as soon as the next byte cannot go on with the character; else at the end.
    assert stream(IncrementalDetokenizer(tokenizer), [0, 1]) == ["a", "\ufffdb", ""]
    assert stream(IncrementalDetokenizer(tokenizer), [2, 1]) == ["\ufffd", "b", ""]
    assert stream(IncrementalDetokenizer(tokenizer), [1, 3]) == ["b", "", "\ufffd"]


def test_a36_replacement_character_that_the_model_wrote_itself() -> None:
    tokenizer = byte_level("\ufffd".encode(), b"b")
    assert stream(IncrementalDetokenizer(tokenizer), [0, 0, 1]) == ["\ufffd", "\ufffd", "b", ""]


def test_a36_sentencepiece_bytes() -> None:
    first_byte = 3
    ids = [first_byte + byte for byte in "世😀".encode()]
    deltas = stream(IncrementalDetokenizer(SENTENCEPIECE), ids)
    assert deltas == ["", "", "世", "", "", "", "😀", ""]


def piece_id(piece: str) -> int:
    return sentencepiece_vocabulary()[0].index(piece)


@pytest.mark.parametrize(
    ("prompt", "skip", "text"),
    [
        ([], True, "the the"),  # the beginning of a text: encoding had added the space
        ([1], True, "the the"),  # an unseen <s> begins nothing
        ([1], False, " the the"),  # a visible one does
        (["▁a"], True, " the the"),  # goes on from the prompt
    ],
)
def test_leading_space_of_sentencepiece(prompt: list[int | str], skip: bool, text: str) -> None:
    prompt_ids = [piece_id(p) if isinstance(p, str) else p for p in prompt]
    ids = [piece_id("▁the")] * 2
    deltas = stream(IncrementalDetokenizer(SENTENCEPIECE, prompt_ids, skip), ids)
    assert "".join(deltas) == text
    whole = SENTENCEPIECE.decode(prompt_ids + ids, skip)
    assert whole == SENTENCEPIECE.decode(prompt_ids, skip) + text


def test_special_tokens() -> None:
    ids = [1, *BYTE_LEVEL.encode("a"), 2]
    assert stream(IncrementalDetokenizer(BYTE_LEVEL), ids) == ["", "a", "", ""]
    shown = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=False)
    assert stream(shown, ids) == ["<|im_start|>", "a", "<|im_end|>", ""]


def test_each_token_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a token does not grow with the output, not even while nothing is certain."""
    tokenizer = byte_level(b"\x80", b"a")
    looked_at = []
    original = tokenizer.token_bytes

    class Counting:
        special_ids: frozenset[int] = frozenset()
        num_leading_spaces = 0

        def __call__(self, token_id: int) -> bytes:
            looked_at.append(token_id)
            return original(token_id)

    monkeypatch.setattr(tokenizer, "token_bytes", Counting())
    ids = [0] * 500 + [1] * 500
    stream(IncrementalDetokenizer(tokenizer, prompt_ids=[1] * 100, stop=("b",)), ids)
    assert looked_at == ids


# --- stop strings ---


def test_a33_stop_string_over_token_borders() -> None:
    tokenizer = byte_level(b"ab", b"cST", b"OPde")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("STOP",))
    assert stream(detokenizer, [0, 1, 2]) == ["ab", "c", "", ""]
    assert detokenizer.stopped == "STOP"


def test_a33_stop_string_may_be_included() -> None:
    tokenizer = byte_level(b"ab", b"cST", b"OPde")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("STOP",), include_stop_str=True)
    assert stream(detokenizer, [0, 1, 2]) == ["ab", "c", "STOP", ""]
    assert detokenizer.stopped == "STOP"


def test_a33_held_text_is_given_out_when_it_was_no_stop_string() -> None:
    tokenizer = byte_level(b"ab", b"cST", b"OXde")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("STOP",))
    assert stream(detokenizer, [0, 1, 2]) == ["ab", "c", "STOXde", ""]
    assert stream(IncrementalDetokenizer(tokenizer, stop=("STOP",)), [1]) == ["c", "ST"]
    assert detokenizer.stopped is None


@pytest.mark.parametrize(
    ("text", "stop", "before", "stopped"),
    [
        ("aab.", ("ab",), "a", "ab"),  # the first "a" may be held, the second begins it
        ("abcd", ("bcd", "c"), "ab", "c"),  # complete first
        ("abcd", ("d", "cd", "bcd"), "a", "bcd"),  # complete at once: the longest
        ("xaxb", ("b", "a"), "x", "a"),  # their order says nothing
        ("a世b", ("世",), "a", "世"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 9])  # bytes per token: also inside a character
def test_which_stop_string_counts(
    text: str, stop: tuple[str, ...], before: str, stopped: str, size: int
) -> None:
    content = text.encode()
    pieces = [content[i : i + size] for i in range(0, len(content), size)]
    distinct = list(dict.fromkeys(pieces))
    detokenizer = IncrementalDetokenizer(byte_level(*distinct), stop=stop)
    ids = [distinct.index(piece) for piece in pieces]
    assert ("".join(stream(detokenizer, ids)), detokenizer.stopped) == (before, stopped)


def test_stop_string_that_ends_with_an_incomplete_character() -> None:
    tokenizer = byte_level(b"a", b"\xe4\xb8")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("a\ufffd",))
    assert stream(detokenizer, [0, 1]) == ["", "", ""]
    assert detokenizer.stopped == "a\ufffd"


def test_tokens_after_the_stop_add_nothing() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(b"a", b"b"), stop=("a",))
    assert [detokenizer.push(i) for i in (1, 0, 1, 1)] == ["b", "", "", ""]
    assert detokenizer.finish() == ""


def test_empty_stop_string() -> None:
    with pytest.raises(ValueError, match=r"stop is \('a', ''\), must be strings"):
        IncrementalDetokenizer(BYTE_LEVEL, stop=("a", ""))


# Few letters and a few fixed stops, so that they overlap and occur.
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
    stop=STOPS,
    include=st.booleans(),
)
@example(pieces=["aab", "aa", "b"], stop=("aabaab",), include=False)
def test_a33_any_stop_strings_and_any_borders(
    pieces: list[str], stop: tuple[str, ...], include: bool
) -> None:
    distinct = list(dict.fromkeys(pieces))
    detokenizer = IncrementalDetokenizer(
        byte_level(*(piece.encode() for piece in distinct)), stop=stop, include_stop_str=include
    )
    expected, stopped = cut_at_stop("".join(pieces), stop, include)
    given_out = ""
    for n, piece in enumerate(pieces, 1):
        given_out += detokenizer.push(distinct.index(piece))
        assert expected.startswith(given_out)
        if detokenizer.stopped is None:
            held = "".join(pieces[:n]).removeprefix(given_out)
            assert not held or any(text.startswith(held) for text in stop)
    assert given_out + detokenizer.finish() == expected
    assert detokenizer.stopped == stopped


def cut_at_stop(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The rule, letter by letter: the longest stop string with which the text read so far ends."""
    for end in range(1, len(text) + 1):
        for found in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(found):
                return text[: end if include else end - len(found)], found
    return text, None
