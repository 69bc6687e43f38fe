"""GitHub's expressions, as far as the workflows use them: https://docs.github.com/en/actions/reference/workflows-and-actions/expressions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_TOKEN = re.compile(r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>\d+)|(?P<name>[A-Za-z_][\w-]*|\*)|(?P<operator>&&|\|\||==|!=|[!().,\[\]]))")
_INSERTED = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
Functions = Mapping[str, Callable[..., Any]]


def fill(value: Any, contexts: Mapping[str, Any], functions: Functions) -> Any:
    """A value of a workflow with every `${{ }}` in it evaluated. One that is an expression as a whole keeps the type of its result."""
    if isinstance(value, dict):
        return {key: fill(each, contexts, functions) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, contexts, functions) for each in value]
    if not isinstance(value, str):
        return value
    if (whole := re.fullmatch(r"\s*\$\{\{(.*)\}\}\s*", value, re.DOTALL)) and "${{" not in whole[1]:
        return evaluate(whole[1], contexts, functions)
    return _INSERTED.sub(lambda found: text(evaluate(found[1], contexts, functions)), value)


def evaluate(expression: str, contexts: Mapping[str, Any], functions: Functions) -> Any:
    parser = _Parser(expression, contexts, {**_FUNCTIONS, **functions})
    value = parser.alternatives()
    parser.expect(None)
    return value


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict | list) else "" if value is None else str(value)


def _equal(left: Any, right: Any) -> bool:
    return left.lower() == right.lower() if isinstance(left, str) and isinstance(right, str) else (left or "") == (right or "")


_FUNCTIONS: Functions = {
    "contains": lambda where, what: any(_equal(each, what) for each in where) if isinstance(where, list) else what.lower() in where.lower(),
    "fromJSON": json.loads,
    "toJSON": json.dumps,
    "format": lambda text, *values: re.sub(r"\{(\d)\}", lambda found: str(values[int(found[1])]), text),
    "always": lambda: True,
}


class _Parser:
    def __init__(self, expression: str, contexts: Mapping[str, Any], functions: Functions) -> None:
        self.tokens = [(str(found.lastgroup), found[0].strip()) for found in _TOKEN.finditer(expression)]
        if "".join(token for _, token in self.tokens) != re.sub(r"\s+(?=(?:[^']*'[^']*')*[^']*$)", "", expression):
            raise ValueError(f"not an expression that the workflows use: {expression!r}")
        self.contexts, self.functions = contexts, functions

    def take(self, *wanted: str) -> str | None:
        if self.tokens and self.tokens[0][0] in {"operator", "name"} and self.tokens[0][1] in wanted:
            return self.tokens.pop(0)[1]
        return None

    def expect(self, wanted: str | None) -> None:
        if wanted is None and not self.tokens:
            return
        if wanted is None or self.take(wanted) is None:
            raise ValueError(f"expected {wanted or 'the end'} before {self.tokens}")

    def alternatives(self) -> Any:
        value = self.conjunction()
        while self.take("||"):
            other = self.conjunction()
            value = value or other
        return value

    def conjunction(self) -> Any:
        value = self.comparison()
        while self.take("&&"):
            other = self.comparison()
            value = value and other
        return value

    def comparison(self) -> Any:
        value = self.negation()
        if operator := self.take("==", "!="):
            return _equal(value, self.negation()) is (operator == "==")
        return value

    def negation(self) -> Any:
        return not self.negation() if self.take("!") else self.properties()

    def properties(self) -> Any:
        value = self.primary()
        while True:
            if self.take("."):
                name = self.tokens.pop(0)[1]
                value = list(value.values()) if name == "*" else _property(value, name)
            elif self.take("["):
                value = _property(value, self.alternatives())
                self.expect("]")
            else:
                return value

    def primary(self) -> Any:
        if self.take("("):
            value = self.alternatives()
            self.expect(")")
            return value
        kind, token = self.tokens.pop(0)
        if kind == "text":
            return token[1:-1].replace("''", "'")
        if kind == "number":
            return int(token)
        if token in {"true", "false", "null"}:
            return {"true": True, "false": False, "null": None}[token]
        if self.take("("):
            arguments = []
            while not self.take(")"):
                arguments.append(self.alternatives())
                self.take(",")
            return self.functions[token](*arguments)
        return self.contexts[token]


def _property(value: Any, name: Any) -> Any:
    """What is not there is null, and a list's property is that of each: `needs.*.result`."""
    if isinstance(value, list):
        return value[name] if isinstance(name, int) else [_property(each, name) for each in value]
    return value.get(name) if isinstance(value, dict) else None
