"""verl_plugins/whole_responses.py: a response comes once, with the tokens and log-probs of its steps."""

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # a real engine

PROMPT = {"prompt_token_ids": [0, 70, 80, 90]}
LENGTH = 6


@pytest.fixture(scope="module")
def engine(small_model):
    """vLLM's engine, and what its scheduler found in each step, by request."""
    from verl_tasks.evaluation.engines import VLLMEngine
    from verl_tasks.verl_plugins.whole_responses import WholeResponses

    class Recorded(WholeResponses):
        def _returns(self, output) -> bool:
            arrays = output.new_logprobs and output.new_logprobs[:3]
            returned = found.setdefault(output.request_id.split("-")[0], [])
            returned.append([list(output.new_token_ids), arrays, super()._returns(output)])
            return returned[-1][-1]

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr("vllm.config.scheduler.SchedulerConfig.get_scheduler_cls", lambda self: Recorded)
        ours = VLLMEngine(str(small_model), 300, 0, 0.2)
        yield ours.llm.llm_engine, found
        ours.close()


def params(kind: str, length: int = LENGTH, **more):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind[kind]
    return SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, output_kind=kind, **more)


def run(engine) -> dict[str, list]:
    """The outputs of each request, in the order in which they come."""
    came = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            came.setdefault(output.request_id, []).append(output)
    return came


def test_a_response_comes_once_with_the_tokens_and_log_probs_of_its_steps(engine):
    engine, found = engine
    names = {"one": {"seed": 1}, "other": {"seed": 2}, "greedy": {"temperature": 0.0}}
    for name, how in names.items():
        engine.add_request(name, PROMPT, params("FINAL_ONLY", logprobs=2, **how))
    came = run(engine)
    assert came.keys() == names.keys() and len(found["one"]) == LENGTH
    for name, outputs in came.items():
        (output,) = outputs
        tokens, arrays, returned = zip(*found[name], strict=True)
        ids = [token for part in tokens for token in part]
        assert list(output.outputs[0].token_ids) == ids and returned == (False,) * (LENGTH - 1) + (True,)
        own = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        assert own == np.concatenate([part[1][:, 0] for part in arrays]).tolist()
    assert came["one"][0].outputs[0].token_ids != came["other"][0].outputs[0].token_ids


def test_who_wants_each_token_gets_it(engine):
    engine, found = engine
    engine.add_request("each", PROMPT, params("DELTA"))
    assert len(run(engine)["each"]) == LENGTH == sum(returned for _, _, returned in found["each"])


def test_a_response_that_may_be_interrupted_comes_in_parts(engine, monkeypatch):
    engine, found = engine
    monkeypatch.setattr(engine.engine_core.engine_core.scheduler, "parts", True)
    engine.add_request("parts", PROMPT, params("FINAL_ONLY", 40, logprobs=0, seed=3))
    (output,) = run(engine)["parts"]
    assert [number for number, (*_, returned) in enumerate(found["parts"], start=1) if returned] == [16, 32, 40]
    assert len(output.outputs[0].token_ids) == 40 == len(output.outputs[0].logprobs)


def test_nothing_is_kept_of_an_aborted_request(engine):
    engine, _ = engine
    scheduler = engine.engine_core.engine_core.scheduler
    for name in ("stays", "goes"):
        engine.add_request(name, PROMPT, params("FINAL_ONLY"))
    while not scheduler.held:
        engine.step()
    assert len(scheduler.held) == 2
    engine.abort_request(["goes"])
    assert len(scheduler.held) == 1
    (output,) = run(engine)["stays"]
    assert len(output.outputs[0].token_ids) == LENGTH and not scheduler.held


def test_what_is_held_is_no_object_for_each_token():
    """The garbage collector visits each: with 300,000 tokens held it took most of the scheduler's time."""
    import gc

    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    from verl_tasks.verl_plugins.whole_responses import Held

    def output(token: int) -> EngineCoreOutput:
        arrays = np.array([[token]], np.int32), np.array([[-0.5]], np.float32), np.array([1], np.int32)
        return EngineCoreOutput(request_id="a", new_token_ids=[token], new_logprobs=LogprobsLists(*arrays))

    held = Held(output(0))
    gc.collect()
    before = len(gc.get_objects())
    for token in range(2000):
        held.add(output(token))
    assert len(gc.get_objects()) - before < 200
    held.into(last := output(1))
    assert last.new_token_ids == [*range(2000)]
    assert last.new_logprobs.logprob_token_ids[:, 0].tolist() == [*range(2000)]


def test_a_message_that_counts_as_sent_may_be_overwritten(tmp_path):
    """vLLM 0.24 writes the next message over a long first part as soon as the last part, here a short one, is sent."""
    import zmq

    import verl_tasks.verl_plugins.whole_responses  # noqa: F401

    with zmq.Context() as context, context.socket(zmq.PUSH) as sender, context.socket(zmq.PULL) as reader:
        sender.linger = 0
        sender.connect(f"ipc://{tmp_path}/outputs")
        tokens = bytearray(100_000)
        assert sender.send_multipart([tokens, b"log-probs"], copy=False, track=True).done
        tokens[:] = b"1" * len(tokens)
        reader.rcvtimeo = 10_000
        reader.bind(f"ipc://{tmp_path}/outputs")
        assert reader.recv_multipart()[0] == bytes(100_000)
