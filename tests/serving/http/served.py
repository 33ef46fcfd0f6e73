"""A server of a tiny model in a thread of this process, and clients of it."""

import contextlib
import dataclasses
import threading
import time

import httpx
import openai
from helpers import PLAIN, model
from suites import Letters, Loaded

from lowrank_kv_jax.serving import Engine
from lowrank_kv_jax.serving.http.app import Api
from lowrank_kv_jax.serving.http.engine_thread import EngineThread
from lowrank_kv_jax.serving.http.server import Server, bind, url_of

ROOM, BLOCK, MOST_BODY = 96, 4, 4000


class Chatting(Letters):
    """Letters with a chat template."""

    chat_template = "a program"

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        if turns[0]["role"] == "assistant":
            raise TypeError("a user\ncomes first")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in turns) + "<assistant>"


TINY = dataclasses.replace(PLAIN, num_layers=1, windows=(None,))


def loaded():
    return Loaded(TINY, model(TINY).params, Chatting())


def engine_of(**options):
    return Engine(loaded(), "full", **{"slots": 2, "prompt": 64, "room": ROOM, "block": BLOCK, "prefixes": 1} | options)


class Running:
    """A server that answers."""

    def __init__(self, engine, waiting=8):
        self.engine, self.bound = engine, bind("127.0.0.1", 0)
        self.url, self.port = url_of(self.bound), self.bound.getsockname()[1]
        self.thread = EngineThread(engine, waiting)
        started = threading.Event()
        app = Api(engine._model, self.thread, "tiny", "full", ROOM, MOST_BODY).app()
        self.server = Server(app, self.thread, started.set)
        self._serving = threading.Thread(target=self.server.run, kwargs={"sockets": [self.bound]})
        self._serving.start()
        assert started.wait(30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def complete(self, prompt="a prompt", client=None, **given):
        asked = {"model": "tiny", "prompt": prompt, "temperature": 0, **given}
        return (client or self.client).completions.create(**asked)

    def chat(self, content="a question", **given):
        asked = {"model": "tiny", "messages": [{"role": "user", "content": content}], "temperature": 0, **given}
        return self.client.chat.completions.create(**asked)

    def post(self, path="/v1/completions", **given):
        return httpx.post(self.url + path, **given)

    def health(self):
        return httpx.get(f"{self.url}/health")

    def idle(self, seconds=20):
        """Whether nobody is in flight or waits any more, soon."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self.engine.in_flight and not self.engine.waiting and not self.thread._held:
                return True
            time.sleep(0.01)
        return False

    def end(self, seconds=20):
        """Stop it; whether both threads have ended."""
        self.client.close()
        self.server.stop()
        self._serving.join(seconds)
        return self.thread.join(seconds) and not self._serving.is_alive()


@contextlib.contextmanager
def running(engine, waiting=8):
    """It runs within, and has ended behind."""
    one = Running(engine, waiting)
    try:
        yield one
    finally:
        assert one.end()


@contextlib.contextmanager
def slowly(engine, seconds=0.05):
    """Steps take so long, within."""
    step = engine.step

    def slow():
        time.sleep(seconds)
        return step()

    engine.step = slow
    try:
        yield
    finally:
        engine.step = step
