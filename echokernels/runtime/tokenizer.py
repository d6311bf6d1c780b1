"""Text to token ids and back, and conversations to text, for any model file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from echokernels.runtime.chat_template import ChatTemplate
from echokernels.runtime.token_bytes import TokenBytes


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a runtime needs beside it.

    `eos_token_ids` are the ids that end a generation, the principal one first. `token_bytes` maps
    a token id to its bytes. Raises ValueError for a decoder that is neither byte level nor
    sentencepiece.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        # A tokenizer.json may carry the settings of some training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.token_bytes = TokenBytes(backend)

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. A model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. Special tokens written in `text` become their ids.

        `add_special_tokens` adds those that the model wants around a text, as a rule one that
        begins it; leave it out for a rendered chat. Raises TypeError if `text` is no string and
        ValueError if it has lone surrogates, which no encoding of text can hold.
        """
        if not isinstance(text, str):
            raise TypeError(f"text is of type {type(text).__name__}; it must be a str")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise ValueError(f"text has a lone surrogate at index {exc.start}") from exc
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Bytes that are no UTF-8 become U+FFFD.

        Ids without a token are skipped. Raises ValueError for a negative id.
        """
        text = self.token_bytes.join(token_ids, skip_special_tokens).decode("utf-8", "replace")
        num_spaces = self.token_bytes.num_leading_spaces
        return text[:num_spaces].lstrip(" ") + text[num_spaces:]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for a conversation; encode it with `add_special_tokens=False`.

        See `ChatTemplate.render`. Raises ValueError if the model has no chat template.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template; give it a prompt instead of messages"
            )
        return self.chat_template.render(messages, add_generation_prompt)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a `.gguf` file.

    Raises ValueError, with the path, if it is missing, damaged or of an unsupported kind.
    """
    path = Path(path)
    # The loaders import optional packages, so that each format needs only its own.
    if path.is_dir():
        from echokernels.runtime.hf_tokenizer import load_hf_tokenizer

        return load_hf_tokenizer(path)
    if path.is_file() and path.suffix == ".gguf":
        from echokernels.runtime.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    found = "a file of another kind" if path.exists() else "nothing there"
    raise ValueError(
        f"model path {str(path)!r}: found {found}; it must be a folder with tokenizer.json, "
        "or a .gguf file"
    )
