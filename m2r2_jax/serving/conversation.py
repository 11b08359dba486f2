"""`chat`: a conversation that remembers its turns and keeps its cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.drafters.methods import build_method
from m2r2_jax.serving.generation import (
    DEFAULT_METHOD,
    Piece,
    default_model,
    stream_session,
)
from m2r2_jax.serving.prompts import Message, fitted_prompt
from m2r2_jax.serving.session import Session


def chat(
    model: Model | None = None,
    *,
    system: str | None = None,
    method: str = DEFAULT_METHOD,
) -> Chat:
    """Opens a conversation.

    Args:
      model: from `load`; the default model when None.
      system: what the model is told first; its template's own text when None.
      method: as for `generate`.

    Raises:
      ValueError: the model has no chat template, or an unknown method.
    """
    model = default_model() if model is None else model
    if not model.tokenizer.has_chat_template:
        raise ValueError(
            f"{model.config.name} has no chat template; use generate, which completes "
            "plain text"
        )
    opening = [] if system is None else [{"role": "system", "content": system}]
    return Chat(Session(model, build_method(method, model)), opening)


class Chat:
    """A conversation of one user with the model; from `chat`. One answer at a time.

    Attributes:
      messages: the turns so far, oldest first; all of them, also those that
        truncate="prompt" has kept from the model.
    """

    def __init__(self, session: Session, messages: list[Message]):
        self._session, self.messages = session, messages
        self._answering = False

    def send(self, text: str, max_new_tokens: int = 256, **settings) -> str:
        """The answer to the user's next turn.

        Args:
          text: what the user says.
          max_new_tokens: at most this many tokens.
          **settings: `stop` and `truncate` as for `generate`, and those of
            `SamplingParams`.

        Raises:
          ValueError: as `generate`, or while another answer is streamed; the
            conversation is as it was before.
        """
        return "".join(
            piece.text for piece in self.stream(text, max_new_tokens, **settings)
        )

    def stream(
        self,
        text: str,
        max_new_tokens: int = 256,
        *,
        stop: Iterable[str] | None = (),
        truncate: str | None = None,
        **sampling,
    ) -> Iterator[Piece]:
        """As `send`, in pieces.

        A stream that is closed before its end leaves the user's turn in the
        conversation, and as its answer the text of the pieces that were given, none
        included. A stream that was never begun leaves nothing, and neither does one
        that fails.
        """
        self._check_free(self.messages)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"the turn {text!r} is empty; say at least one character")
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces = stream_session(
            self._session,
            fitted_prompt(self._session.model, asked, max_new_tokens, truncate),
            max_new_tokens,
            sampling=SamplingParams(**sampling),
            stop=stop,
            truncate=truncate,
        )
        return self._record(asked, pieces)

    def _record(self, asked: list[Message], pieces) -> Iterator[Piece]:
        """The pieces; the turn is remembered behind the last one that is taken."""
        self._check_free(asked[:-1])
        self._answering, given = True, ""
        try:
            for piece in pieces:
                given += piece.text
                yield piece
        except Exception:
            asked = None
            raise
        finally:
            pieces.close()
            self._answering = False
            if asked is not None:
                self.messages = [*asked, {"role": "assistant", "content": given}]

    def _check_free(self, messages: list[Message]) -> None:
        """Raises ValueError unless the next turn may follow these messages."""
        if self._answering:
            raise ValueError(
                "another answer of this conversation is being streamed; take it to its "
                "end or close it first"
            )
        if self.messages != messages:
            raise ValueError(
                "the conversation has gone on since this stream was asked for; ask "
                "again"
            )
