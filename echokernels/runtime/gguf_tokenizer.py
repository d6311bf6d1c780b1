"""The tokenizer that the metadata of a GGUF file describes, built from parts of `tokenizers`.

GGUF has two kinds that llama-like models use:

- `gpt2`: byte-level BPE with a list of merges; `tokenizer.ggml.pre` names how text is cut first.
- `llama`: sentencepiece BPE. It has scores instead of merges: of all neighbours that join to a
  token, those with the highest score join first. So the merges are all ways to cut a token in two
  other tokens, by falling score.

Source: the GGUF specification of the ggml project; Kudo and Richardson, "SentencePiece", 2018.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    processors,
)
from tokenizers import (
    Tokenizer as Backend,
)

from echokernels.runtime.chat_template import ChatTemplate
from echokernels.runtime.gguf_config import bos_token_id, eos_token_ids
from echokernels.runtime.gguf_file import GGUFFile, read_gguf
from echokernels.runtime.pre_tokenizers import byte_level_pre_tokenizer
from echokernels.runtime.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml"
_SPACE_MARK = "\u2581"


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Raises ValueError, with the path, for a damaged file or an unsupported kind of tokenizer."""
    return tokenizer_from_gguf(read_gguf(path))


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Raises ValueError, with the path, for an unsupported kind or metadata that disagree."""
    tokens = _list(file, "tokens")
    token_types = _list(file, "token_type", [TokenType.NORMAL] * len(tokens))
    if len(token_types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"{file.path}: {len(tokens)} tokens, {len(set(tokens))} of them different, have "
            f"{len(token_types)} token types; the three must be equal"
        )
    for token_id in (bos_token_id(file), *eos_token_ids(file)):
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(f"{file.path}: special token {token_id}: {len(tokens)} tokens exist")
    backend = _build_backend(file, tokens, token_types)
    _add_special_tokens(backend, tokens, token_types)
    _add_post_processor(file, backend, tokens)
    return Tokenizer(
        backend,
        bos_token_id=bos_token_id(file),
        eos_token_ids=eos_token_ids(file),
        chat_template=_chat_template(file, tokens),
    )


def _build_backend(file: GGUFFile, tokens: list[str], token_types: list[int]) -> Backend:
    kind = file.require(f"{_PREFIX}.model", str)
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in builders:
        raise ValueError(
            f"{file.path}: tokenizer model {kind!r} is not supported, must be one of {[*builders]}"
        )
    try:
        return builders[kind](file, tokens, token_types)
    except ValueError:
        raise
    except Exception as exc:  # the class that `tokenizers` raises
        raise ValueError(f"{file.path}: not a usable tokenizer: {exc}") from exc


def _byte_level_bpe(file: GGUFFile, tokens: list[str], _token_types: list[int]) -> Backend:
    merges = [tuple(merge.split(" ", 1)) for merge in _list(file, "merges")]
    if bad := [merge for merge in merges if len(merge) != 2]:
        raise ValueError(f"{file.path}: merge {bad[0]!r} must be two tokens with a space between")
    pre_tokenizer = _pre_tokenizer_name(file)
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, even where its merges would not lead there.
    ignore_merges = pre_tokenizer == "llama-bpe"
    backend = Backend(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    try:
        normalizer, backend.pre_tokenizer = byte_level_pre_tokenizer(pre_tokenizer)
    except ValueError as exc:
        raise ValueError(f"{file.path}: {exc}") from exc
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer_name(file: GGUFFile) -> str:
    return file.get(f"{_PREFIX}.pre", str, "default")


def _sentencepiece_bpe(file: GGUFFile, tokens: list[str], token_types: list[int]) -> Backend:
    scores = _list(file, "scores")
    if len(scores) != len(tokens):
        raise ValueError(f"{file.path}: {len(tokens)} tokens have {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    mergeable = {
        token: score
        for token, score, kind in zip(tokens, scores, token_types, strict=True)
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    unknown = [t for t, kind in zip(tokens, token_types, strict=True) if kind == TokenType.UNKNOWN]
    model = models.BPE(
        vocab,
        merges_from_scores(mergeable),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE_MARK)]
    steps: list[Any] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if file.get(f"{_PREFIX}.add_space_prefix", bool, True):
        spaces.insert(0, normalizers.Prepend(_SPACE_MARK))
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, those of the highest score first."""
    merges = []
    for token in sorted(scores, key=scores.__getitem__, reverse=True):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in scores and right in scores]
    return merges


def _add_special_tokens(backend: Backend, tokens: list[str], token_types: list[int]) -> None:
    """Makes tokens that stand outside the merges be found in text as they are written."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(token, special=kind in special, normalized=False)
            for token, kind in zip(tokens, token_types, strict=True)
            if kind in (*special, TokenType.USER_DEFINED)
        ]
    )


def _add_post_processor(file: GGUFFile, backend: Backend, tokens: list[str]) -> None:
    """Encoding adds the token that begins a text, and the one that ends it, where a model asks."""
    # What files that say nothing mean, by the convention of the ggml project.
    sentencepiece = file.get(f"{_PREFIX}.model", str) == "llama"
    bos_by_default = sentencepiece or _pre_tokenizer_name(file) == "llama-bpe"
    template = ["$A"]
    special_tokens = []
    bos, eos = bos_token_id(file), next(iter(eos_token_ids(file)), None)
    if bos is not None and file.get(f"{_PREFIX}.add_bos_token", bool, bos_by_default):
        template.insert(0, tokens[bos])
        special_tokens.append((tokens[bos], bos))
    if eos is not None and file.get(f"{_PREFIX}.add_eos_token", bool, False):
        template.append(tokens[eos])
        special_tokens.append((tokens[eos], eos))
    if special_tokens:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special_tokens
        )


def _chat_template(file: GGUFFile, tokens: list[str]) -> ChatTemplate | None:
    source = file.get("tokenizer.chat_template", str)
    if source is None:
        return None
    ids = {
        "bos_token": bos_token_id(file),
        "eos_token": next(iter(eos_token_ids(file)), None),
    }
    return ChatTemplate(source, {name: tokens[i] for name, i in ids.items() if i is not None})


def _list(file: GGUFFile, name: str, default: list[Any] | None = None) -> list[Any]:
    key = f"{_PREFIX}.{name}"
    return file.require(key, list) if default is None else file.get(key, list, default)
