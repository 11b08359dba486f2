"""`generate` and `stream_generate`: text in, text out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

from m2r2_jax.checkpoints.model import Model, load
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.drafters.methods import build_method
from m2r2_jax.serving.prompts import Message, fitted_prompt
from m2r2_jax.serving.session import Session
from m2r2_jax.serving.slots import answer_all
from m2r2_jax.text.tokenizer import StreamDecoder

DEFAULT_METHOD = "prompt_lookup"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generated answer with what it took.

    Attributes:
      text: the answer, without control tokens.
      token_ids: emitted ids, the ending one included.
      prompt_tokens: tokens of the rendered prompt.
      finish_reason: "stop" or "length".
      method: decoding method.
      tau: tokens per pass of the full model; None for an empty answer.
      prefill_seconds: wall-clock time of the prompt.
      decode_seconds: wall-clock time of the answer.
      logprobs: of each id under the model, when asked for.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    method: str
    tau: float | None
    prefill_seconds: float
    decode_seconds: float
    logprobs: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a streamed answer.

    Attributes:
      text: new text, never half a character nor the beginning of a stop string.
      token_ids: new ids; their text may come with a later piece.
      finish_reason: of the last piece, "stop" or "length"; None before.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None


def generate(
    prompt: str | Sequence[Message],
    model: Model | None = None,
    *,
    max_new_tokens: int = 256,
    method: str = DEFAULT_METHOD,
    stop: Iterable[str] | None = (),
    logprobs: bool = False,
    truncate: str | None = None,
    details: bool = False,
    **sampling,
) -> str | Generation:
    """Generates an answer; prints nothing.

    Args:
      prompt: a user's message, or a conversation of `{"role", "content"}` messages.
        A plain string is completed as it is when the model has no chat template.
      model: from `load`; the default model when None, loaded once per process.
      max_new_tokens: at most this many tokens.
      method: a decoding method of `m2r2_jax.METHODS`; all give the same text.
      stop: strings that end the answer and are not part of it. Of several, the one
        that is complete first wins, and of those complete at the same character the
        one that began first. The spelling of a control token ends it at that token.
      logprobs: whether to compute each token's log-probability (see `details`).
      truncate: what gives way where prompt and new tokens exceed the context, "answer"
        or "prompt"; an error by default. Of a conversation the oldest turns give way,
        then the beginning of the last one, never the system's.
      details: whether to return ids, tau and timings too.
      **sampling: of `SamplingParams`, such as `temperature`, `top_p`, `seed`; greedy by
        default. The same seed gives the same text, whatever the method; None draws a
        fresh one.

    Returns:
      The text, or a `Generation` when `details` is set.

    Raises:
      ValueError: an empty or over-long prompt, or a setting out of range.
      FileNotFoundError: the default model is not there and cannot be fetched.
      FloatingPointError: the model's logits hold a NaN.
    """
    params = SamplingParams(**sampling)
    model = default_model() if model is None else model
    ids = fitted_prompt(model, prompt, max_new_tokens, truncate)
    (answer,), timing = Session(model, build_method(method, model)).run(
        [ids],
        max_new_tokens,
        sampling=params,
        stop=stop,
        logprobs=logprobs,
        truncate=truncate,
    )
    text = answer.text(model.tokenizer)
    if not details:
        return text
    return Generation(
        text,
        answer.token_ids,
        len(ids),
        answer.finish_reason,
        method,
        answer.tau,
        timing.prefill_seconds,
        timing.decode_seconds,
        answer.logprobs,
    )


def generate_many(
    prompts: Sequence[str | Sequence[Message]],
    model: Model | None = None,
    *,
    batch: int = 8,
    max_new_tokens: int = 256,
    method: str = DEFAULT_METHOD,
    stop: Iterable[str] | None = (),
    truncate: str | None = None,
    **sampling,
) -> list[str]:
    """As `generate` for many prompts, several of which decode together.

    A row whose answer has ended takes the next prompt at once.

    Args:
      prompts: as for `generate`.
      model: as for `generate`, without a mesh.
      batch: how many decode together.
      max_new_tokens: as for `generate`, like all arguments that follow; the same for
        all prompts, but that each draws with a seed of its own: prompt `i` with that
        of `SamplingParams(seed=seed).for_prompt(i)`, the first with `seed` itself.
        With it `generate` gives the same text.
      method: see there.
      stop: see there.
      truncate: see there.
      **sampling: see there.

    Raises:
      ValueError: as `generate`, for any of the prompts, before any work.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {prompts!r:.60}, not a list of prompts")
    params = SamplingParams(**sampling)
    model = default_model() if model is None else model
    encoded = [
        fitted_prompt(model, prompt, max_new_tokens, truncate) for prompt in prompts
    ]
    answers = answer_all(
        model,
        build_method(method, model),
        encoded,
        max_new_tokens,
        batch=batch,
        sampling=params,
        stop=stop,
        truncate=truncate,
    )
    texts = {index: answer.text(model.tokenizer) for index, answer in answers}
    return [texts[index] for index in range(len(encoded))]


def stream_generate(
    prompt: str | Sequence[Message],
    model: Model | None = None,
    *,
    max_new_tokens: int = 256,
    method: str = DEFAULT_METHOD,
    stop: Iterable[str] | None = (),
    truncate: str | None = None,
    **sampling,
) -> Iterator[Piece]:
    """As `generate`, in pieces as they come; their texts join to its text.

    Raises:
      ValueError: as `generate`, at once.
    """
    params = SamplingParams(**sampling)
    model = default_model() if model is None else model
    session = Session(model, build_method(method, model))
    return stream_session(
        session,
        fitted_prompt(model, prompt, max_new_tokens, truncate),
        max_new_tokens,
        sampling=params,
        stop=stop,
        truncate=truncate,
    )


def stream_session(
    session: Session, ids: list[int], max_new_tokens: int, **settings
) -> Iterator[Piece]:
    """Pieces of the answer of a session of one row.

    Args:
      session: its cache is kept, also when the pieces are not taken to the end.
      ids: the whole conversation so far.
      max_new_tokens: at most this many tokens.
      **settings: as for `Session.stream`.
    """
    chunks = session.stream([ids], max_new_tokens, **settings)
    return _pieces(session.model.tokenizer, chunks)


def _pieces(tokenizer, chunks) -> Iterator[Piece]:
    decoder, text, sent, count = StreamDecoder(tokenizer), "", 0, 0
    with contextlib.closing(chunks):
        for (answer,) in chunks:
            fresh = answer.token_ids[count:]
            text += decoder.push(fresh)
            count += len(fresh)
            settled = answer.settled if answer.stopped_at is None else answer.stopped_at
            ready = len(text) if settled is None else settled
            if fresh:
                yield Piece(text[sent:ready], fresh)
                sent = max(sent, ready)
    text = (text + decoder.flush())[: answer.stopped_at]
    yield Piece(text[sent:], [], answer.finish_reason)


@functools.cache
def default_model() -> Model:
    """The default model, loaded once per process."""
    return load()
