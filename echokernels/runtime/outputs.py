"""What comes back from a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from echokernels.runtime.stopping import FinishReason


@dataclass(slots=True)
class RequestMetrics:
    """Moments on the clock of `time.perf_counter`, in seconds; None if not reached."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival, queueing included."""
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of one request. The engine keeps it up to date until `finish_reason` is set.

    `text` may lag behind `token_ids`: incomplete characters, and what may become a stop string, are
    held back.
    """

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    metrics: RequestMetrics
    text: str = ""
    """Without the stop token or stop string, unless `include_stop_str_in_output`."""
    token_ids: list[int] = field(default_factory=list)
    """With the stop token or the tokens of the stop string."""
    finish_reason: FinishReason | None = None
    """"stop", "length", "abort" or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The one of `stop_token_ids` or `stop` that was met; None for end of sequence."""
    error: str | None = None
    """What was wrong, where `finish_reason` is "error"."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens after the first, over the time they took; None with fewer than two."""
        metrics = self.metrics
        if len(self.token_ids) < 2 or metrics.first_token_time is None:
            return None
        if metrics.finished_time is None:
            return None
        return (len(self.token_ids) - 1) / (metrics.finished_time - metrics.first_token_time)
