"""An engine in a thread of its own, which alone touches it; what others ask comes over a queue."""

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from lowrank_kv_jax.serving.engine import Engine
from lowrank_kv_jax.serving.requests import Answer, Request


class Heard(NamedTuple):
    """What is known of an answer.

    Attributes:
        tokens: all that were drawn so far.
        finish: None while it goes on; as of `Answer`, "refused" by the engine, or "closed": nothing is answered any more.
        text: once it has finished by itself.
        error: what is wrong, of a fault and of a refusal.
    """

    tokens: tuple[int, ...] = ()
    finish: str | None = None
    text: str | None = None
    error: str | None = None


class QueueFull(Exception):
    """As many wait as may."""


class Closed(Exception):
    """Nothing is answered any more."""


class Ticket:
    """What was submitted, for `EngineThread.cancel`; its answer is the engine's thread's alone."""

    def __init__(self, request: Request, tell: Callable[[Heard], None]):
        self.request, self.tell = request, tell
        self.answer: Answer | None = None


class EngineThread:
    """Steps an engine while there is something to do.

    Args:
        engine: no other thread may step it, or submit to it, from here on.
        waiting: requests that may wait beside those that the engine has rows for.
        on_end: called in that thread when it ends.
    """

    def __init__(self, engine: Engine, waiting: int, on_end: Callable[[], None] = lambda: None):
        self.engine, self.most, self.on_end = engine, sum(engine.slots) + waiting, on_end
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Ticket | None]] = queue.SimpleQueue()
        self._lock, self._closed, self._held = threading.Lock(), False, 0
        self._live: set[Ticket] = set()
        self._tickets: dict[Answer, Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- from any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, request: Request, tell: Callable[[Heard], None]) -> Ticket:
        """Queue a request.

        Args:
            tell: called in the engine's thread with new tokens, and at last, from whatever thread, with the end.

        Raises:
            QueueFull: too many wait; one that was cancelled while it waited counts until the next step. Closed.
        """
        ticket = Ticket(dataclasses.replace(request, on_tokens=self._hear), tell)
        with self._lock:
            if self._closed:
                raise Closed
            if self._held >= self.most:
                raise QueueFull
            self._held += 1
            self._live.add(ticket)
        self._inbox.put(("submit", ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Its row is free from the next step on, and nothing more is told of it; one that has ended stays as it is."""
        with self._lock:
            if ticket not in self._live:
                return
            self._live.remove(ticket)
        self._inbox.put(("cancel", ticket))

    def close(self) -> None:
        """Tell all who wait, and end after the step that is being made."""
        with self._lock:
            self._closed, left = True, list(self._live)
        for ticket in left:
            self._tell(ticket, Heard(finish="closed"))
        self._inbox.put(("close", None))

    def join(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, where it began; whether it has."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def closed(self) -> bool:
        """Whether nothing is answered any more."""
        return self._closed

    # ---- in the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take_in()
                if not self._closed:
                    for answer in self.engine.step():
                        self._end(answer)
        except BaseException as error:  # whatever it is: those who wait are told, and who serves
            self.error = error
        finally:
            self.close()
            for answer in self._tickets:  # whoever steps the engine next finds its rows free
                answer.cancel()
            self.on_end()

    def _take_in(self) -> None:
        """What was asked meanwhile; waits for something where nothing is to be done."""
        wait = not (self.engine.waiting or self.engine.in_flight)
        while True:
            try:
                what, ticket = self._inbox.get(block=wait)
            except queue.Empty:
                return
            if ticket is None:
                return
            wait = False
            if what == "submit":
                self._submit(ticket)
            elif ticket.answer is not None:
                ticket.answer.cancel()

    def _submit(self, ticket: Ticket) -> None:
        try:
            ticket.answer = self.engine.submit(ticket.request)
        except ValueError as error:
            self._release()
            self._tell(ticket, Heard(finish="refused", error=str(error)))
            return
        self._tickets[ticket.answer] = ticket

    def _hear(self, answer: Answer, new: list[int]) -> None:
        """The `on_tokens` of every request; an end is told behind its step."""
        if not answer.done:
            self._tell(self._tickets[answer], Heard(tuple(answer.tokens)))

    def _end(self, answer: Answer) -> None:
        ticket = self._tickets.pop(answer, None)
        if ticket is not None:  # else it was asked before this thread began
            self._release()
            self._tell(ticket, Heard(tuple(answer.tokens), answer.finish, answer.text, answer.error))

    def _tell(self, ticket: Ticket, heard: Heard) -> None:
        with self._lock:
            live = ticket in self._live
            if heard.finish is not None:
                self._live.discard(ticket)
        if live:
            ticket.tell(heard)

    def _release(self) -> None:
        with self._lock:
            self._held -= 1
