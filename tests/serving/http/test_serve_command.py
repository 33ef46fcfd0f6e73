"""`lowrank-kv serve` as a process: it serves, and however it ends, nothing stays."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest
from written_model import write_model

from lowrank_kv_jax.serving.http.server import bind

TEMPLATE = "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '\\n' }}{% endfor %}assistant: "


class Process:
    """The command, serving."""

    def __init__(self, place, *options, model="model"):
        words = ["serve", "--model", str(model), "--port", "0", *options]
        env = os.environ | {"JAX_PLATFORMS": "cpu", "HOME": str(place), "TMPDIR": str(place)}
        self.run = subprocess.Popen([sys.executable, "-m", "lowrank_kv_jax.cli", *words], cwd=place, env=env, text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        stuck = threading.Timer(240, self.run.kill)
        stuck.start()
        self.said = self.run.stdout.readline()
        stuck.cancel()
        assert "Ctrl-C ends it" in self.said, self.run.stderr.read()
        self.port = int(self.said.split("127.0.0.1:")[1].split("/")[0])
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def end(self, how):
        """The exit code, and what was said on standard error."""
        self.run.send_signal(how)
        said = self.run.communicate(timeout=60)[1]
        return self.run.returncode, said


def files_of(place):
    return sorted(path.name for path in place.rglob("*"))


def children(pid):
    """Processes whose parent it is; none where the system does not say."""
    return [word for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    write_model(path / "model")
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("how, code", ((signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)))
def test_ended_in_mid_stream_it_leaves_nothing(how, code, place):
    before = files_of(place)
    process = Process(place, "--method", "kivi:bits=4", "--prompt", "64", "--room", "2048", "--slots", "2", "--block", "16")
    told = process.client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "hi"}], max_tokens=2000, stream=True
    )
    next(iter(told))
    assert children(process.run.pid) == []
    found, said = process.end(how)
    with pytest.raises((openai.APIError, httpx.TransportError)):
        list(told)
    process.client.close()
    assert found == code and said == ("lowrank-kv: interrupted\n" if how == signal.SIGINT else "")
    assert files_of(place) == before
    bind("127.0.0.1", process.port).close()


@pytest.mark.slow
def test_the_real_model_answers(tmp_path):
    process = Process(tmp_path, "--method", "kivi:bits=4", "--prompt", "128", "--room", "64", "--slots", "2", model="smollm2-135m")
    asked = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 12}
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    whole = process.client.chat.completions.create(messages=turns, **asked)
    assert "Paris" in whole.choices[0].message.content
    parts = process.client.chat.completions.create(messages=turns, stream=True, **asked)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    text = process.client.completions.create(prompt="The capital of France is", stop=["."], **asked)
    assert "Paris" in text.choices[0].text and text.choices[0].finish_reason in ("stop", "length")
    process.client.close()
    code, said = process.end(signal.SIGINT)
    assert code == 130 and said.endswith("lowrank-kv: interrupted\n")  # behind what XLA says of its slow compiler
