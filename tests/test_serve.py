"""launch/serve.py: the trained model behind an OpenAI-compatible address. test_end_to_end.py serves one by vLLM."""

import json
import os
import shlex
import signal
import socket
import threading
from dataclasses import replace

import pytest

from tests.helpers import ROOT, exported, has_ended, until
from verl_tasks.launch import serve
from verl_tasks.settings import Command, SettingsError, load_settings


@pytest.fixture
def s():
    return load_settings(exported(ROOT / "tasks/countdown/train.sh", {"MAX_RESPONSE_LENGTH": "48", "TOP_P": "0.9"}))


def command(**given) -> Command:
    return load_settings({"COMPLETE": "", **{name: str(value) for name, value in given.items()}}, cls=Command)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "my-machine"])
def test_an_address_that_others_reach_wants_a_key(host, monkeypatch):
    monkeypatch.delenv(serve.KEY, raising=False)
    with pytest.raises(SettingsError, match=f"HOST={host}: others could use the server; put a key into"):
        serve.check(command(HOST=host, PORT=1))
    monkeypatch.setenv(serve.KEY, "sk-none-of-your-business")
    serve.check(command(HOST=host, PORT=1))
    said = serve.ready(command(HOST=host), ["countdown"], [])
    assert "none-of-your" not in said and f"Bearer ${serve.KEY}" in said and "0.0.0.0" not in said


def test_the_examples_have_the_system_message_that_the_model_was_trained_with():
    system = [{"role": "system", "content": 'Don\'t say "x".'}]
    said = serve.ready(command(), ["countdown"], system)
    (curl,) = [line for line in said.splitlines() if "curl" in line]
    body, asked = json.loads(shlex.split(curl)[-1]), [*system, {"role": "user", "content": "Hello"}]
    assert body["messages"] == asked and f"messages={json.dumps(asked)}))" in said


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"PORT={port}: another program listens there"):
            serve.check(command(PORT=port))
    for bad in ("0", "65536"):
        with pytest.raises(SettingsError, match="PORT"):
            command(PORT=bad)


@pytest.mark.medium  # imports vLLM
def test_vllm_takes_the_arguments(s, small_model):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    given = parser.parse_args(serve.arguments(s, command(PORT=8123), str(small_model)))
    assert (given.model, given.port, given.enforce_eager) == (str(small_model), 8123, True)
    assert given.override_generation_config["max_new_tokens"] == 48


# In the place of vLLM's server: it answers after a moment, and says who it is.
SERVER = """
import os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
time.sleep(1)
print(os.getpid(), file=open(os.environ["TOLD"], "w"))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_the_server_is_ready_once_it_answers_and_ends_with_an_interrupt(s, small_model, tmp_path, monkeypatch, capsys):
    package = tmp_path / "vllm/entrypoints/openai"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    told = tmp_path / "told"
    for name, value in {"ARTIFACTS": tmp_path, "TOLD": told, "PYTHONPATH": f"{tmp_path}:{ROOT}"}.items():
        monkeypatch.setenv(name, str(value))
    with socket.create_server(("127.0.0.1", 0)) as free:
        given = command(PORT=free.getsockname()[1])
    said = []

    def interrupt() -> None:
        until(lambda: said.append(capsys.readouterr().out) or "ready: " in said[-1])
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` ignores it
    ends = threading.Thread(target=interrupt)
    ends.start()
    try:
        serve.serve(s, given, str(small_model), [])
    finally:
        ends.join()
        signal.signal(signal.SIGINT, before)
    assert f"ready: http://127.0.0.1:{given.PORT}/v1, models: countdown;" in said[-1]
    assert capsys.readouterr().out == "\nstopped\n"
    until(lambda: has_ended(int(told.read_text())))


def test_the_server_samples_as_an_evaluation_does(s, small_model):
    words = serve.arguments(s, command(PORT=8123), str(small_model))
    given = dict(zip(words[::2], words[1::2], strict=False))
    assert given["--model"] == str(small_model) and given["--served-model-name"] == "countdown"
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "8123")
    defaults = json.loads(given["--override-generation-config"])
    assert (defaults["temperature"], defaults["top_p"], defaults["max_new_tokens"]) == (1.0, 0.9, 48)


def test_an_adapter_and_its_base_have_names_of_their_own(s, small_model, tmp_path):
    config = {"base_model_name_or_path": str(small_model), "r": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert serve.names(s, str(tmp_path)) == {small_model.name: str(small_model), "countdown": str(tmp_path)}
    words = serve.arguments(s, command(), str(tmp_path))
    assert words[words.index("--model") + 1] == str(small_model) and "--enable-lora" in words
    module = json.loads(words[words.index("--lora-modules") + 1])
    assert module == {"name": "countdown", "path": str(tmp_path)}
    named = replace(s, TASK=small_model.name)
    assert [*serve.names(named, str(tmp_path))] == [f"{small_model.name}-base", small_model.name]
