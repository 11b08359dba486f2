"""`chat`: a conversation that remembers its turns and keeps its cache."""

from __future__ import annotations

from collections.abc import Iterator

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.drafters.methods import build_method
from m2r2_jax.serving.generation import (
    DEFAULT_METHOD,
    Message,
    Piece,
    default_model,
    stream_session,
)
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
    """A conversation of one user with the model; from `chat`.

    Attributes:
      messages: the turns so far, oldest first.
    """

    def __init__(self, session: Session, messages: list[Message]):
        self._session, self.messages = session, messages

    def send(self, text: str, max_new_tokens: int = 256, **settings) -> str:
        """The answer to the user's next turn.

        Args:
          text: what the user says.
          max_new_tokens: at most this many tokens.
          **settings: `stop` and `truncate` as for `generate`, and those of
            `SamplingParams`.

        Raises:
          ValueError: as `generate`; the conversation is as it was before.
        """
        return "".join(
            piece.text for piece in self.stream(text, max_new_tokens, **settings)
        )

    def stream(
        self,
        text: str,
        max_new_tokens: int = 256,
        *,
        stop: tuple[str, ...] = (),
        truncate: str | None = None,
        **sampling,
    ) -> Iterator[Piece]:
        """As `send`, in pieces. An answer that is not taken to its end stays in the
        conversation as far as it was given.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"the turn {text!r} is empty; say at least one character")
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces = stream_session(
            self._session,
            self._session.model.tokenizer.encode_chat(asked),
            max_new_tokens,
            sampling=SamplingParams(**sampling),
            stop=stop,
            truncate=truncate,
        )
        return self._record(asked, pieces)

    def _record(self, asked: list[Message], pieces) -> Iterator[Piece]:
        given = ""
        try:
            for piece in pieces:
                given += piece.text
                yield piece
        finally:
            pieces.close()
            self.messages = [*asked, {"role": "assistant", "content": given}]
