"""Programs that solve rows by an OpenAI endpoint: what each request becomes, and what is left of a program that fails.

The programs are real processes with the `openai` package; the model's turns come from a list (test_certify.py and the
trainings have a real engine).
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests import fake_docker
from tests.helpers import refused, until
from verl_tasks.data import gold
from verl_tasks.evaluation.rollouts import in_turn
from verl_tasks.models.chat_template import answer_ids, prompt_ids
from verl_tasks.rewards import completions, container, program
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import Turn, replayed
from verl_tasks.rewards.episode import Limits, Sampled, play
from verl_tasks.rewards.program import environment_of
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import chat, rl_row

LIMITS = Limits(prompt_length=2048, response_length=2048, turn_length=512, turns=8, step_seconds=30)
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "sub", "description": "", "parameters": {"type": "object"}}}
ROW = rl_row("t", chat("What is 2 + 3?", "Add."), {"answer": "5"}, "test", 0, [TOOL])
CALL = render_calls([{"name": "add", "arguments": {"a": 2, "b": 3}}])
HEAD = f"""
import json
from openai import OpenAI
tool, other = {TOOL!r}, {OTHER!r}
client = OpenAI(max_retries=0)
def ask(messages, **more):
    return client.chat.completions.create(model="policy", messages=messages, **more).choices[0]
def end(score):
    json.dump({{"score": score}}, open("score.json", "w"))
def main():
    messages = json.load(open("row.json"))["prompt"]
"""
TAIL = "\nif __name__ == '__main__':\n    main()\n"


REAL_IMAGE = os.environ.get("AGENT_IMAGE", "")  # of a runtime here, with openai in it: tests of a real container


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.delenv("VERL_TASK_LOGS", raising=False)
    monkeypatch.delenv("AGENT_IMAGE", raising=False)
    monkeypatch.setattr(program, "_STARTED", started := {})
    yield
    for endpoint in started.values():
        endpoint.starter.stdin.close()
        endpoint.starter.wait()


@pytest.fixture
def made(tmp_path):
    """The environment of a program with this ``body`` of main."""

    def of(body: str, **more):
        file = tmp_path / "agent.py"
        file.write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    ") + TAIL)
        return environment_of(file, **more)

    return of


def episode_of(tokenizer, environment, *texts: str, limits: Limits = LIMITS, row: dict = ROW):
    """The episode of ``texts``, and with what each was asked: tokens, most tokens, stops."""
    asked = []

    async def sample(ids, most, stop=()):
        turn = answer_ids(tokenizer, texts[len(asked)])
        asked.append((ids, most, stop))
        return Sampled(turn[:most], [-1.0] * len(turn[:most]), len(turn) <= most)

    return asyncio.run(play(environment, row, tokenizer, sample, limits)), asked


def log_of() -> str:
    return "".join(file.read_text() for file in (Path(os.environ["ARTIFACTS"]) / "programs").iterdir())


AGENT = """
while True:
    said = ask(messages, tools=[tool]).message
    messages.append(said.model_dump(exclude_none=True))
    if not said.tool_calls:
        return end(float("<answer>5</answer>" in said.content))
    for call in said.tool_calls:
        result = str(sum(json.loads(call.function.arguments).values()))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
"""


def test_a_programs_tokens_are_those_of_the_same_episode_in_an_environment(tokenizer, made):
    episode, asked = episode_of(tokenizer, made(AGENT), CALL, "It is <answer>5</answer>")
    assert (episode.reward, episode.ended, episode.turns, len(episode.sequences)) == (1.0, "stop", 2, 1)
    whole = episode.sequence.prompt_ids + episode.sequence.response_ids
    assert episode.sequence.prompt_ids == prompt_ids(tokenizer, chat("What is 2 + 3?", "Add."), [TOOL]) == asked[0][0]
    assert whole[: len(asked[1][0])] == asked[1][0]
    own = [token for token, mine in zip(episode.sequence.response_ids, episode.sequence.mask, strict=True) if mine]
    assert own == [t for text in (CALL, "It is <answer>5</answer>") for t in answer_ids(tokenizer, text)]
    assert in_turn(episode.messages) == [CALL, "5", "It is <answer>5</answer>"]  # without the row's prompt
    scores = episode.scores
    assert (scores["failed"], scores["sequences"], scores["acc"], scores["format"]) == (0, 1, 1, 1)
    assert scores["program_s"] > 0 <= scores["model_s"]
    assert "episode 1, row 0: exit code 0, 2 turns, 1 sequences" in log_of()


REWRITES = {
    "white space of an answer": "messages[2]['content'] += ' '",
    "an earlier message": "messages[1]['content'] = 'What is it?'",
    "a summary": "messages[:] = [messages[0], {'role': 'user', 'content': 'So far: nothing. Go on.'}]",
    "the order of tools": "tools.reverse()",
    "nothing, it asks again": "del messages[2:]",
}


@pytest.mark.parametrize("change", REWRITES.values(), ids=REWRITES)
def test_a_changed_history_is_another_sequence(tokenizer, made, change):
    body = f"""
    tools = [tool, other]
    messages.append(ask(messages, tools=tools).message.model_dump())
    messages.append({{"role": "user", "content": "Sure?"}})
    {change}
    ask(messages, tools=tools)
    end(0.5)
    """
    episode, asked = episode_of(tokenizer, made(body), "five", "5")
    first, second = episode.sequences
    assert first.prompt_ids == asked[0][0] and first.response_ids == answer_ids(tokenizer, "five")
    assert second.prompt_ids == asked[1][0] and second.response_ids == answer_ids(tokenizer, "5")
    assert in_turn(episode.messages)[0::2] == ["five", "5"]
    assert second.mask == [1] * len(second.mask) and second.log_probs == [-1.0] * len(second.mask)
    assert (episode.reward, episode.turns, episode.scores["sequences"]) == (0.5, 2, 2)


def test_a_first_request_of_a_programs_own_is_read_by_the_model(tokenizer, made):
    body = "end(float(ask([{'role': 'user', 'content': 'Plan.'}]).message.content == '5'))"
    episode, _ = episode_of(tokenizer, made(body), "5")
    assert episode.reward == 1 and in_turn(episode.messages) == ["", "Plan.", "5"]


def test_a_main_agent_goes_on_after_a_sub_agent_and_json_may_be_written_anew(tokenizer, made):
    body = """
    said = ask(messages, tools=[tool]).message
    sub = ask([{"role": "user", "content": "Help"}]).message.content
    call = said.tool_calls[0]
    arguments = json.dumps(json.loads(call.function.arguments), indent=4)
    function = {"name": call.function.name, "arguments": arguments}
    messages.append({"role": "assistant", "tool_calls": [{"id": "mine", "type": "function", "function": function}]})
    messages.append({"role": "tool", "tool_call_id": "mine", "content": [{"type": "text", "text": sub}]})
    end({"7": 1}.get(ask(messages, tools=[tool]).message.content, 0))
    """
    episode, asked = episode_of(tokenizer, made(body), CALL, "<|im_end|>seven", "7")
    main, sub = episode.sequences
    assert episode.reward == 1 and main.prompt_ids == asked[0][0] and sub.prompt_ids == asked[1][0]
    assert asked[2][0][: len(asked[0][0])] == asked[0][0]
    assert main.prompt_ids + main.response_ids == asked[2][0] + answer_ids(tokenizer, "7")
    assert sum(main.mask) == len(answer_ids(tokenizer, CALL)) + len(answer_ids(tokenizer, "7"))
    told = asked[2][0][len(asked[0][0]) + len(answer_ids(tokenizer, CALL)) :]
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert told.count(ends) == 1  # of the tool's message; the text is no control token


def test_stops_lengths_log_probs_and_streams(tokenizer, made):
    body = """
    first = ask(messages, stop=["\\nObservation"], logprobs=True)
    assert (first.message.content, first.finish_reason) == ("think", "stop"), first
    assert [piece.logprob for piece in first.logprobs.content] == [-1.0] * len(first.logprobs.content)
    messages += [{"role": "assistant", "content": "think"}, {"role": "user", "content": "on"}]
    assert ask(messages, max_tokens=2).finish_reason == "length"
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="policy", messages=messages, tools=[tool], stream=True, stream_options=options
    )
    *events, usage = list(stream)
    calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    assert json.loads(calls[0].function.arguments) == {"a": 2, "b": 3} and usage.usage.completion_tokens > 5
    assert events[-1].choices[0].finish_reason == "tool_calls"
    end(1)
    """
    texts = "think\nObservation", "one two three four five", CALL
    episode, asked = episode_of(tokenizer, made(body), *texts)
    assert episode.reward == 1, log_of()
    assert [(most, stop) for _, most, stop in asked] == [(512, ("\nObservation",)), (2, ()), (512, ())]
    assert asked[1][0][: len(asked[0][0])] == asked[0][0]  # the tokens of the stop stay in its history
    assert len(episode.sequences) == 2


REFUSED = {
    "n": ("n=2", "only 1 is served"),
    "bias": ("logit_bias={'1': 5}", "only {} is served"),
    "choice": ("tools=[tool], tool_choice='required'", 'only "auto" is served'),
    "schema": ("response_format={'type': 'json_object'}", "response_format"),
    "unknown": ("extra_body={'top_k': 5}", "top_k: is not served"),
    "stop": ("stop=[1]", "must be texts"),
    "tools": ("tools=[tool, tool]", "names of their own"),
}


def test_what_is_not_served_is_refused_in_one_line_and_the_episode_goes_on(tokenizer, made):
    image = '[{"type": "image_url", "image_url": {"url": "data:"}}]'
    body = """
    import openai
    def refused(said, status=400, **how):
        try:
            client.chat.completions.create(**({"model": "policy", "messages": messages} | how))
        except openai.APIStatusError as error:
            assert error.status_code == status and said in error.message, error
            return
        raise AssertionError(said)
    """
    body += "".join(f"    refused({said!r}, **dict({how}))\n" for how, said in REFUSED.values())
    body += f"""
    refused("there is 'policy' alone", model="gpt-4o")
    refused("only parts of type text", messages=[{{"role": "user", "content": {image}}}])
    refused("must be a non-empty list", messages=[])
    refused("context_length_exceeded", messages=[{{"role": "user", "content": "long " * 3000}}])
    other_key = client.with_options(api_key="another")
    try:
        other_key.chat.completions.create(model="policy", messages=messages)
    except openai.AuthenticationError:
        end(float(ask(messages).message.content == "5"))
    """
    episode, asked = episode_of(tokenizer, made(body), "5")
    assert (episode.reward, episode.ended, len(asked)) == (1.0, "stop", 1), log_of()


@pytest.mark.parametrize(
    ("body", "ended", "reward", "told"),
    [
        ("ask(messages); raise KeyError('my own')", "failed", -1.0, "KeyError: 'my own'"),
        ("print('here'); ask(messages)", "failed", -1.0, "here"),  # no score
        ("ask(messages); end(float('nan'))", "failed", -1.0, "score.json, which has '{\"score\": NaN}'; the last"),
        ("end('0.5')", "failed", -1.0, 'which has \'{"score": "0.5"}\''),
        ("end({'score': 1})", "failed", -1.0, 'which has \'{"score": {"score": 1}}\''),
        ("end(0.2); end(0.75)", "stop", 0.75, "exit code 0"),
        ("end(0.2); open('score.json', 'a').write('0.75')", "failed", -1.0, "0.2}0.75'"),
        (
            "json.dump({'score': 1, 'trace': 'x' * 5000}, open('score.json', 'w'))",
            "failed",
            -1.0,
            "more than 4096 bytes",
        ),
        ("import os; os.mkdir('a'); os.chdir('a'); end(1)", "failed", -1.0, "which is not in its working folder"),
        ("ask(messages); end(1); raise SystemExit(3)", "failed", -1.0, "exit code 3"),
        ("raise SystemExit('no model')", "failed", -1.0, "no model"),  # before its first turn
        ("end(0.25)", "stop", 0.25, "0 turns"),
        ("bytearray(2**34)", "failed", -1.0, "MemoryError"),
        ("open('score.json', 'w').write('[' * 4000)", "failed", -1.0, "exit code 0"),
        ("open('score.json', 'w').write('0' * 2**20 + '1')", "failed", -1.0, "exit code 0"),
        ("open('score.json', 'w').write('1' + ' ' * 2**20)", "stop", 1.0, "exit code 0"),  # read as far as it goes
        ("import os; os.mkfifo('score.json')", "failed", -1.0, "exit code 0"),
        ("import os; os.remove('log.txt'); os.mkfifo('log.txt'); end(1)", "stop", 1.0, "exit code 0"),
        ("print('x' * 2**20 + 'the end'); end(1)", "stop", 1.0, "the end"),
    ],
)
def test_a_program_without_a_score_is_a_failed_episode(tokenizer, made, body, ended, reward, told):
    episode, _ = episode_of(tokenizer, made(body, failed=-1.0), "5")
    assert (episode.ended, episode.reward) == (ended, reward) and told in log_of()
    assert episode.scores["failed"] == (ended == "failed")
    (sequence,) = episode.sequences
    assert sequence.prompt_ids and bool(sequence.response_ids) == bool(episode.turns)
    assert len(log_of()) < 2 * program.TOLD


def until_gone(word: str) -> None:
    """Wait for the end of all processes with an argument ``word``."""
    until(lambda: not any(word in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])), 10)


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tokenizer, made):
    body = """
    import subprocess, time
    subprocess.Popen(["sleep", "1234"])
    ask(messages)
    print("sleeps")
    time.sleep(1234)
    """
    before = time.monotonic()
    episode, _ = episode_of(tokenizer, made(body), "5", limits=replace(LIMITS, step_seconds=5))
    assert episode.ended == "step_timeout" and time.monotonic() - before < 20
    until_gone("1234")
    assert log_of().endswith("sleeps\n")
    assert len(next(iter(program._STARTED.values())).inboxes) == 1  # no key is left but the starter's


def test_what_a_program_leaves_in_a_session_of_its_own_ends_with_it_and_no_other(tokenizer, made):
    body = """
    import os, subprocess, time
    def daemon(word):  # an orphan at once
        subprocess.run(["sh", "-c", f"setsid sleep {word} & echo $! > {word}"])
        time.sleep(0.3)
    daemon("1238")
    said = ask(messages).message.content
    os.kill(int(open("1238").read()), 0)  # while the program lives, whatever else ends
    end(float(said == "5"))
    """
    environment = made(body)
    long = environment()
    long.reset(ROW)
    assert long.step_turn(None).start
    episode, _ = episode_of(tokenizer, environment, "5")
    assert (episode.reward, episode.ended) == (1.0, "stop"), log_of()
    long.step_turn(Turn("5"))
    long.close()
    until_gone("1238")
    assert log_of().count("exit code 0") == 2


def test_what_is_left_ends_with_the_starter(made, tmp_path):
    environment = made("import subprocess, time; subprocess.Popen(['setsid', 'sleep', '1239']); ask(messages)")()
    environment.reset(ROW)
    environment.step_turn(None)
    assert any("1239" in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    environment.live.endpoint.starter.stdin.close()
    until_gone("1239")
    (endless := tmp_path / "endless.py").write_text("import os\nos.system('setsid sleep 1233 &')\nwhile True: pass\n")
    starter = program._endpoint((endless,), sys.executable).starter
    until(lambda: any("1233" in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])))
    starter.stdin.close()
    starter.wait(10)
    until_gone("1233")


GIVES_UP = """
import asyncio, httpx, os, time
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
said = {"url": url + "/chat/completions", "headers": {"Authorization": "Bearer " + key}}
said["json"] = {"model": "policy", "messages": messages}
"""


def slowly(tokenizer, environment, *texts: str, seconds: float):
    """The episode of ``texts``, each of which takes ``seconds``."""
    left = iter(texts)

    async def sample(ids, most, stop=()):
        await asyncio.sleep(seconds)
        turn = answer_ids(tokenizer, next(left))
        return Sampled(turn, [-1.0] * len(turn), True)

    return asyncio.run(play(environment, ROW, tokenizer, sample, LIMITS))


def test_a_client_that_asks_again_after_its_time_is_over_gets_the_answer_that_was_sampled(tokenizer, made):
    body = f"""{GIVES_UP}
for _ in range(9):
    try:
        messages.append(httpx.post(**said, timeout=1).json()["choices"][0]["message"])
        break
    except httpx.ReadTimeout:
        pass
messages.append({{"role": "user", "content": "Sure?"}})
end(float([ask(messages).message.content, messages[2]["content"]] == ["yes", "5"]))
"""
    episode = slowly(tokenizer, made(body), "5", "yes", seconds=2.5)
    assert (episode.reward, episode.turns, len(episode.sequences)) == (1.0, 2, 1), log_of()
    assert "2 turns, 1 sequences, 2 requests that the program gave up before their answer" in log_of()


def test_a_request_that_is_given_up_before_its_turn_is_not_sampled(tokenizer, made):
    body = f"""{GIVES_UP}
async def first():
    async with httpx.AsyncClient(timeout=None) as client:
        tasks = [asyncio.create_task(client.post(**said)) for _ in range(3)]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        return done.pop().result().json()["choices"][0]["message"]["content"]
answer = asyncio.run(first())
end(float([answer, ask([messages[1]]).message.content] == ["5", "6"]))
"""
    episode = slowly(tokenizer, made(body), "5", "not read", "6", "7", seconds=1)
    assert (episode.turns, len(episode.sequences)) == (3, 3), log_of()  # one of them was asked for at once
    assert "3 turns, 3 sequences, 2 requests that the program gave up" in log_of()


def test_limits_cut_an_episode_and_end_its_program(tokenizer, made):
    endless = "while True: messages += [ask(messages).message.model_dump(), {'role': 'user', 'content': 'on'}]"
    episode, asked = episode_of(tokenizer, made(endless), *["5"] * 9, limits=replace(LIMITS, turns=3))
    assert (episode.ended, episode.turns, len(asked)) == ("max_turns", 3, 3)
    long = replace(LIMITS, turn_length=2)
    assert episode_of(tokenizer, made(endless), "one two three", limits=long)[0].ended == "turn_length"


def test_any_command_is_a_program(tokenizer, tmp_path):
    asks = "import sys,os,json,urllib.request as u; b=json.dumps({'model':'policy','messages':[{'role':'user',"
    asks += "'content':'hi'}]}).encode(); r=u.Request(os.environ['OPENAI_BASE_URL']+'/chat/completions',b,"
    asks += "{'Authorization':'Bearer '+os.environ['OPENAI_API_KEY']}); print(u.urlopen(r).read())"
    script = tmp_path / "agent.sh"
    script.write_text(
        f'test -n "$OPENAI_API_KEY" && test -z "$HF_TOKEN" && python3 -c "{asks}" && echo 1 > score.json\n'
    )
    episode, asked = episode_of(tokenizer, environment_of("sh", script), "5")
    assert (episode.reward, episode.ended, len(asked)) == (1.0, "stop", 1), log_of()


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl here")
def test_an_agent_of_bash_and_curl(tokenizer, tmp_path):
    script = tmp_path / "agent.sh"
    script.write_text(
        """
said=$(curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
    -d '{"model": "policy", "messages": [{"role": "user", "content": "Wie viel ist 2 + 3, \\u00fc \\ud83d?"}]}')
grep -q '"content": "5"' <<< "$said" && echo 1 > score.json
"""
    )
    episode, asked = episode_of(tokenizer, environment_of("bash", script), "5")
    assert (episode.reward, episode.ended, len(asked)) == (1.0, "stop", 1), log_of()


@pytest.mark.skipif(not shutil.which("node"), reason="no Node.js here")
def test_an_agent_of_node_fetches_within_the_limit_of_memory(tokenizer, tmp_path):
    script = tmp_path / "agent.mjs"
    script.write_text(
        """
import { writeFileSync } from "node:fs";
const headers = { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" };
const body = JSON.stringify({ model: "policy", messages: [{ role: "user", content: "2 + 3?" }] });
const found = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", { method: "POST", headers, body });
const said = (await found.json()).choices[0].message.content;
writeFileSync("score.json", said === "5" ? "1" : "0");
"""
    )
    episode, asked = episode_of(tokenizer, environment_of("node", script), "5")
    assert (episode.reward, episode.ended, len(asked)) == (1.0, "stop", 1), log_of()


def test_what_an_import_prints_or_reads_is_not_of_the_starters_pipes(tokenizer, tmp_path):
    (tmp_path / "agent.py").write_text(
        """
import json, os, sys
print("imported", flush=True)
print("kept")
os.system("echo of a child")
sys.stdin.read()
if __name__ == "__main__":
    json.dump(1, open("score.json", "w"))
"""
    )
    for _ in range(2):
        limits = replace(LIMITS, step_seconds=10)
        episode, _ = episode_of(tokenizer, environment_of(tmp_path / "agent.py"), limits=limits)
        assert (episode.reward, episode.ended) == (1.0, "stop"), log_of()
    assert log_of().count("kept") == 3  # the import, and each program


@pytest.mark.parametrize("own", ["io.StringIO()", "io.TextIOWrapper(sys.stdout.detach())"])
def test_a_program_whose_import_replaces_standard_output_plays(tokenizer, tmp_path, own):
    score = "if __name__ == '__main__':\n    print('5', file=open('score.json', 'w'))\n"
    (tmp_path / "agent.py").write_text(f"import io, sys\nsys.stdout = {own}\n{score}")
    episode, _ = episode_of(tokenizer, environment_of(tmp_path / "agent.py"))
    assert (episode.reward, episode.ended) == (5.0, "stop"), log_of()


def test_what_is_nested_too_deep_is_refused_and_the_episode_goes_on(tokenizer, made):
    body = """
    import openai
    deep = "[" * 900 + "]" * 900
    function = {"name": "add", "arguments": '{"a": ' + deep + "}"}
    calls = [{"id": "a", "type": "function", "function": function}]
    called = [*messages, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": ""}]
    function = tool["function"] | {"parameters": {"type": "object", "enum": json.loads(deep[700:1100])}}
    for how in ({"messages": called}, {"messages": messages, "tools": [tool | {"function": function}]}):
        try:
            client.chat.completions.create(model="policy", **how)
        except openai.BadRequestError as error:
            assert "64" in error.message, error
        else:
            raise AssertionError(how)
    function = {"name": "add", "arguments": '{"a": ' + "[" * 9000 + "}"}
    calls[0]["function"] = function
    try:
        ask(called)
    except openai.BadRequestError:
        end(float(ask(messages).message.content == "5"))
    """
    episode, asked = episode_of(tokenizer, made(body), "5")
    assert (episode.reward, episode.ended, len(asked)) == (1.0, "stop", 1), log_of()


def test_a_link_in_place_of_what_a_program_wrote_is_not_followed(tokenizer, made, tmp_path):
    (secret := tmp_path / "secret").write_text("1")
    body = f"import os; os.remove('log.txt'); os.symlink({str(secret)!r}, 'log.txt')"
    body += f"; os.symlink({str(secret)!r}, 'score.json')"
    assert episode_of(tokenizer, made(body, failed=-1.0))[0].reward == -1 and not log_of().endswith("1")


def test_examples_and_demonstrations_are_played_without_a_model(made):
    assert replayed(made(AGENT), ROW, [CALL, "<answer>5</answer>"]) == (1.0, 0, True)
    assert replayed(made(AGENT), ROW, ["<tool_call>{", "<answer>5</answer>"], spare=True)[1] == 1


def test_a_program_that_asks_for_nothing_is_done_before_the_answers(made):
    assert replayed(made("end(0.5)"), ROW, ["5"], spare=True) == (0.5, 0, True)
    with pytest.raises(RewardError, match="was done before the answer '5'"):
        replayed(made("end(0.5)"), ROW, ["5"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('my own')", r"failed with exit code 1: KeyError: 'my own' \(agent\.py:\d+, in main\)"),
        ("json.loads('no')", r"1: json\.decoder\.JSONDecodeError: .* \(agent\.py:\d+, in main\)"),
        ("print('tried'); raise KeyError('my own')", r"1: KeyError: 'my own' \(agent\.py:\d+, in main\)"),
        ("print('bye'); raise SystemExit(3)", "failed with exit code 3: bye"),
        ("print('bye')", "score.json, which is not in its working folder; the last that it printed: bye"),
        ("end('1')", 'score.json, which has \'{"score": "1"}\'; the last that it printed: no output'),
    ],
)
def test_why_a_program_failed_is_said_where_answers_are_left(made, body, said):
    environment = made(f"ask(messages); {body}")
    with pytest.raises(RewardError, match=f"the program .*{said}$"):
        replayed(environment, ROW, ["5", "6"])
    own = json.dumps(["5"])  # a demonstration after whose last message it fails
    with pytest.raises(RewardError, match=f"the program .*{said}$"):
        gold._episode(environment, None, {own}, "t", own, "", ROW)


@pytest.mark.parametrize(
    ("text", "command", "said"),
    [
        ("def main(:", (), r"failed with exit code 1: SyntaxError: invalid syntax \(agent\.py:1\)"),
        ("", ("no-such-command",), "failed with exit code 1: no-such-command: No such file or directory"),
        ("import time; time.sleep(99)", (), r"import of agent\.py has not ended: .* `if __name__ == \"__main__\":`"),
    ],
)
def test_why_a_program_did_not_begin_is_said(tmp_path, monkeypatch, text, command, said):
    monkeypatch.setattr("verl_tasks.rewards.environment.WITHOUT_MODEL", 3)
    (tmp_path / "agent.py").write_text(text)
    with pytest.raises(RewardError, match=said):
        replayed(environment_of(*command, tmp_path / "agent.py"), ROW, ["5", "6"])
    assert not command or command[0] in log_of()


def test_a_program_that_hangs_without_a_model_is_no_score(made, monkeypatch):
    monkeypatch.setattr("verl_tasks.rewards.environment.WITHOUT_MODEL", 8)
    assert replayed(made("import time; ask(messages); time.sleep(99)"), ROW, ["5"]) == (0.0, 0, True)


def test_a_programs_first_request_finds_built_what_it_needs(tokenizer, made):
    """Most of an episode's processor time: the starter asks once by each client, which imports anyio's part."""
    body = "import sys; end(float('anyio._backends._asyncio' in sys.modules))"
    assert episode_of(tokenizer, made(body))[0].reward == 1, log_of()


def test_a_client_that_an_import_makes_has_the_key_of_its_episode(tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text("from openai import OpenAI\nclient = OpenAI(max_retries=0)\n")
    (tmp_path / "agent.py").write_text(
        """
import json, mine
if __name__ == "__main__":
    said = mine.client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    json.dump(float(said.choices[0].message.content == "5"), open("score.json", "w"))
"""
    )
    for _ in range(2):
        episode, asked = episode_of(tokenizer, environment_of(tmp_path / "agent.py"), "5")
        assert (episode.reward, len(asked)) == (1.0, 1), log_of()


def test_certificates_are_read_once_for_all_clients(tmp_path):
    (tmp_path / "once.py").write_text(
        """
import ssl
from openai import OpenAI
from starter import read_certificates_once
read_certificates_once()
made, load = [], ssl.SSLContext.load_verify_locations
ssl.SSLContext.load_verify_locations = lambda context, *given, **named: (made.append(1), load(context, *given, **named))
clients = [OpenAI(api_key="a", base_url="http://a") for _ in range(3)]
print(len(made))
"""
    )
    found = os.environ | {"PYTHONPATH": str(program.STARTER.parent)}
    command = [sys.executable, tmp_path / "once.py"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=found)
    assert told.stdout == "1\n", told.stderr


def test_strict_is_no_part_of_a_tool_that_the_model_reads():
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    for tool in ({**TOOL, "function": TOOL["function"] | {"strict": True}}, TOOL["function"]):
        body = {"model": "policy", "messages": messages, "tools": [tool]}
        assert completions.read(json.dumps(body).encode()).tools == [TOOL]


def test_a_body_that_is_no_request_is_refused():
    for body in (b"", b"[]", b"{", b'{"model": "policy", "messages": [1]}', b'{"model": "policy", "messages": 5}'):
        with pytest.raises(completions.Refused):
            completions.read(body)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (5, "as OpenAI's"),
        ([1], "as OpenAI's"),
        ([{"content": "a"}], "as OpenAI's"),
        ([{"role": "user", "content": [{"type": "text"}]}], "as OpenAI's"),
        ([{"role": "user", "content": "a", "tool_calls": [5]}], "as OpenAI's"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}], "must be an object"),
    ],
)
def test_wrong_messages_are_refused_in_words_of_the_protocol(messages, said):
    with pytest.raises(completions.Refused, match=f"^messages: .*{said}"):
        completions.read(json.dumps({"model": "policy", "messages": messages}).encode())


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """tests/fake_docker.py on PATH, and the folder of what it was called with."""
    (folder := tmp_path / "docker").mkdir()
    binary = folder / "bin/docker"
    binary.parent.mkdir()
    file = Path(__file__).with_name("fake_docker.py")
    binary.write_text(f'#!/bin/sh\nFAKE_DOCKER={folder} exec {sys.executable} {file} "$@"\n')
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.defpath}")
    monkeypatch.setattr(container, "RUNTIMES", ("docker",))  # podman may be on PATH too
    monkeypatch.setenv("AGENT_IMAGE", "agents:1")
    return folder


def calls_of(folder: Path, command: str) -> list[list[str]]:
    calls = map(json.loads, (folder / "calls").read_text().splitlines())
    return [rest for name, *rest in calls if name == command]


def has_namespaces() -> bool:
    with contextlib.suppress(OSError):
        return not subprocess.run([*fake_docker.NAMESPACES, "true"], stderr=subprocess.DEVNULL).returncode
    return False


in_namespaces = pytest.mark.skipif(not has_namespaces(), reason="no namespaces for an ordinary user here")


@in_namespaces
def test_a_program_in_a_container_reaches_the_endpoint_and_nothing_else(tokenizer, made, docker, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        body = f"""
        import os, socket
        print(sorted(set(os.environ) - set(["LC_CTYPE"])))  # which Python sets
        try:
            socket.create_connection(("127.0.0.1", {other.getsockname()[1]}))
        except OSError:
            {AGENT.replace(chr(10), chr(10) + " " * 12)}
        """
        episode, asked = episode_of(tokenizer, made(body), CALL, "<answer>5</answer>")
    assert (episode.reward, episode.ended, len(asked)) == (1.0, "stop", 2), log_of()
    assert "['HOME', 'OPENAI_API_KEY', 'OPENAI_BASE_URL', 'PATH']" in log_of()


def test_what_a_container_may(tokenizer, made, docker, tmp_path):
    episode_of(tokenizer, made("end(1)"))
    (call,) = calls_of(docker, "run")
    given = fake_docker.options().parse_args(call)
    assert (given.network, given.cap_drop, given.pull, given.image) == ("none", ["ALL"], "never", "agents:1")
    assert "no-new-privileges" in given.security_opt and given.user == f"{os.getuid()}:{os.getgid()}"
    assert (given.memory, given.pids_limit) == ("8g", "512")
    mounted = fake_docker.places(given.mount)
    assert [place for place, (_, only_read) in mounted.items() if not only_read] == ["/episode"]
    assert mounted[str(tmp_path)] == (str(tmp_path), True) and given.command[-1] == str(tmp_path / "agent.py")
    # The key has no value in what others see of a process.
    assert given.env == ["HOME=/episode", "OPENAI_BASE_URL=http://127.0.0.1:8000/v1", "OPENAI_API_KEY"]


@in_namespaces
def test_no_container_outlives_its_episode(tokenizer, made, docker):
    body = """
    import subprocess, time
    subprocess.Popen(["sleep", "1235"], start_new_session=True)
    ask(messages)
    time.sleep(1235)
    """
    episode, _ = episode_of(tokenizer, made(body), "5", limits=replace(LIMITS, step_seconds=10))
    assert (episode.ended, episode.turns) == ("step_timeout", 1), log_of()
    until_gone("1235")
    ((_, name),) = calls_of(docker, "rm")
    assert name in calls_of(docker, "run")[0]


@pytest.fixture
def real(monkeypatch):
    monkeypatch.setenv("AGENT_IMAGE", REAL_IMAGE)


in_real_container = pytest.mark.skipif(not REAL_IMAGE, reason="AGENT_IMAGE names no image of podman or docker")


@in_real_container
def test_a_program_in_a_real_container_has_its_tokens_and_nothing_else(tokenizer, made, real, tmp_path):
    (tmp_path / "neighbour.py").write_text("answer = 5\n")
    limited = not os.getuid() or Path("/sys/fs/cgroup/cgroup.controllers").exists()  # else podman cannot
    with socket.create_server(("127.0.0.1", 0)) as other:
        body = f"""
        import os, resource, socket, neighbour
        def refused(act):
            try:
                act()
            except OSError:
                return True
        memory = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        memory = [int(open(file).read()) for file in memory if {limited} and os.path.exists(file)]
        status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
        checks = dict(
            network=refused(lambda: socket.create_connection(("127.0.0.1", {other.getsockname()[1]}), 5)),
            outside=refused(lambda: open({str(Path(__file__))!r})),
            root=refused(lambda: open("/written", "w")),
            task=refused(lambda: open({str(tmp_path / "written")!r}, "w")),
            endpoint=refused(lambda: open("/endpoint/written", "w")),
            tmp=open("/tmp/written", "w").write("x") == 1,
            home=os.environ["HOME"] == os.getcwd() == "/episode",
            user=os.getuid() == {os.getuid()},
            capabilities=int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0,
            privileges=status["NoNewPrivs"].strip() == "1",
            processes=len([name for name in os.listdir("/proc") if name.isdigit()]) < 10,
            memory=memory == [8 * 2**30][:{limited:d}],
            files=resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 2**30,
        )
        print("not so:", [name for name, so in checks.items() if not so])
        {AGENT.replace(chr(10), chr(10) + " " * 8)}
        """
        episode, asked = episode_of(tokenizer, made(body), CALL, "<answer>5</answer>")
    assert (episode.reward, episode.ended, len(asked)) == (1.0, "stop", 2), log_of()
    assert "not so: []" in log_of()
    assert asked[1][0][: len(asked[0][0])] == asked[0][0] and len(episode.sequences) == 1


HOSTILE = {
    "processes": """
        import os, time
        for _ in range(2000):
            try:
                if not os.fork():
                    time.sleep(1237)
            except OSError:
                end(1)
                return
        """,
    "hangs": 'import subprocess, time; subprocess.Popen(["sleep", "1237"], start_new_session=True); time.sleep(1237)',
}


@in_real_container
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_is_left_of_a_hostile_program_in_a_real_container(tokenizer, made, real, kind):
    limits = replace(LIMITS, step_seconds=20)
    episode, _ = episode_of(tokenizer, made(HOSTILE[kind]), limits=limits)
    assert episode.ended == {"processes": "stop", "hangs": "step_timeout"}[kind], log_of()
    until_gone("1237")
    until_gone(next(iter(program._STARTED.values())).socket.parent.name)  # of the runtime's commands


def test_no_folder_is_left_of_a_process_that_was_killed(made, tmp_path, monkeypatch, docker):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    if not (child := os.fork()):
        made("import time; time.sleep(60)")().reset(ROW)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: not [*(tmp_path / "temporary").iterdir()], 20)


def test_a_container_ends_with_the_endpoint(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(str(tmp_path / "socket"))
        endpoint.listen()
        command = [sys.executable, container.INSIDE, tmp_path / "socket", str(port), "99", "sleep", "1236"]
        first = subprocess.Popen(command, start_new_session=True)
        life, _ = endpoint.accept()
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(1)
        life.close()
        assert first.wait(10) == 1
    os.killpg(first.pid, signal.SIGKILL)  # here the program is left: only a container ends with its first process


def test_an_image_that_cannot_be_used_is_refused_in_one_line(made, docker, monkeypatch):
    monkeypatch.setenv("AGENT_IMAGE", "agents:2")
    with pytest.raises(RewardError, match=r"^AGENT_IMAGE=agents:2: No such image; `docker image inspect agents:2`"):
        replayed(made("end(1)"), ROW, ["5"], spare=True)
    monkeypatch.setenv("PATH", str(docker))
    monkeypatch.setattr(container, "RUNTIMES", ("podman", "docker"))
    with pytest.raises(RewardError, match=r"^AGENT_IMAGE=agents:2: neither podman nor docker is on PATH; [^\n]*$"):
        container.runtime_of("agents:2")
    assert "TASK=calculator" in refused("data", TASK="calculator", AGENT_IMAGE="agents:1")
