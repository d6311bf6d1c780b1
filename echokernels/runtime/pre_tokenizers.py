"""How byte-level BPE models cut text into words before merging, by the name that GGUF files use.

Patterns are those of the models' own published `tokenizer.json` files; each model was trained with
one, so they are data, not a choice.
"""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

# Contractions | letters with one leading sign | digits | signs | line breaks | spaces.
# Llama 3 (Meta) and Qwen 2 (Alibaba) differ in how many digits make a word.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_pattern(digits: str) -> PreTokenizer:
    cut = pre_tokenizers.Split(Regex(_PATTERN.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


_BUILDERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": lambda: _by_pattern(r"\p{N}{1,3}"),
    "qwen2": lambda: _by_pattern(r"\p{N}"),
}


def byte_level_pre_tokenizer(name: str) -> tuple[Normalizer | None, PreTokenizer]:
    """The normalizer, if the model has one, and the pre-tokenizer of `name`.

    Raises ValueError for an unknown name.
    """
    if name not in _BUILDERS:
        raise ValueError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known, "
            f"must be one of {', '.join(_BUILDERS)}"
        )
    normalizer = normalizers.NFC() if name == "qwen2" else None
    return normalizer, _BUILDERS[name]()
