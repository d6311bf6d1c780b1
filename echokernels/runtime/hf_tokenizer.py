"""The tokenizer of a Hugging Face folder.

`tokenizer.json` has the whole algorithm. What else is needed is spread over its neighbours: the
text of special tokens (`tokenizer_config.json`, else `special_tokens_map.json`), ids that end a
generation (`generation_config.json`, `config.json`), and the chat template (`chat_template.jinja`,
else `tokenizer_config.json`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers

from echokernels.runtime.chat_template import ChatTemplate
from echokernels.runtime.json_file import read_json, read_optional_json
from echokernels.runtime.tokenizer import Tokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_hf_tokenizer(path: Path) -> Tokenizer:
    """Raises ValueError, with the path, if `tokenizer.json` is missing or anything is damaged."""
    file = path / "tokenizer.json"
    read_json(file)  # bounds the size, and tells a missing file from a bad one
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as exc:  # the class that `tokenizers` raises
        raise ValueError(f"{file}: not a usable tokenizer: {exc}") from exc
    config = read_optional_json(path / "tokenizer_config.json")
    special_tokens = _special_tokens(path, config)
    try:
        return Tokenizer(
            backend,
            bos_token_id=_token_id(backend, special_tokens.get("bos_token")),
            eos_token_ids=_eos_token_ids(path, backend, special_tokens.get("eos_token")),
            chat_template=_chat_template(path, config, special_tokens),
        )
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    fields = read_optional_json(path / "special_tokens_map.json") | config
    texts = {}
    for name in _SPECIAL_TOKENS:
        token = fields.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def _token_id(backend: tokenizers.Tokenizer, text: str | None) -> int | None:
    return None if text is None else backend.token_to_id(text)


def _eos_token_ids(
    path: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    """The tokenizer's own, then those of the generation configuration, else of the model's."""
    own = _token_id(backend, eos_token)
    ids = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json(path / name).get("eos_token_id")
        if value is not None:
            ids += _checked_ids(name, value)
            break
    return tuple(dict.fromkeys(ids))


def _checked_ids(file_name: str, value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"{file_name}: eos_token_id is {value!r}, must be an id or a list of ids")
    return ids


def _chat_template(
    path: Path, config: dict[str, Any], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    file = path / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # named templates: [{"name": ..., "template": ...}, ...]
        named = [entry for entry in source if isinstance(entry, dict)]
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"chat_template is of type {type(source).__name__}, must be a string")
    return ChatTemplate(source, special_tokens)
