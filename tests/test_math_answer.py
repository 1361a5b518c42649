"""rewards/math_answer.py: which text is the final answer, which number it states, what equals what."""

import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_tasks.rewards import math_answer
from verl_tasks.rewards.math_answer import MAX_ANSWER_CHARS, compare, find_answer, read_number

MATRIX = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"


NUMBERS = [
    (
        18,
        r"""18 | 018 | +18 | 18.00 | $18 | \$18 | €18 | 36/2 | \frac{36}{2} | 18% | 18\% | **18** | _18_ | (18) |
$\boxed{18}$ | \boxed{\text{18}} | \left(18\right) | 18 \text{ eggs} | 18^\circ | 18°C | 18 eggs per day |
18, which is what she makes | 18 km/h | 18USD | x = 18 | 9 * 2 = 18 | ≈ 18 | ₹18 | 18元 | 答案：18 | US$18 |
￥18 | EUR 18 | \pounds 18 | 18％ | 18 ℃ | 18 µm | 18 zł | 18개 | 18 m² | 18 \text{ ft}^{3} |
1.8 \times 10^{1} | 1.8 × 10^1 | Answer: 18 | the total is 18""",
    ),
    (Fraction(37, 2), r"18.5 | １８．５"),
    (-3, r"-3 | - 3 | −3"),
    (1000, r"1,000 | 1{,}000 | 1e+03"),
    (Fraction(3, 2 * 10**5), r"1.5e-05 | 1.5E-05 | 1.5 × 10^-5"),
    (Fraction(3, 2), r"1 1/2 | 1\frac12"),
    (-18, r"\frac{-36}{2} | -USD 18"),
    (
        None,
        r"""1\frac{-1}{2} | 18USDT1 | 3 millions | 18 lakh | 18 Mio | 18 тысяч | 18만 | 18 ou plus | 24 x^2 |
24 xy/z^2 | 1,50,00 | eggs | 1/0 | 48 24/1 | 1 1.5/2 | 1 18/m | 18万 | 18加1 | 10分之三 | 18 m^2 + 1 | 2 × 9^1 |
1 × 10^999 | \gcd(18, 36) | 1/2/3 | 1,00 | 1 000 | 17, 18, 19 | 18 or nineteen | 18 and a half |
18 dollars and 5 cents | 18-20 | 18:30 | 18 x | 18k | 1e5 | 18 squared | 18! | 9*2 | 9^2 | 9 \times 2 |
2\sqrt{81} | \frac{9 + 9}{1} | x >= 18 | 18 = 9 * 2""",
    ),
    (24, r"24 yd^2 | 24 m/s^2 | 24\ \mathrm{m/s^{2}}"),
]
ODD_NUMBERS = {
    "18\u00a0eggs": 18,
    "1\u200b8\ufeff": 18,
    "9" * 18: 10**18 - 1,
    "": None,
    "9" * 19: None,
    " " * MAX_ANSWER_CHARS + "18": None,
    ".5": Fraction(1, 2),
    "-0": 0,
    "1,000,000.50": Fraction(2000001, 2),
    r"-\frac{1}{2}": Fraction(-1, 2),
    "18 million": 18_000_000,
    "$1.5 million dollars": 1_500_000,
    "₹1,50,000": 150_000,
    "1/3 ≈ 0.33": Fraction(1, 3),
}


@pytest.mark.parametrize(
    "text, number",
    [*((text.strip(), number) for number, texts in NUMBERS for text in texts.split("|")), *ODD_NUMBERS.items()],
)
def test_read_number(text, number):
    assert read_number(text) == number


HEADINGS = ["2.1 Check", "(2) Check", "2 - Check", "2、检查", "第2步 检查", "2️⃣ Check", '2. "Check" it']


@pytest.mark.parametrize(
    "response, text, how",
    [
        ("#### 18", "18", "hashes"),
        ("####\n18", "18", "hashes"),
        ("#### **18** eggs.", "18 eggs", "hashes"),
        ("#### **Answer:** 18", "18", "hashes"),
        ("#### The answer is 18", "18", "hashes"),
        ("#### Total = 18", "18", "hashes"),
        ("#### 18 or 19", "18 or 19", "hashes"),
        ("#### 18\nThere are 24 hours in a day.", "18", "hashes"),
        ("#### 18. There are 24 hours in a day.", "18", "hashes"),
        ("#### 18.50 dollars. Or so.", "18.50 dollars", "hashes"),
        ("#### 18" + " and so on, 24 hours a day" * 1000, None, "hashes"),
        ("#### 18\n" + "24 hours a day. " * 6000, "18", "hashes"),
        ("#### 18\n#### Note\nThat was all.", "18", "hashes"),
        ("#### 1. Add\n#### 2) **Check it**\n\\boxed{18}", "18", "boxed"),
        ("#### 18\n#### **2. Check the sum.**", "18", "hashes"),
        ("#### 17\n#### 18. That is all.\n", "17", "hashes"),
        ("#### 答案是18元。完", "18元", "hashes"),
        ("The answer is 18</s>\n", "18", "sentence"),
        ("最终答案：18个", "18个", "sentence"),
        *((f"#### 18\n\n#### {heading}", "18", "hashes") for heading in HEADINGS),
        ("#### 17\n#### 18.5 dollars", "18.5 dollars", "hashes"),
        ("#### EUR 18", "EUR 18", "hashes"),
        ("#### 18[EOS]<pad><pad>", "18", "hashes"),
        ("La respuesta es 18.", "18", "sentence"),
        ("Die Antwort lautet: 18 Euro", "18 Euro", "sentence"),
        ("Ответ: 18", "18", "sentence"),
        ("答えは18です。", "18です", "sentence"),
        ("정답은 18", "18", "sentence"),
        ("#### 18 \\boxed{19} The answer is 20.", "18 \\boxed{19} The answer is 20", "hashes"),
        ("#### Step 3: add them\n\\boxed{18}", "18", "boxed"),
        ("##### 19\n\\boxed{18}", "18", "boxed"),
        ("\\boxed{17} or \\boxed{18}", "18", "boxed"),
        ("\\boxed{\\frac{36}{2}}", "\\frac{36}{2}", "boxed"),
        ("\\boxed{\\text{\\textbf{18}}}", "\\text{\\textbf{18}}", "boxed"),
        ("\\boxed{\\{18\\}}", "\\{18\\}", "boxed"),
        ("\\boxed {18}. The answer is 20.", "18", "boxed"),
        ("\\boxed{18} and \\boxed{19", "18", "boxed"),
        ("The answer is 18.", "18", "sentence"),
        ("**Final Answer**: 18", "18", "sentence"),
        ("The answer is:\n\n18", "18", "sentence"),
        ("The answer to the question of 24 hours is 18.", "18", "sentence"),
        ("The answer is 2 eggs for 9 days, which makes 18. There are 24 hours.", "18", "sentence"),
        ("The answer is - 3.", "- 3", "sentence"),
        ("The answer is $2\\sqrt{81}$.", "2\\sqrt{81}", "sentence"),
        ("The answer is 18. The answer is unknown.", "18", "sentence"),
        ("<think>#### 17</think>#### 18", "18", "hashes"),
        ("#### 18<think>#### 17", "18", "hashes"),
        ("x" * 200_000 + "#### 18", "18", "hashes"),
        ("<think>" + "x" * 200_000 + "#### 18", None, None),
        ("<think>#### 18", None, None),
        ("<think>a</think><think>#### 18", None, None),
        ("#### 18" + "x" * 200_000, None, None),
        ("#### none", None, None),
        ("\\boxed{" + "1" * 300 + "}", None, None),
        ("The answer is unknown.\n18", None, None),
        ("<think>a</think><answer>#### 18</answer>", "18", "hashes"),
        ("#### <answer>18</answer>", "18", "hashes"),
        ("#### 18</solution>", "18", "hashes"),
        ("[ANSWER]#### 18[/ANSWER]", "18", "hashes"),
        ("#### 18<|im_end|>\n<|im_start|>user\n7", "18", "hashes"),
        ("<answer>\\boxed{<b>18</b>}</answer>", "18", "boxed"),
        ("The answer is 24 zorks^2.", "24", "sentence"),
        ("The answer is 24 m/s^2.", "24 m/s^2", "sentence"),
        ("Answer: 18 (from step 2)", "18", "sentence"),
        ("Answer: 18 [1]", "18", "sentence"),
        ("答案是18（第2步）", "18", "sentence"),
        ("The answer is ₹1,50,000.", "₹1,50,000", "sentence"),
        ("The answer is twice as much, 1 000.", None, None),
        ("The answer is at 18:30 today.", None, None),
        *((f"The answer is about {odd}.", None, None) for odd in ("7²", "3 ½", "3½", "5M", "18k", "1e-5")),
        ("The answer is that she needs 1 1/2 cups.", "1 1/2", "sentence"),
        ("The answer is 6 - 5i.", "6 - 5i", "sentence"),
        ("The answer is (3, \\frac{\\pi}{2}).", "(3, \\frac{\\pi}{2})", "sentence"),
        ("The answer is $5 + $13 = $18 in all.", "$5 + $13 = $18 in all", "sentence"),
        ("\\boxed{1} and \\boxed{2}", "1, 2", "boxed"),
        ("$\\boxed{(1, 2)}$, \\quad $\\boxed{(2, 1)}$", "(1, 2), (2, 1)", "boxed"),
        ("\\boxed{17}, no: \\boxed{18}", "18", "boxed"),
        ("", None, None),
    ],
)
def test_find_answer(response, text, how):
    found = find_answer(response)
    assert (found and found.how) == how
    if text is not None:
        assert found.text == text
    elif how:
        assert len(found.text) <= MAX_ANSWER_CHARS


@pytest.mark.parametrize(
    "response, text",
    [
        ("It is 18.", "18"),
        ("9*2=$1,018.50, so it is", "1,018.50"),
        ("It is -3", "-3"),
        ("from 21-3", "3"),
        ("from 21 -3", "3"),
        ("It is \\frac{1}{2}", "1/2"),
        ("24 hours</think>none", None),
        ("She needs 1 1/2 cups, or 2\\frac{3}{4}", "2 3/4"),
        ("It is 3 × 10^8", None),
        ("It is 1.5e-07", None),
        ("It is 24 yd^2", "24"),
        ("It is 18, see step 2", "18"),
        ("It is ₹1,50,000", "1,50,000"),
        ("#### 18\n24 hours", "18"),
    ],
)
def test_flexible_takes_the_last_number_where_no_answer_is_marked(response, text):
    found = find_answer(response, flexible=True)
    assert (found and found.text) == text


@pytest.mark.parametrize(
    "answer, truth, well_formed, right",
    [
        ("18.00", "18", True, True),
        ("0.33", "1/3", True, False),
        ("1/3", r"\frac{2}{6}", True, True),
        ("18%", "0.18", True, False),
        (r"2\sqrt{81}", "18", True, True),
        (r"1.8 \times 10^{1}", "18", True, True),
        *((given, "1e-05", True, right) for given, right in (("0.00001", True), ("e-5", False), ("1e-05", True))),
        (r"1.5 \times 10^{22}", "1.5e+22", True, True),
        ("2e-1", "-1 + 2e", True, True),
        *((given, "1 000", False, False) for given in ("0", "2 000", "1 000")),
        *((given, "1.000.000", False, False) for given in ("0", "2.000.000", "1.000.000")),
        ("1 000", "0", False, False),
        *((f"{hour} am", rf"{hour}\text{{ p.m.}}", True, False) for hour in ("5", "1:30")),
        *((f"{hour} PM", f"{hour} pm", True, True) for hour in ("5", "1:30")),
        ("20 hours 3 minutes", "3 hours 20 minutes", False, False),
        ("3 hours and 20 minutes", "3 hours and 20 minutes", False, False),
        ("6ft 5in", "5ft 6in", False, False),
        *((given, "1:2:3", True, right) for given, right in (("1 : 2 : 3", True), ("1:3:2", False))),
        *((given, "2024-01-15", form, form) for given, form in (("2024-01-15", True), ("2008", False))),
        *((each, each, True, True) for each in ("x = 2 and y = 3", r"\frac 1 2 x", r"5 \text{ and } 7", "2:1", "1, 2")),
        (r"2\sqrt{3}", r"\sqrt{12}", True, True),
        (r"\frac{1}{\sqrt 2}", r"\frac{\sqrt2}{2}", True, True),
        ("x^2+1", "1+x^2", True, True),
        ("x^2+1", "x^2", True, False),
        ("(2,1)", "(1, 2)", True, False),
        (r"\{1,2\}", r"\{2,1\}", True, True),
        ("18x", "18", False, False),
        (r"\infty", "18", False, False),
        ("18 or 19", "18", False, False),
        ("eggs", "18", False, False),
        ("", "18", False, False),
        ("1 + " * 100 + "1", "101", False, False),
        *((given, "18", True, True) for given in ("x + y = 18", "f(2) = 18", "x = 9 + 9 = 18", r"x \approx 18")),
        *((given, "18", True, False) for given in ("2x = 18", "x^2 = 18", "-x = 18")),
        *((given, "x = 5", True, right) for given, right in (("5", True), ("-x=5", False), ("x = -5", False))),
        ("0", "2x + z = 0", True, False),
        ("10x - 14y + 8 = 0", "5x - 7y + 4 = 0", True, True),
        ("52", "52_8", True, True),
        ("52_9", "52_8", True, False),
        (r"\begin{bmatrix} 1 \\ 2.0 \end{bmatrix}", MATRIX, True, True),
        (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", MATRIX, True, False),
        ("x > 2", r"(2, \infty)", True, True),
        ("x \\geq 2", r"(2, \infty)", True, False),
        (r"1 - \frac{1}{\mathrm{e}}", "1 - 1/e", True, True),
        (r"\cfrac{1}{3}", "1/3", True, True),
        (r"\frac{270}7", r"\frac{270}{7}^\circ", True, True),
        (r"11,\! 111,\! 100", "11111100", True, True),
        # Words, which math-verify would multiply letter by letter.
        *((given, "cat", True, False) for given in ("act", r"\text{act}", "x = act", "**Act**", "dog", "the cat")),
        *((given, "cat", False, False) for given in ("t*c*a", r"t \cdot a \cdot c", "18")),
        *(
            (given, "cat", True, True)
            for given in ("Cat", r"\text{ cat }", "x = cat", '"cat".', "The word is cat", "$cat$")
        ),
        *((given, r"\text{Tuesday}", True, True) for given in ("tuesday", r"\textbf{Tuesday}", "Tuesday.")),
        *((given, "cat, dog", True, right) for given, right in (("dog and cat", True), ("act, dog", False))),
        *((given, "even or odd", True, right) for given, right in (("odd or even", True), ("odd", False))),
        *((given, "the side", True, right) for given, right in (("The  side", True), ("side the", False))),
        *((given, "DNE", True, right) for given, right in (("DNE", True), ("END", False))),
        *((given, "no", True, right) for given, right in (("No.", True), (r"\text{no}", True), ("on", False))),
        *((given, "on", True, right) for given, right in (("On", True), ("x = on", True), ("no", False))),
        *((given, r"\text{yes}", True, right) for given, right in (("Yes", True), ("no", False))),
        *((given, "up", True, right) for given, right in (("Up", True), ("down", False))),
        *((given, "no", False, False) for given in ("n*o", "18")),
        *((given, "São Paulo", True, right) for given, right in (("sa\u0303o paulo", True), ("Perú", False))),
        *((given, "да", True, right) for given, right in (("Да", True), ("нет", False))),
        *((given, "кот", True, right) for given, right in (("Кот.", True), ("ток", False))),
        *((rf"{sign}theta", "theta", True, True) for sign in ("", "\\")),
        # Products of letters.
        *((given, "ab", True, True) for given in ("ba", r"b \cdot a", "b*a")),
        *((given, "at", True, True) for given in ("ta", "t*a")),
        *((given, "x*y", True, True) for given in ("y*x", "yx")),
        *((given, "abc", True, True) for given in ("cba", "c*b*a")),
        *((given, "xyz", True, True) for given in ("zyx", r"x \cdot z \cdot y")),
        *((given, "mgh", True, True) for given in ("ghm", "m*g*h")),
        *((given, "2abd", True, right) for given, right in (("2bad", True), ("2ab", False))),
        *((given, "infinity", True, True) for given in ("infinity", "inf", r"\infty")),
        *((given, "x and y", True, True) for given in ("y and x", "x, y")),
        *((each, each, True, True) for each in ("sin x", r"\sin\theta")),
        (r"\beta\alpha", r"\alpha\beta", True, True),
    ],
)
def test_compare(answer, truth, well_formed, right):
    assert compare(answer, truth) == (well_formed, right)


HOSTILE = ["9^{9^{9^{9^{9}}}}", "99999999999999999!", r"\sum_{i=1}^{100000000} \frac{1}{i^2}", r"\frac{" * 30, "\ud800"]


@pytest.fixture(scope="module", autouse=True)
def time_for_a_busy_machine():
    """A comparison that takes milliseconds is not to fail where the machine stands still for some seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_answer._sandbox, "_seconds", 60.0)
        yield


def in_thread(call, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments).result(timeout=120)


@pytest.mark.medium
@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_ends_in_a_thread_too_and_the_next_one_is_judged(answer, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(math_answer._sandbox, "_seconds", 0.5)
        assert in_thread(compare, answer, "18") == (False, False)
    assert in_thread(compare, rf"\sqrt{{{18 + len(answer)}^2}}", str(18 + len(answer))) == (True, True)


@pytest.mark.parametrize(
    "response",
    [
        "9**9**9**9",
        "#### 1" * 20_000,
        "\\boxed{1" * 20_000,
        "The answer is 9" * 10_000,
        "<think>" * 20_000,
        "#### " + "*" * 100_000,
        "#### " + "`9" * 50_000,
        "#### " + "\\text{" * 20_000,
        "The answer is " + "1/" * 50_000,
        "The answer is " + "\\text{1}" * 23 + "é é",
        "The answer is " + "\\sin" * 40 + "é é",
        "\\boxed{1}, " * 9000 + "\\boxed{2",
        "1," * 50_000,
    ],
)
def test_a_long_response_gives_a_short_answer(response):
    for flexible in (False, True):
        found = find_answer(response, flexible)
        assert found is None or len(found.text) <= MAX_ANSWER_CHARS


@pytest.mark.parametrize(
    "text", ["The answer ", "The answer is ", "answer is 9 ", "####", "#### 1", "\\boxed{", "答案是", "<|a|>"]
)
def test_repetition_takes_few_milliseconds(text):
    response = text * (100_000 // len(text))
    find_answer(response, flexible=True)
    times = []
    for _ in range(5):
        start = time.thread_time()
        find_answer(response, flexible=True)
        times.append(time.thread_time() - start)
    assert min(times) < 0.005


def test_text_is_never_run_as_python(tmp_path):
    file = tmp_path / "written"
    for text in (f"__import__('os').system('touch {file}')", rf"\text{{__import__('os').system('touch {file}')}}"):
        assert compare(text[:MAX_ANSWER_CHARS], "18") == (False, False)
    assert not file.exists()


def test_threads_get_their_own_answers():
    numbers = range(100, 140)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: compare(rf"\sqrt{{{n * n}}}", str(n + n % 2)), numbers))
    assert results == [(True, n % 2 == 0) for n in numbers]


numbers = st.fractions(max_denominator=10**6).filter(lambda f: abs(f.numerator) < 10**12)


@given(numbers, st.sampled_from(["{}", "${}", "**{}**", "{} eggs", "\\boxed{{{}}}", "$\\text{{{}}}$", "x = {}", "{}%"]))
def test_a_decorated_number_is_the_number(number, style):
    assert read_number(style.format(number)) == number


@given(st.integers(-(10**15), 10**15), st.sampled_from(["{:,}", "{}.0", "{}.000", "{}", "{}/1"]))
def test_spellings_of_an_integer(number, style):
    assert read_number(style.format(number)) == number


FRAGMENTS = (
    "#### \\boxed{ } { answer is \\frac \\text \\sqrt <think> </think> $ \\ % , . - 18 1/2 ** _ = ( ) million e ^ !"
)
FRAGMENTS = [*FRAGMENTS.split(" "), " ", "\n", "9" * 30, "é", "²", "١٨", "\x00", "\ud800"]
responses = st.one_of(st.text(max_size=300), st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join))


@given(responses, st.booleans())
def test_any_response_gives_a_bounded_answer_or_none(response, flexible):
    found = find_answer(response, flexible)
    if found:
        assert found.text
        assert len(found.text) <= MAX_ANSWER_CHARS
        number = read_number(found.text)
        assert number is None or isinstance(number, Fraction)
