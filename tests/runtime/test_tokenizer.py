"""Tokenizers of Hugging Face folders and GGUF files."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from echokernels.runtime.gguf_tokenizer import merges_from_scores
from echokernels.runtime.pre_tokenizers import byte_level_pre_tokenizer
from echokernels.runtime.tokenizer import Tokenizer, load_tokenizer
from tests.runtime.model_files import (
    SENTENCEPIECE_PIECES,
    SPECIAL_TOKENS,
    byte_level_backend,
    finish_gguf,
    gguf_writer,
    sentencepiece_vocabulary,
    write_json,
)

GOLDEN = Path(__file__).parents[1] / "data" / "smollm2_golden_fp32.json"
# Digits, contractions, spaces of every kind, scripts of 1 to 4 bytes, joined emoji, a combining
# accent, a NUL, and special tokens inside a text.
TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "12345 and 6.78e9 ½ ² Ⅷ ٣",
    "I'm you're WE'LL don't",
    "\n\n\t x\r\n  multiple   spaces\u00a0\u3000",
    "日本語テスト 世界",
    "😀👩‍👩‍👧 emoji",
    "naïve cafe\u0301\x00\u200b\ufeff",
    "def f(x):\n    return x**2\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>",
]


@pytest.fixture(scope="module")
def backend() -> Backend:
    return byte_level_backend()


@pytest.fixture
def folder(tmp_path: Path, backend: Backend) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_byte_level_gguf(
    path: Path,
    backend: Backend,
    pre: str | None,
    chat_template: str | None = None,
    **flags: bool,
) -> Path:
    """`backend` as the metadata of a GGUF file without tensors."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer = gguf_writer(path)
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    finish_gguf(writer)
    return path


def write_sentencepiece_gguf(path: Path, **flags: bool) -> Path:
    tokens, scores, types = sentencepiece_vocabulary()
    writer = gguf_writer(path)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    finish_gguf(writer)
    return path


# --- Hugging Face folders ---


@pytest.mark.parametrize("text", TEXTS)
def test_folder_round_trip(folder: Path, backend: Backend, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)


def test_special_tokens_in_text_become_their_ids(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_special_tokens_around_a_text_can_be_left_out(folder: Path, backend: Backend) -> None:
    with_bos = Backend.from_str(backend.to_str())
    with_bos.post_processor = processors.TemplateProcessing(
        single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", 1)]
    )
    with_bos.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    plain = backend.encode("the sea").ids
    assert tokenizer.encode("the sea") == [1, *plain]
    assert tokenizer.encode("the sea", add_special_tokens=False) == plain


def test_truncation_and_padding_of_a_training_run_are_ignored(
    folder: Path, backend: Backend
) -> None:
    trained = Backend.from_str(backend.to_str())
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    trained.save(str(folder / "tokenizer.json"))
    text = "the sea the sky the sun"
    assert load_tokenizer(folder).encode(text) == backend.encode(text).ids


def test_ids_of_special_tokens(folder: Path) -> None:
    assert load_tokenizer(folder).bos_token_id is None
    assert load_tokenizer(folder).eos_token_ids == ()
    # Both ways in which files write a token; the map is the older file and gives way.
    write_json(folder / "special_tokens_map.json", {"bos_token": "<|im_start|>", "eos_token": "x"})
    write_json(folder / "tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}})
    write_json(folder / "config.json", {"eos_token_id": 9})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2, 9)
    write_json(folder / "generation_config.json", {"eos_token_id": [0, 2]})
    assert load_tokenizer(folder).eos_token_ids == (2, 0)


@pytest.mark.parametrize("eos", ["x", [1, "x"], -1, True, {}])
def test_eos_that_is_no_id(folder: Path, eos: object) -> None:
    write_json(folder / "generation_config.json", {"eos_token_id": eos})
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id is"):
        load_tokenizer(folder)


MESSAGES = [{"role": "user", "content": "hi"}]


def test_chat_template_of_a_folder(folder: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(folder).apply_chat_template(MESSAGES)
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "named"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": named})
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == "named"
    template = "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}"
    config = {"chat_template": template, "bos_token": "<|im_start|>"}
    write_json(folder / "tokenizer_config.json", config)
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == "<|im_start|>hiTrue"
    (folder / "chat_template.jinja").write_text("own file {{ eos_token is defined }}")
    assert load_tokenizer(folder).apply_chat_template(MESSAGES) == "own file False"


def test_chat_template_of_another_kind(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"chat_template": 3})
    with pytest.raises(ValueError, match="chat_template is of type int"):
        load_tokenizer(folder)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json: file not found"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"absent.*nothing there.*tokenizer.json.*\.gguf"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer.json: "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("x", " "), decoders.ByteFallback()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    ],
)
def test_decoder_of_another_family(folder: Path, decoder: decoders.Decoder | None) -> None:
    other = Backend(models.BPE())
    if decoder is not None:
        other.decoder = decoder
    other.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"decoder .* is not supported; supported are ByteLevel"):
        load_tokenizer(folder)


def test_text_that_cannot_be_encoded(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    with pytest.raises(ValueError, match="lone surrogate at index 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TypeError, match="text is of type bytes"):
        tokenizer.encode(b"a")


def test_ids_that_are_no_tokens(backend: Backend) -> None:
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == backend.get_vocab_size()
    a = tokenizer.encode("a")
    assert tokenizer.decode([*a, tokenizer.vocab_size, 10**6, *a]) == "aa"
    with pytest.raises(ValueError, match="token id -1"):
        tokenizer.decode([-1])


BACKEND = byte_level_backend()  # 400 tokens


# Some ids are beyond the vocabulary.
@given(st.lists(st.integers(0, 410), max_size=30), st.booleans())
def test_byte_level_decode_is_the_library_s(ids: list[int], skip: bool) -> None:
    tokenizer = Tokenizer(BACKEND)
    assert tokenizer.decode(ids, skip) == BACKEND.decode(ids, skip_special_tokens=skip)


def test_added_token_is_plain_text_also_in_the_byte_alphabet(backend: Backend) -> None:
    # "é" is a character of the byte alphabet, where it would be the byte 0xE9 and no UTF-8.
    added = Backend.from_str(backend.to_str())
    added.add_tokens(["<é>"])
    tokenizer = Tokenizer(added)
    ids = tokenizer.encode("x<é>y")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "x<é>y"


# --- GGUF, byte level ---

PRE_TOKENIZER_TEXT = "I'm 1234  5\n\nx=y"
PRE_TOKENIZER_WORDS = {
    # GPT-2: one space goes with what follows it, other spaces stay behind.
    "gpt-2": ["I", "'m", " 1234", " ", " 5", "\n", "\n", "x", "=", "y"],
    "default": ["I", "'m", " 1234", " ", " 5", "\n", "\n", "x", "=", "y"],
    # Single digits first, so that no space goes with one.
    "smollm": ["I", "'m", " ", "1", "2", "3", "4", "  ", "5", "\n", "\n", "x", "=", "y"],
    # Digits in threes; a sign goes with the letters after it; line breaks stay together.
    "llama-bpe": ["I", "'m", " ", "123", "4", " ", " ", "5", "\n\n", "x", "=y"],
    "qwen2": ["I", "'m", " ", "1", "2", "3", "4", " ", " ", "5", "\n\n", "x", "=y"],
}


@pytest.mark.parametrize("name", PRE_TOKENIZER_WORDS)
def test_pre_tokenizer(name: str) -> None:
    _, pre_tokenizer = byte_level_pre_tokenizer(name)
    words = [word for word, _ in pre_tokenizer.pre_tokenize_str(PRE_TOKENIZER_TEXT)]
    as_written = str.maketrans({"Ġ": " ", "Ċ": "\n"})
    assert [word.translate(as_written) for word in words] == PRE_TOKENIZER_WORDS[name]


def test_unknown_pre_tokenizer(tmp_path: Path, backend: Backend) -> None:
    path = write_byte_level_gguf(tmp_path / "m.gguf", backend, "deepseek-v9")
    with pytest.raises(ValueError, match=r"m\.gguf: .*'deepseek-v9'.* gpt-2, smollm, llama-bpe"):
        load_tokenizer(path)


@pytest.mark.parametrize("pre", ["gpt-2", None])
@pytest.mark.parametrize("text", TEXTS)
def test_gguf_gives_the_ids_of_the_tokenizer_it_was_made_from(
    tmp_path: Path, backend: Backend, text: str, pre: str | None
) -> None:
    tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / "m.gguf", backend, pre))
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.vocab_size == backend.get_vocab_size()


@pytest.mark.parametrize("pre", PRE_TOKENIZER_WORDS)
@pytest.mark.parametrize("text", TEXTS)
def test_gguf_round_trip(tmp_path: Path, backend: Backend, text: str, pre: str) -> None:
    if pre == "qwen2":
        text = text.replace("e\u0301", "é")  # this model composes characters (NFC)
    tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / "m.gguf", backend, pre))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_qwen2_composes_characters(tmp_path: Path, backend: Backend) -> None:
    tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / "m.gguf", backend, "qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_llama3_takes_a_word_that_is_a_token_as_it_is(tmp_path: Path) -> None:
    # No merge leads to "abc": only the rule that words which are tokens are not merged finds it.
    vocab = {"a": 0, "b": 1, "c": 2, "bc": 3, "abc": 4}
    backend = Backend(models.BPE(vocab, [("b", "c")]))
    backend.decoder = decoders.ByteLevel()
    for pre, expected in (("llama-bpe", [4]), ("gpt-2", [0, 3])):
        tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / f"{pre}.gguf", backend, pre))
        assert tokenizer.encode("abc", add_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, [1], []),  # by convention, where the file does not say
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_gguf_special_tokens_around_a_text(
    tmp_path: Path,
    backend: Backend,
    pre: str,
    flags: dict[str, bool],
    before: list[int],
    after: list[int],
) -> None:
    tokenizer = load_tokenizer(write_byte_level_gguf(tmp_path / "m.gguf", backend, pre, **flags))
    plain = tokenizer.encode("the sea", add_special_tokens=False)
    assert tokenizer.encode("the sea") == [*before, *plain, *after]


def test_gguf_chat_template(tmp_path: Path, backend: Backend) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    path = write_byte_level_gguf(tmp_path / "m.gguf", backend, "gpt-2", chat_template=template)
    tokenizer = load_tokenizer(path)
    assert tokenizer.apply_chat_template(MESSAGES) == "<|im_start|>hi<|im_end|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "2 tokens, 1 of them different"),
        ({"tokens": ["a", "b"], "token_type": [1]}, "have 1 token types"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"merges": ["ab"]}, "merge .*ab.* must be two tokens"),
        ({"merges": ["a z"]}, "not a usable tokenizer: .*z"),
        ({"model": "rwkv"}, "model 'rwkv' is not supported, must be one of .*gpt2.*llama"),
        ({"model": "llama", "scores": [0.0]}, "3 tokens have 1 scores"),
        ({"bos_token_id": 3}, "special token 3: 3 tokens exist"),
    ],
)
def test_gguf_vocabulary_that_is_damaged(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    fields = {"model": "gpt2", "tokens": ["a", "b", "ab"], "merges": ["a b"]} | change
    writer = gguf_writer(tmp_path / "m.gguf")
    for name, value in fields.items():
        add = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}
        if value is not None:
            add[type(value)](f"tokenizer.ggml.{name}", value)
    finish_gguf(writer)
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}"):
        load_tokenizer(tmp_path / "m.gguf")


# --- GGUF, sentencepiece ---

FIRST_BYTE = 3  # the id of the token for byte 0
FIRST_PIECE = FIRST_BYTE + 256


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_sentencepiece_gguf(tmp_path_factory.mktemp("spm") / "m.gguf"))


def merge_by_scores(text: str, scores: dict[str, float]) -> list[str]:
    """Sentencepiece's BPE, word for word: join the best-scored pair, leftmost first, until none."""
    pieces = list(text)
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        known = [(scores[piece], -i) for i, piece in enumerate(joined) if piece in scores]
        if not known:
            return pieces
        at = -max(known)[1]
        pieces[at : at + 2] = [joined[at]]


# Every character of the alphabet is a piece, so that bytes stay out of it.
@given(text=st.text("theringaos. ", max_size=24))
def test_merges_derived_from_scores_give_sentencepiece_s_tokens(
    sentencepiece: Tokenizer, text: str
) -> None:
    scores = {piece: -float(i) for i, piece in enumerate(SENTENCEPIECE_PIECES)}
    pieces = merge_by_scores(("▁" + text).replace(" ", "▁"), scores) if text else []
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert ids == [FIRST_PIECE + SENTENCEPIECE_PIECES.index(piece) for piece in pieces]
    assert sentencepiece.decode(ids) == text


def test_merges_from_scores_by_hand() -> None:
    scores = {"a": -3.0, "b": -4.0, "c": -5.0, "bc": -2.0, "abc": -1.0, "ab": -6.0}
    assert merges_from_scores(scores) == [("a", "bc"), ("ab", "c"), ("b", "c"), ("a", "b")]


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_sentencepiece_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert ids[0] == 1  # by convention, where the file does not say
    assert sentencepiece.decode(ids) == text


def test_sentencepiece_writes_what_it_has_no_piece_for_in_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("世", add_special_tokens=False)
    mark = FIRST_PIECE + SENTENCEPIECE_PIECES.index("▁")
    assert ids == [mark, *(FIRST_BYTE + byte for byte in "世".encode())]


def test_sentencepiece_special_tokens_in_text(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("the</s>", add_special_tokens=False)
    assert ids == [FIRST_PIECE + SENTENCEPIECE_PIECES.index("▁the"), 2]
    # A byte's name that a user types is text like any other.
    assert sentencepiece.decode(sentencepiece.encode("<0x41>")) == "<0x41>"


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        write_sentencepiece_gguf(tmp_path / "m.gguf", add_space_prefix=False)
    )
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the"
    assert FIRST_PIECE + SENTENCEPIECE_PIECES.index("▁the") not in ids
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_bytes_that_are_no_utf8_leave_their_neighbours_alone(sentencepiece: Tokenizer) -> None:
    ids = [FIRST_BYTE + byte for byte in "世".encode() + b"\xff" + "世".encode()[:2]]
    assert sentencepiece.decode(ids) == "世\ufffd\ufffd"


# --- the demo model ---


@pytest.fixture(scope="module")
def demo_tokenizer(demo_model: Path) -> Tokenizer:
    return load_tokenizer(demo_model)


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["prompt"])
def test_demo_model_golden(demo_tokenizer: Tokenizer, case: dict[str, object]) -> None:
    messages = [{"role": "user", "content": case["prompt"]}]
    prompt = demo_tokenizer.apply_chat_template(messages)
    assert demo_tokenizer.encode(prompt, add_special_tokens=False) == case["prompt_ids"]
    assert demo_tokenizer.decode(case["gen_ids"], skip_special_tokens=False) == case["text"]
    assert demo_tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize("text", TEXTS)
def test_demo_model_round_trip(demo_tokenizer: Tokenizer, text: str) -> None:
    ids = demo_tokenizer.encode(text)
    assert demo_tokenizer.decode(ids, skip_special_tokens=False) == text
