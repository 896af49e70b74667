"""Formulas over the names of another tool's settings: literals and arithmetic, computed from their syntax tree."""

import ast
import operator
from collections.abc import Callable
from typing import Any

_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, group: item in group, ast.NotIn: lambda item, group: item not in group,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_FUNCTIONS: dict[str, Callable] = {kind.__name__: kind for kind in (bool, float, int, max, min, round, str)}
_LARGEST = 10**18  # of numbers in products and powers
_LONGEST = 10**4  # of texts and lists


def evaluate(node: ast.expr, value_of: Callable[[str], Any]) -> Any:
    """The value of an expression, which is never run. ``value_of`` gives the value of a name, such as a or a.b.

    Raises a `ValueError` for any syntax but literals, arithmetic, comparisons, conditions and the functions above, and
    for huge numbers; and what the operations and ``value_of`` raise.
    """

    def value(part: ast.expr) -> Any:
        return evaluate(part, value_of)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return value_of(ast.unparse(node))
        case ast.List() | ast.Tuple():
            return [value(part) for part in node.elts]
        case ast.UnaryOp(op, operand):
            if type(op) in _UNARY:
                return _UNARY[type(op)](value(operand))
        case ast.BinOp(left, op, right):
            return _binary(op, value(left), value(right))
        case ast.Compare(left, [op], [right]):
            return _binary(op, value(left), value(right))
        case ast.BoolOp(op, parts):
            stops_at = isinstance(op, ast.Or)
            for part in parts[:-1]:
                if bool(first := value(part)) is stops_at:
                    return first
            return value(parts[-1])
        case ast.IfExp(test, body, orelse):
            return value(body if value(test) else orelse)
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(value, arguments))
    raise ValueError(f"{ast.unparse(node)} is not a literal or simple arithmetic")


def _binary(op: ast.AST, left: Any, right: Any) -> Any:
    are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
    is_small = are_numbers and abs(left) <= _LARGEST and abs(right) <= (64 if isinstance(op, ast.Pow) else _LARGEST)
    is_huge = not are_numbers and isinstance(op, ast.Add) and len(left) + len(right) > _LONGEST
    if type(op) not in _BINARY or is_huge or (isinstance(op, ast.Mult | ast.Mod | ast.Pow) and not is_small):
        raise ValueError("is not simple arithmetic")
    return _BINARY[type(op)](left, right)


def parsed(formula: str) -> ast.expr:
    """The expression that a text is."""
    return ast.parse(formula, mode="eval").body


def names_in(formula: str) -> list[str]:
    """The names in a formula, each once, in order; not those of functions."""
    names: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Name | ast.Attribute):
            names.append(ast.unparse(node))
            return
        for part in node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node):
            visit(part)

    visit(parsed(formula))
    return list(dict.fromkeys(names))
