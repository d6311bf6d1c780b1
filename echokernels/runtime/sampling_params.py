"""What a request asks for: how tokens are drawn and when to stop. Unknown fields are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echokernels.runtime._validation import (
    check_bool,
    check_int,
    check_number,
    check_str,
    check_token_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stop rules of one request. Raises TypeError or ValueError, naming the field.

    Filters apply in the order top_k, top_p, min_p, and always leave the most likely token.
    """

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 (or -1, stored as 0) keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this much probability; 0 keeps only the most likely."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    seed: int | None = None
    """Makes the request's draws reproducible, in any batch. Signed or unsigned 64 bits."""
    max_tokens: int | None = 256
    """Most output tokens; None: up to the context's length."""
    min_tokens: int = 0
    """No end-of-sequence or stop token ends the output while it has fewer tokens than this."""
    stop: tuple[str, ...] = ()
    """Texts that end the output. One str or a list is accepted, and stored as a tuple."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, also with `ignore_eos`."""
    ignore_eos: bool = False
    """The model's own end-of-sequence tokens do not end the output."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    # The __init__ that dataclass makes would not tell the value nor what is allowed.
    def __new__(cls, *_args: Any, **fields: Any) -> SamplingParams:
        unknown = ", ".join(
            f"{name}={value!r}"
            for name, value in fields.items()
            if name not in cls.__dataclass_fields__
        )
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise TypeError(f"unknown sampling field {unknown}; allowed: {allowed}")
        return object.__new__(cls)  # super() would name the class from before `slots`

    def __post_init__(self) -> None:
        self._normalise()
        check_number("temperature", self.temperature, low=0)
        check_int("top_k", self.top_k, low=0)
        check_number("top_p", self.top_p, low=0, high=1)
        check_number("min_p", self.min_p, low=0, high=1)
        if self.seed is not None:
            check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens is {self.min_tokens}, must be at most max_tokens={self.max_tokens}"
                )
        if not isinstance(self.stop, tuple):
            raise TypeError(f"stop is {self.stop!r}, must be a str, or a list or tuple of them")
        for index, text in enumerate(self.stop):
            check_str(f"stop[{index}]", text)
        check_token_ids("stop_token_ids", self.stop_token_ids)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        check_bool("skip_special_tokens", self.skip_special_tokens)

    def _normalise(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        elif isinstance(stop, list):
            object.__setattr__(self, "stop", tuple(stop))
        if isinstance(self.stop_token_ids, list):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.top_k == -1 and isinstance(self.top_k, int):
            object.__setattr__(self, "top_k", 0)
