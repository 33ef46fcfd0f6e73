"""The `openai` client against a server of a tiny model: what it asks, what it is told, and what it leaves behind."""

import concurrent.futures
import contextlib
import os
import signal
import socket

import httpx
import openai
import pytest
from served import BLOCK, ROOM, engine_of, loaded, running, slowly
from test_readme import python_of

from lowrank_kv_jax.cli import main
from lowrank_kv_jax.serving import Request
from lowrank_kv_jax.serving.http.server import bind


@pytest.fixture(scope="module")
def engine():
    return engine_of()


@pytest.fixture(scope="module")
def known(engine):
    """What the engine answers to the prompts below, 40 tokens, asked before it is served."""
    prompts = ["a prompt", "<user>a question<assistant>"]
    answers = [engine.submit(Request(prompt, max_new_tokens=40)) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # programs depend on a thread's settings: those of the server's
        pool.submit(engine.run).result()
    return [answer.text for answer in answers]


@pytest.fixture(scope="module")
def served(engine, known):
    with running(engine) as one:
        yield one


def text_of(events):
    return "".join(event.choices[0].text for event in events if event.choices)


def test_completions_whole_and_streamed(served, known):
    whole = served.complete(max_tokens=40)
    assert whole.choices[0].text == known[0] and whole.choices[0].finish_reason == "length" and whole.object == "text_completion"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (8, 40, 48)
    events = list(served.complete(max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert text_of(events) == known[0] and len(events) == 1 + 40 // BLOCK + 2 and len({event.id for event in events}) == 1
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[-1].usage == whole.usage and events[-1].choices == [] and events[0].usage is None
    assert text_of(served.complete(max_tokens=40, stream=True)) == known[0]
    assert served.complete([ord(letter) % 64 for letter in "a prompt"]).choices[0].text == known[0][:16]  # OpenAI's default
    assert served.complete(["a prompt"]).usage.completion_tokens == 16


def test_chats_whole_and_streamed(served, known):
    whole = served.chat(max_completion_tokens=40)
    assert whole.choices[0].message.content == known[1] and whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len("<user>a question<assistant>") and whole.object == "chat.completion"
    events = list(served.chat([{"type": "text", "text": "a ques"}, {"type": "text", "text": "tion"}], max_tokens=40, stream=True))
    assert events[0].choices[0].delta.role == "assistant" and events[0].object == "chat.completion.chunk"
    assert "".join(event.choices[0].delta.content or "" for event in events) == known[1]
    assert events[-1].choices[0].finish_reason == "length"
    assert served.chat().usage.completion_tokens == ROOM  # what there is room for
    said = served.chat(max_tokens=3).choices[0].message.model_dump()
    turns = [{"role": "developer", "content": "brief"}, {"role": "user", "content": "x"}, said]
    found = served.client.chat.completions.create(model="tiny", messages=turns, max_tokens=1)
    assert found.usage.prompt_tokens == len("<system>brief<user>x<assistant>abc<assistant>")


def test_the_client_of_the_documentation(served, capsys):
    (block,) = [block for block in python_of("docs/serving.md") if "openai" in block]
    exec(block.replace("http://127.0.0.1:8000", served.url).replace("smollm2-135m", "tiny"), names := {})
    names["client"].close()
    assert " 40 length\n" in (said := capsys.readouterr().out) and "completion_tokens=40" in said


def test_a_stop_ends_the_text_before_it_also_in_a_stream(served, known):
    stop = known[0][9:12]
    before = known[0][: known[0].find(stop)]
    for given in ({"stop": stop}, {"stop": ["~~~~", stop]}):
        whole = served.complete(max_tokens=40, **given)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (before, "stop")
        events = list(served.complete(max_tokens=40, stream=True, **given))
        assert text_of(events) == before and events[-1].choices[0].finish_reason == "stop"


def test_a_seed_decides_what_is_drawn(served):
    def drawn(**given):
        return served.complete(temperature=1.5, max_tokens=24, **given).choices[0].text

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert len({drawn() for _ in range(3)}) > 1  # without a seed, any
    assert drawn(seed=3, top_p=1e-6) == served.complete(max_tokens=24).choices[0].text
    assert drawn(seed=4, extra_body={"top_k": 1}) == served.complete(max_tokens=24).choices[0].text


def test_a_prefix_is_compressed_by_itself(served, engine):
    found = [served.complete("a prompt", max_tokens=12, extra_body={"prefix": "what all share "}) for _ in range(2)]
    assert found[0].choices[0].text == found[1].choices[0].text and found[0].usage.prompt_tokens == 15 + 8
    assert len(engine._pools[0].shelf) == 1


def test_requests_at_once_are_answered_as_alone(served, known):
    def one(i):
        return served.complete(max_tokens=40).choices[0].text if i % 2 else text_of(served.complete(max_tokens=40, stream=True))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {known[0]}
    assert served.idle()


def test_models_health_and_paths(served):
    assert [one.id for one in served.client.models.list()] == ["tiny"] and served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="model='other': is not served here, only 'tiny'"):
        served.client.models.retrieve("other")
    health = served.health().json()
    assert health["status"] == "ok" and health["rows"] == [2] and health["cache_bytes"] == served.engine.bytes
    for path, status in (("/v2/none", 404), ("/v1/completions", 405)):
        found = httpx.get(served.url + path)
        assert found.status_code == status and f"GET {path}: there is no such endpoint" in found.json()["error"]["message"]


# ---- limits ---------------------------------------------------------------------------------------------------------


def refused(call, kind, status, *words):
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.status_code == status
    for word in words:
        assert word in caught.value.body["message"] and "\n" not in caught.value.body["message"]
    return caught.value


@pytest.mark.parametrize("given, words", (
    ({"n": 2}, "n=2: must be null or 1"), ({"prompt": "x" * 65}, "prompt: has 65 tokens, must be at most 64 (--prompt)"),
    ({"prompt": ""}, "prompt='': must be a text that is not empty"), ({"prompt": [64]}, "holds id 64: ids lie in 0..63"),
    ({"prompt": "xx", "max_tokens": 500}, "max_tokens=500: with 2 tokens before them 501 must fit; a row takes 160 (--room)"),
    ({"prompt": "x" * 140, "extra_body": {"prefix": "y" * 10}}, "165 must fit; a row takes 160 (--room) (by default)"),
    ({"top_p": 0}, "top_p=0: must lie in (0, 1]"), ({"temperature": 1e-30}, "temperature=1e-30: must be 0, which is greedy"),
    ({"stream": True, "max_tokens": 500}, "max_tokens=500: with 8 tokens"),
))
def test_what_the_engine_refuses_is_told_in_the_fields_of_the_api(served, given, words):
    refused(lambda: served.complete(**given), openai.BadRequestError, 400, words)
    assert served.idle()


def test_chats_that_the_template_refuses(served):
    turns = [{"role": "assistant", "content": "x"}]
    refused(lambda: served.client.chat.completions.create(model="tiny", messages=turns), openai.BadRequestError, 400,
            "messages: the model's chat template refuses them (TypeError: a user comes first)")


@pytest.mark.parametrize("given, status, words", (
    ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "the body is no JSON: Expecting property name"),
    ({"content": b'{"a": NaN}', "headers": {"content-type": "application/json"}}, 400, "the body is no JSON: NaN is not a number"),
    ({"content": b"[" * 3000, "headers": {"content-type": "application/json"}}, 400, "the body is no JSON: nested too deeply"),
    ({"content": b"\xff", "headers": {"content-type": "application/json"}}, 400, "the body is no JSON"),
    ({"json": [1]}, 400, "the body [1]: must be an object"), ({"data": {"a": "b"}}, 415, "must be application/json"),
    ({"json": {"prompt": "x" * 5000}}, 413, "the body has 5013 bytes or more: must be at most 4000 (--max-body)"),
    ({"json": {"prompt": "x" * 10**6}}, 413, "bytes or more: must be at most 4000 (--max-body)"),
    ({"content": iter([b"x" * 3000] * 3), "headers": {"content-type": "application/json"}}, 413, "must be at most 4000"),
))
def test_bodies_that_are_none(served, given, status, words):
    found = served.post(**given)
    assert found.status_code == status and words in found.json()["error"]["message"]
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_a_full_queue_refuses_and_is_free_again(engine):
    with running(engine, waiting=1) as one:
        with slowly(engine), concurrent.futures.ThreadPoolExecutor(3) as pool:
            waits = [pool.submit(one.complete, max_tokens=60) for _ in range(3)]
            while one.thread._held < 3:
                pass
            error = refused(one.complete, openai.RateLimitError, 429, "requests=3: as many are answered or wait already",
                            "(--slots, --queue)")
            assert error.response.headers["retry-after"] == "1" and error.body["code"] == "queue_full"
            assert {wait.result().usage.completion_tokens for wait in waits} == {60}
        assert one.complete().usage.completion_tokens == 16


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_a_client_that_goes_frees_its_row(engine):
    with running(engine) as one:
        with slowly(engine):
            stream = one.complete(max_tokens=90, stream=True)
            next(iter(stream))
            stream.close()
            assert one.idle()
            impatient = one.client.with_options(timeout=0.3)
            with pytest.raises(openai.APITimeoutError):
                one.complete(max_tokens=90, client=impatient)
            assert one.idle()
            with socket.create_connection(("127.0.0.1", one.port)) as half:  # a body that never comes
                half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        assert one.complete(max_tokens=4).usage.completion_tokens == 4 and one.idle()


def test_a_server_that_ends_tells_who_listens_and_leaves_its_port(engine):
    with running(engine) as one, slowly(engine):
        stream = iter(one.complete(max_tokens=90, stream=True))
        next(stream)
        one.server.stop()
        with pytest.raises(openai.APIError, match="the server is ending"):
            list(stream)
        assert one.end() and one.thread.error is None
        bind("127.0.0.1", one.port).close()


def test_ctrl_c_ends_the_command_in_mid_stream(engine, capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args: loaded())
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=30)

    def interrupt():
        stream = iter(client.completions.create(model="tiny", prompt="a prompt", max_tokens=90, stream=True))
        next(stream)
        os.kill(os.getpid(), signal.SIGINT)
        with contextlib.suppress(openai.APIError, httpx.TransportError):
            list(stream)
        client.close()

    words = ["serve", "--port", str(port), "--prompt", "64", "--room", str(ROOM), "--slots", "2", "--prefixes", "1", "--block", str(BLOCK)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(interrupt)
        assert main(words) == 130
        asked.result()
    shown = capsys.readouterr()
    assert f"serving tiny through full at http://127.0.0.1:{port}/v1; rows: 2 for prompts of 64 tokens" in shown.out
    assert shown.err == "lowrank-kv: interrupted\n"
    bind("127.0.0.1", port).close()


def test_the_command_hands_chunks_to_its_engine(capsys, monkeypatch):
    monkeypatch.setattr("lowrank_kv_jax.models.load.load_model", lambda *args: loaded())

    def refuses(*args, prefill_chunk, **options):
        raise ValueError(f"so many at a time: {prefill_chunk}")

    monkeypatch.setattr("lowrank_kv_jax.serving.engine.Engine", refuses)
    assert main(["serve", "--port", "0", "--prefill-chunk", "48"]) == 2
    assert "so many at a time: 48" in capsys.readouterr().err


def test_an_engine_that_fails_ends_the_server(capsys):
    engine = engine_of(slots=1, prefixes=0)
    with running(engine) as one:
        def fail():
            raise RuntimeError("no memory is left")

        engine.step = fail
        refused(one.complete, openai.InternalServerError, 503, "the server is ending, or its engine has stopped")
        assert one.end() and str(one.thread.error) == "no memory is left"


def test_a_fault_is_an_error(engine, monkeypatch):
    with running(engine) as one:
        pool = engine._pools[0]
        monkeypatch.setattr(pool, "block", lambda: (pool.seats.token[:, None] * 0 - 1, {0: "broken", 1: "broken"}))
        refused(one.complete, openai.InternalServerError, 500, "full: broken")
        with pytest.raises(openai.APIError, match="full: broken"):
            list(one.complete(stream=True))
