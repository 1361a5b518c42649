"""Answers that are an arithmetic expression over whole numbers: parse and compute them exactly, run nothing."""

import ast
import operator
import re
from fractions import Fraction

MAX_EXPRESSION_CHARS = 200
# One number has at most 9 digits and an expression at most 100 of them, so exact fractions stay small.
MAX_DIGITS = 9

_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_SPELLING = str.maketrans({"−": "-", "–": "-", "×": "*", "·": "*", "÷": "/", "\n": " ", "\t": " "})
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def parse_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Value and numbers of an arithmetic expression over + - * / and parentheses, or None if it is not one.

    ``expr = target`` counts as ``expr``. The text is parsed to a syntax tree and walked; nothing is evaluated as code,
    and no float occurs. A division by zero gives None.
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        return None
    text = text.translate(_SPELLING).strip()
    expression, _, right = text.partition("=")
    if right and not re.fullmatch(r"\s*-?[0-9]+\s*", right):
        return None
    expression = expression.strip()
    if not _ALLOWED.fullmatch(expression) or re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}|\b0[0-9]", expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
        numbers: list[int] = []
        return _value(tree, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__} is not allowed")
