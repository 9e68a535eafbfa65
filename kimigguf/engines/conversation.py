"""A conversation with an OpenAI-compatible server that gives back everything the assistant said."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kimigguf.engines.endpoint import broke_off, mapped, mapped_within
from kimigguf.engines.talk import Message, Talk, answered, ask
from kimigguf.engines.turn import Piece, Turn, end, take

if TYPE_CHECKING:
    from openai import OpenAI

Watch = Callable[[Turn, tuple[Piece, ...]], None]
"""Is handed the turn as it is now, and what came last."""
_LIVE_FIGURES: Final = {"return_progress": True, "timings_per_token": True}
"""Asks a llama-server how far it is with a prompt, and for its own count of tokens while it answers."""


class Conversation:
    """The talk so far with one server, and its next turn. Whatever fails leaves the talk as it was."""

    def __init__(
        self,
        client: "OpenAI",
        model: str,
        *,
        talk: Talk,
        tools: tuple[Message, ...] = (),
        template_arguments: Mapping[str, str] | None = None,
        max_tokens: int | None = None,
        live_figures: bool = False,
    ) -> None:
        self._client = client
        self.model = model
        self.max_tokens = max_tokens
        self.tools = tools
        self.talk = talk
        self.template_arguments = dict(template_arguments or {})
        self.failed: str | None = None
        """The question that has no answer, because it failed or was stopped before one began."""
        self._live_figures = live_figures
        self._with_usage = True

    @property
    def url(self) -> str:
        return str(self._client.base_url)

    def say(self, text: str, watch: Watch) -> Turn:
        """Ask ``text`` and keep it with its answer; see ``go_on``."""
        before, self.talk = self.talk, ask(self.talk, text)
        self.failed = text
        try:
            turn = self.go_on(watch)
        except BaseException:
            self.talk = before
            raise
        if turn.is_empty:
            self.talk = before
        else:
            self.failed = None
        return turn

    def go_on(self, watch: Watch) -> Turn:
        """Let the assistant answer to the talk as it is, hand on what it says as it comes, and keep it.

        Ctrl-C stops it: what came is kept, and the turn is ``cut``; of nothing, nothing is kept.

        Raises:
            NetworkError, ServerError, UsageError: See ``mapped``; ``answer-broke-off`` if the server did not finish.
        """
        turn = Turn()
        began = time.monotonic()
        try:
            with mapped(self.url):
                stream = self._asked()
            with stream, mapped_within(self.url):
                for chunk in stream:
                    shape = chunk.model_dump(exclude_none=True, warnings=False)
                    turn, pieces = take(turn, shape, seconds=time.monotonic() - began)
                    watch(turn, pieces)
        except KeyboardInterrupt:
            turn, pieces = end(turn, cut=True)
        else:
            if not turn.is_complete:
                raise broke_off(self.url, "the connection was closed before the end of the answer")
            turn, pieces = end(turn)
        watch(turn, pieces)
        if not turn.is_empty:
            self.talk = answered(self.talk, turn)
        return turn

    def _asked(self) -> Any:  # noqa: ANN401 -- a stream of openai's, imported only here
        """The stream of an answer; a server that cannot count tokens in one is asked again without."""
        import openai  # noqa: PLC0415 -- kept out of `kimigguf --help`

        # Untyped: reasoning_content is no field of the client's own message types.
        messages: Any = list(self.talk.messages)
        tools: Any = list(self.tools)
        extra: dict[str, Any] = dict(_LIVE_FIGURES) if self._live_figures else {}
        if self.template_arguments:
            extra["chat_template_kwargs"] = self.template_arguments
        while True:
            try:
                return self._client.chat.completions.create(
                    model=self.model,
                    messages=messages,
                    tools=tools or openai.omit,
                    stream=True,
                    stream_options={"include_usage": True} if self._with_usage else openai.omit,
                    extra_body=extra,
                    max_tokens=self.max_tokens if self.max_tokens is not None else openai.omit,
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if not self._with_usage or "stream_options" not in str(error):
                    raise
                self._with_usage = False
