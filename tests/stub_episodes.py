"""An evaluation/main.py of calculator whose engine answers from a table; run by test_evaluate_episodes.py.

The model is a folder with a tokenizer and table.json: for each prompt ``{"greedy": episode, "sampled": [episode,
...]}``, where an episode is the texts of its turns. Text that ends in "..." is cut off. asked.jsonl gets a line for
each batch.
"""

import json

from tasks.calculator.environment import Environment
from tasks.common.evaluation import engines, episodes, main
from tasks.common.evaluation.rollouts import Completion
from tasks.common.models.chat_template import answer_ids
from tests import stub_evaluate


class TableEngine(stub_evaluate.TableEngine):
    def __init__(self, model, *how, tensor_parallel=1):
        from transformers import AutoTokenizer  # takes seconds; the process that only shows results needs none

        super().__init__(model)
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(self, requests, sampling):
        with (self.folder / "asked.jsonl").open("a") as asked:
            asked.write(json.dumps([[r.index, r.mode, r.sample, r.turn] for r in requests]) + "\n")
        if (self.folder / "die").exists() and any(request.turn for request in requests):
            raise RuntimeError("the engine died")
        for request in sorted(requests, key=lambda r: -r.index):  # not in order, as an engine answers
            entry = self.table[request.index]
            texts = entry["greedy"] if request.mode == "greedy" else entry["sampled"][request.sample]
            text, cut = texts[request.turn].removesuffix("..."), texts[request.turn].endswith("...")
            ids = answer_ids(self.tokenizer, text, ended=not cut)
            yield request, [Completion(text, "length" if cut else "stop", len(ids), 0.5, False, tuple(ids))]


engines.ENGINES["vllm"] = TableEngine
episodes.GRACE = 10  # the batches are the turns, also on a busy machine


class Breaks(Environment):
    def step(self, action):
        if action.text == "raise":
            raise ZeroDivisionError("the environment broke")
        return super().step(action)


if __name__ == "__main__":
    main.main(environment=Breaks)
