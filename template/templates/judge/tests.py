TRUTH = {"question": "Write one sentence with these words: apple, bread", "reference": ""}
CASES = [
    ("I saw the apple and the bread.", 1.0),
    ("<think>so</think>I saw the apple and the bread.", 1.0),
    ("I saw the apple.", 0.0),
    ("<think>I saw the apple and the bread.</think>", 0.0),  # thinking is no answer
    ("", 0.0),
]


@pytest.fixture(autouse=True)
def judge_without_a_server(monkeypatch):
    """In place of the model that judges: it looks for the words of the question."""

    def score(question, response, reference="", rubric=""):
        words = question.partition(": ")[2].split(", ")
        right = float(all(word in response for word in words))
        return {"score": right, "acc": right, "format": float(bool(response.strip()))}

    monkeypatch.setattr(judge, "score", score)
