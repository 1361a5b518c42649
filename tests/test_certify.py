"""`make certify`: the checks, with the agent loop of verl and an engine that answers from a list; each planted fault
fails its own line."""

import copy
import itertools
import json
import shutil
from dataclasses import replace

import pytest

from tasks.calculator.environment import TOOLS, Environment
from tasks.calculator.prepare_data import SYSTEM, demonstration
from tests.helpers import SMALL, make, refused, task_settings
from verl_tasks.evaluation import certify as checks
from verl_tasks.evaluation.certify import Chat, Played, Turn
from verl_tasks.evaluation.rollouts import Completion
from verl_tasks.models import chat_template
from verl_tasks.models.chat_template import answer_ids
from verl_tasks.rewards import episode
from verl_tasks.rewards.environment import Step
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import chat, rl_row, rl_schema, sft_row, sft_schema, write_parquet

PROBLEM = "347 * 58"
PROMPT = chat(f"What is {PROBLEM}?", SYSTEM)
CALL = render_calls([{"name": "calculator", "arguments": {"expression": PROBLEM}}])
SHOWN = Chat("demonstration 0", [*PROMPT, *demonstration(PROBLEM)], 2, TOOLS)
ANSWER = "<answer>20126</answer>"
LONG = {"MAX_PROMPT_LENGTH": 2048, "MAX_RESPONSE_LENGTH": 2048, "MAX_TURN_LENGTH": 1024, "MAX_TURNS": 4}
NAMES = ["tokens", "mask", "template", "stop", "markers", "limits", "sft", "log_probs"]
# In place of a message's content, in the template: calls of earlier turns as an empty line; their thinking left out.
REWRITES = "'-' if m.role == 'assistant' and 'tool_call' in m.content else m.content }}"
DROPS = "(m.content.split('</think>') | last).lstrip() if m.role == 'assistant' else m.content }}"


class Engine:
    """Answers the turns of each prompt with a call and an answer; the log-probs are the model's, ``shift`` added."""

    def __init__(self, model, tokenizer, shift: float = 0.0, answers=(CALL, ANSWER)):
        self.model, self.tokenizer, self.shift, self.answers = model, tokenizer, shift, answers

    def generate(self, requests, sampling, more=list):
        from verl_tasks.verl_plugins.certify import trainer_log_probs

        for request in requests:
            text = self.answers[min(request.turn, len(self.answers) - 1)]
            ids = answer_ids(self.tokenizer, text)[: request.max_tokens]
            ((_, own),) = trainer_log_probs(str(self.model), [Turn(list(request.ids), ids)])
            shifted = tuple(p + self.shift for p in own)
            yield request, [Completion(text, "stop", len(ids), 0.5, False, tuple(ids), shifted)]

    def close(self):
        pass


@pytest.fixture
def certified(small_model, tmp_path, monkeypatch):
    """A function: the checks of a task by name, with a changed chat template or another ``Engine``."""
    from transformers import AutoTokenizer

    data = tmp_path / "data"
    row = rl_row("calculator", PROMPT, {"answer": "20126"}, "train", 0, TOOLS)
    write_parquet([row], data / "calculator/train.parquet", rl_schema(tools=True))
    shown = sft_row(PROMPT, demonstration(PROBLEM), TOOLS)
    write_parquet([shown], data / "calculator/sft.parquet", sft_schema(tools=True, episodes=True))
    write_parquet([rl_row("gsm8k", PROMPT, "20126", "train", 0)], data / "gsm8k/train.parquet", rl_schema())
    write_parquet([sft_row(PROMPT, ANSWER)], data / "gsm8k/sft.parquet", sft_schema())

    def run(task: str = "calculator", template=None, settings=None, **engine) -> dict[str, checks.Check]:
        from verl_tasks.verl_plugins.certify import certified

        given = SMALL | {"MAX_PROMPT_LENGTH": "1024", "MAX_RESPONSE_LENGTH": "1024", "MAX_TURN_LENGTH": "512"}
        given |= {"ARTIFACTS": str(tmp_path), "N_GPUS": "1"} | (settings or {})
        monkeypatch.setenv("ARTIFACTS", str(tmp_path))
        model = shutil.copytree(small_model, tmp_path / "model", dirs_exist_ok=True)
        if template:
            (model / "chat_template.jinja").write_text(template((model / "chat_template.jinja").read_text()))
        tokenizer = AutoTokenizer.from_pretrained(model)
        s = task_settings(task, given)
        found = certified(s, str(model), lambda: Engine(model, tokenizer, **engine))
        return {check.name: check for check in found}

    return run


def failed(found: dict[str, checks.Check]) -> list[str]:
    return [name for name, check in found.items() if check.state == "failed"]


@pytest.mark.medium
def test_what_is_right_is_certified_with_its_figures(certified, tokenizer):
    found = certified()
    assert list(found) == NAMES and {check.state for check in found.values()} == {"ok"}, found
    call, answer = (len(answer_ids(tokenizer, text)) for text in (CALL, ANSWER))
    # A sampled and a scripted episode; in the place of each scripted turn the engine samples a call.
    assert found["tokens"].figures == {"episodes": 2, "turns": 4, "changed_by_encoding": 0}
    assert found["mask"].figures["model_tokens"] == 2 * (call + answer) < found["mask"].figures["response_tokens"]
    assert found["stop"].figures == {"stopped": 4, "turns": 4, "learned": 2}
    assert found["log_probs"].figures["tokens"] == call + answer + 2 * call
    assert found["template"].figures == {"later": 2} and found["log_probs"].figures["max"] < 1e-3


@pytest.mark.medium
def test_a_single_turn_task_is_an_episode_of_one_turn(certified):
    found = certified("gsm8k", answers=[ANSWER])
    assert list(found) == NAMES and {check.state for check in found.values()} == {"ok"}, found
    assert "one turn" in found["template"].text and "(100%)" in found["mask"].text


REWRITING = f"""
import json
from openai import OpenAI
tools = {TOOLS!r} + [{{"type": "function", "function": {{"name": "other", "description": "", "parameters": {{}}}}}}]
def main():
    client, messages = OpenAI(max_retries=0), json.load(open("row.json"))["prompt"]
    def ask(tools=tools[:1]):
        said = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        return said
    call = ask().tool_calls[0]
    messages.append({{"role": "tool", "tool_call_id": call.id, "content": "20126"}})
    ask()
    messages[-1]["content"] += "\\n"  # white space of an answer
    messages.append({{"role": "user", "content": "Sure? <|im_end|>"}})
    ask()
    messages.append({{"role": "user", "content": "Again"}})
    ask()
    ask(tools)  # after its own answer, with more tools
    messages.append({{"role": "user", "content": "Again"}})
    ask(tools[::-1])
    messages[:] = [messages[0], {{"role": "user", "content": "A summary of it: 20126"}}]
    ask()
    json.dump(1, open("score.json", "w"))
if __name__ == "__main__":
    main()
"""


# Its fourth sequence begins with more than 1024 tokens.
REWRITING_LIMITS = {"MAX_TURNS": "8", "MAX_PROMPT_LENGTH": "2048"}


@pytest.fixture
def rewriting(tmp_path, monkeypatch):
    """The calculator's episodes are played by a program that rewrites its history."""
    from verl_tasks.rewards.program import environment_of

    (tmp_path / "agent.py").write_text(REWRITING)
    monkeypatch.setattr("tasks.calculator.environment.Environment", environment_of(tmp_path / "agent.py"))


@pytest.mark.medium
def test_a_program_that_rewrites_its_history_is_certified_in_all_its_sequences(certified, rewriting, tokenizer):
    found = certified(answers=[CALL, ANSWER], settings=REWRITING_LIMITS)
    assert {check.state for check in found.values()} == {"ok"}, found
    call, answer = (len(answer_ids(tokenizer, text)) for text in (CALL, ANSWER))
    assert found["tokens"].figures == {"episodes": 10, "turns": 14, "changed_by_encoding": 0}  # sampled and scripted
    assert found["log_probs"].figures["tokens"] == call + 6 * answer + 7 * call


@pytest.mark.medium
def test_a_wrong_token_of_a_later_sequence_is_found(certified, rewriting, monkeypatch):
    from verl_tasks.verl_plugins import episode_loop

    play = episode_loop.play

    async def wrong(*arguments):
        found = await play(*arguments)
        found.sequences[1].response_ids[0] += 1
        return found

    monkeypatch.setattr(episode_loop, "play", wrong)
    found = certified(answers=[CALL, ANSWER], settings={"MAX_TURNS": "8"})
    assert failed(found) == ["tokens"] and "row 0, sequence 2, turn 1: the trained tokens" in found["tokens"].text


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({}, "ok", "1 demonstrations fit"),
        ({"MAX_TURNS": 1}, "failed", "demonstration 0 by MAX_TURNS=1 (needs 2)"),
        ({"MAX_TURN_LENGTH": 10}, "failed", "demonstration 0 by MAX_TURN_LENGTH=10 (needs "),
    ],
)
def test_a_demonstration_that_a_limit_cuts_is_told(tokenizer, changes, state, said):
    s = replace(task_settings("calculator", SMALL | {"N_GPUS": "1", "MAX_TURN_LENGTH": "48"}), **LONG | changes)
    found = checks.limits({"demonstration 0": checks.cut_by(s, SHOWN.ids(tokenizer)[1])})
    assert (found.state, found.figures["demonstrations"]) == (state, 1) and said in found.text
    one_of_two = checks.limits({"a": [], "b": ["MAX_TURNS=1 (needs 2)"]})
    assert one_of_two.state == "warning" and one_of_two.text.startswith("1 of 2 demonstrations are cut off")


# ---- planted faults, in the whole command


def test_a_template_that_rewrites_earlier_turns_fails(certified):
    found = certified(template=lambda text: text.replace("m['content'] }}", REWRITES))
    assert failed(found) == ["template"]
    assert "demonstration 0: turn 1 of the model is" in found["template"].text
    assert "in the prompt of turn 2, and was" in found["template"].text


def test_a_template_that_drops_thinking_is_a_warning_that_says_what_is_done(certified):
    found = certified(template=lambda text: text.replace("m['content'] }}", DROPS))
    assert failed(found) == [] and found["template"].state == "warning"
    assert "rewrites thinking" in found["template"].text and "keep the sampled tokens" in found["template"].text


def test_a_template_that_refuses_a_chat_is_told_before_an_engine_starts(certified):
    refuses = "{% if messages|length > 3 %}{{ raise_exception('no') }}{% endif %}"
    found = certified(template=lambda text: refuses + text)
    assert list(found) == ["template"] and "refuses this" in found["template"].text
    assert found["template"].state == "failed"


def test_a_loop_that_renders_again_fails(certified, monkeypatch, tokenizer):
    add = episode.Sequence.add

    def renders(self, ids, own, log_probs=None):
        again = tokenizer(tokenizer.decode(ids).replace('"name"', "'name'"))["input_ids"] if own else ids
        add(self, again, own, log_probs)

    monkeypatch.setattr(episode.Sequence, "add", renders)
    found = certified()
    assert "tokens" in failed(found) and "mask" not in failed(found)
    assert "row 0, turn 1: the trained tokens are not the sampled ones" in found["tokens"].text


@pytest.mark.parametrize(("wrong", "said"), [(0, "leaves out a token of the model"), (1, "covers another token")])
def test_a_wrong_mask_fails(certified, monkeypatch, wrong, said):
    from verl_tasks.verl_plugins.episode_loop import EpisodeOfRow

    monkeypatch.setattr(EpisodeOfRow, "mask", lambda self, episode, sequence: [wrong] * len(sequence.mask))
    found = certified()
    assert failed(found) == ["mask"] and said in found["mask"].text


@pytest.mark.parametrize(("shift", "state"), [(0.05, "ok"), (0.2, "warning"), (0.6, "failed"), (-0.6, "failed")])
def test_an_engine_whose_log_probs_are_shifted_is_found(certified, shift, state):
    found = certified(shift=shift)
    assert [found.pop("log_probs").state, {check.state for check in found.values()}] == [state, {"ok"}]


def test_log_probs_that_do_not_reach_the_trainer_fail(certified, monkeypatch):
    from verl_tasks.verl_plugins import certify

    played = certify.played
    monkeypatch.setattr(certify, "played", lambda *given: [replace(each, log_probs=None) for each in played(*given)])
    assert failed(certified()) == ["log_probs"]


def test_an_environment_that_answers_at_random_is_named(certified, monkeypatch):
    numbers = itertools.count()
    step = Environment.step

    def random(self, action):
        return Step([{"role": "tool", "content": str(next(numbers))}]) if action.calls else step(self, action)

    monkeypatch.setattr(Environment, "step", random)
    found = certified()
    assert failed(found) == ["tokens", "sft"]
    assert "row 0, turn 2: training asks with other tokens than evaluation" in found["tokens"].text


def test_sft_that_learns_no_end_of_turn_fails(certified, monkeypatch):
    monkeypatch.setattr(chat_template, "shown_ids", lambda own, text, *_: answer_ids(own, text, ended=False))
    assert failed(certified()) == ["stop", "sft"]


# ---- planted faults, in one check


def test_an_end_of_turn_at_which_the_engine_does_not_stop_fails(tokenizer):
    turn = Turn([1], answer_ids(tokenizer, "hi"))
    one = Played("row 0", [turn], [[1]], [1], turn.ids, [1] * len(turn.ids))
    assert checks.ends(tokenizer, {tokenizer.eos_token_id}, [one], [SHOWN]).state == "ok"
    found = checks.ends(tokenizer, {5}, [one], [SHOWN])
    assert found.state == "failed" and "the template ends a turn with '<|im_end|>', the engine stops at" in found.text
    cut = replace(one, turns=[replace(turn, ids=turn.ids[:-1], stopped=False)])
    assert checks.ends(tokenizer, {tokenizer.eos_token_id}, [cut], []).state == "ok"
    wrong = replace(one, turns=[replace(turn, ids=turn.ids[:-1])])
    assert "row 0: a turn ends with 'i'" in checks.ends(tokenizer, {tokenizer.eos_token_id}, [wrong], []).text


@pytest.mark.parametrize("marker", ["<tool_call>", "</think>"])
def test_a_tokenizer_that_eats_a_marker_fails(tokenizer, marker):
    assert checks.markers(tokenizer, [], [SHOWN]).state == "ok"
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": [marker]})
    found = checks.markers(own, [], [SHOWN])
    assert found.state == "failed" and f"{marker} is a special token" in found.text
    own = copy.deepcopy(tokenizer)
    own.add_tokens([marker])
    assert checks.markers(own, [], [SHOWN]).state == "ok"


def test_tokens_that_decoding_changes_are_counted_and_do_not_fail(tokenizer):
    half = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    one = Played("row 0", [Turn([1], half)], [[1]], [1], half, [1])
    found = checks.tokens(tokenizer, [one])
    assert found.state == "ok" and found.figures["changed_by_encoding"] == 1
    assert checks.tokens(tokenizer, [replace(one, response_ids=[*half, 3])]).text.endswith(
        "1 tokens follow the last turn"
    )
    assert "training asks for 0 turns, evaluation for 1" in checks.tokens(tokenizer, [replace(one, asked=[])]).text


def test_whole_episodes_may_be_left_out_where_the_settings_say_so():
    one = Played("row 0", [Turn([1], [2, 3])], [[1]], [1], [2, 3], [0, 0])
    assert checks.masks([one], False).state == "failed"
    assert checks.masks([one], True).figures["left_out"] == 1


# ---- the command


def test_the_command_prints_the_checks_and_fails_where_one_does(tmp_path, capsys):
    file = tmp_path / "certificate.json"
    found = [checks.Check("tokens", "ok", "fine"), checks.Check("mask", "warning", "hm")]

    def write():
        shown = [{"name": c.name, "state": c.state, "text": c.text, "figures": {}} for c in found]
        file.write_text(json.dumps({"verdict": checks.verdict(found), "checks": shown}))

    write()
    assert checks.certified(file).startswith("=> certified: 2 checks, 1 warnings, 0 failed")
    assert capsys.readouterr().out == "ok       tokens: fine\nwarning  mask: hm\n"
    found.append(checks.Check("stop", "failed", "no"))
    write()
    with pytest.raises(SystemExit) as ended:
        checks.certified(file)
    assert ended.value.code == 1 and "=> not certified: 3 checks, 1 warnings, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"STACK": "cpu", "METHOD": "dpo"}, "METHOD=dpo: samples nothing in training"),
        ({"STACK": "a100", "N_GPUS": "1"}, "STACK=a100: has verl 0.6.1, whose agent loop differs"),
    ],
)
def test_what_cannot_be_certified_is_refused_in_one_line(tmp_path, given, said):
    assert said in refused("certify", TASK="countdown", ARTIFACTS=str(tmp_path), **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.parametrize(("task", "own"), [("calculator", {"MAX_TURN_LENGTH": "128"}), ("countdown", {})])
def test_the_very_small_model_is_certified_with_a_real_engine(small_model, tmp_path, task, own):
    variables = SMALL | {"TASK": task, "MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "LIMIT": "3"}
    variables |= {"MAX_PROMPT_LENGTH": "768", "MAX_RESPONSE_LENGTH": "384"} | own
    result = make("certify", **variables)
    assert result.returncode == 0 and "=> certified: 8 checks" in result.stdout, result.stdout
    (file,) = tmp_path.glob(f"certify/{task}/*/certificate.json")
    figures = {check["name"]: check["figures"] for check in json.loads(file.read_text())["checks"]}
    # Random bytes are seldom text.
    assert figures["tokens"]["changed_by_encoding"] >= 3 and figures["log_probs"]["tokens"] > 0
    assert figures["log_probs"]["mean"] < 0.1
