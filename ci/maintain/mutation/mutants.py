"""The mutants of a source: mutmut's operators, three of our own, and what is left out because no test can or should tell it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import libcst as cst
from libcst.matchers import Assign, AssignTarget, Name, Subscript, matches
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_string

WORDS = {"help", "metavar", "description", "epilog", "prefix"}  # arguments for the eye: of `--help`, and of names of temporary folders


def negated(node: cst.If | cst.While | cst.CompIf) -> Iterator[cst.CSTNode]:
    """`if x` becomes `if not (x)`; mutmut has this for `x if y else z` alone."""
    inside = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    yield node.with_changes(test=cst.UnaryOperation(operator=cst.Not(), expression=inside))


def deleted(node: cst.Expr | cst.Raise) -> Iterator[cst.CSTNode]:
    """A statement for its effect becomes `pass`."""
    if not isinstance(node, cst.Expr) or not isinstance(node.value, cst.BaseString):
        yield cst.Pass(semicolon=node.semicolon)


def emptied(node: cst.Return) -> Iterator[cst.CSTNode]:
    """A value that is returned becomes None."""
    if node.value and not (isinstance(node.value, cst.Name) and node.value.value == "None"):
        yield node.with_changes(value=cst.Name("None"))


def text(node: cst.SimpleString) -> Iterator[cst.CSTNode]:
    """A sentence is mutated as a whole: tests look for its key words, not for each word."""
    mutations = list(operator_string(node))
    yield from mutations[-1:] if " " in node.value else mutations


def argument(node: cst.Call) -> Iterator[cst.CSTNode]:
    """An argument is left out or None, except text for people, and False, which is as false as None and `check`'s default."""
    told = {id(arg) for arg in node.args if arg.keyword and (arg.keyword.value in WORDS or (arg.keyword.value == "check" and _false(arg)))}
    for new in operator_arg_removal(node):
        gone = {id(arg): arg for arg in node.args}.keys() - {id(arg) for arg in new.args}
        replaced = len(new.args) == len(node.args)
        if not gone & told and not (replaced and any(_false(arg) for arg in node.args if id(arg) in gone)):
            yield new


def _false(arg: cst.Arg) -> bool:
    return isinstance(arg.value, cst.Name) and arg.value.value == "False"


OPERATORS: list[tuple[Any, Any]] = [
    *((kind, operator) for kind, operator in mutation_operators if operator not in {operator_string, operator_arg_removal}),
    *((cst.SimpleString, text), (cst.Call, argument), (cst.Return, emptied), (cst.Expr, deleted), (cst.Raise, deleted)),
    *((cst.If, negated), (cst.While, negated), (cst.CompIf, negated)),
]


@dataclass(eq=False)
class Mutant:
    """One change; it is known by its file, its function and the lines before and after, whatever their number."""

    file: str
    function: str
    operator: str
    lines: range  # of the statement, up to what is changed
    module: cst.Module = field(repr=False)
    node: cst.CSTNode = field(repr=False)
    new: cst.CSTNode = field(repr=False)

    @cached_property
    def code(self) -> str:
        return cast("cst.Module", self.module.deep_replace(self.node, self.new)).code

    @cached_property
    def change(self) -> tuple[str, str]:
        """The lines before and after it, without their indentation."""
        old, new = self.module.code.splitlines(), self.code.splitlines()
        parts = [each for each in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if each[0] != "equal"]
        before = [line.strip() for _, start, stop, _, _ in parts for line in old[start:stop]]
        return "\n".join(before), "\n".join(line.strip() for _, _, _, start, stop in parts for line in new[start:stop])

    @property
    def place(self) -> str:
        return f"{self.file}:{self.lines[0]}"

    @property
    def key(self) -> tuple[str, ...]:
        return (self.file, self.function, *self.change)

    def __str__(self) -> str:
        before, after = ("\n".join(f"{sign} {line}" for line in text.splitlines()) for sign, text in zip("-+", self.change, strict=True))
        return f"{self.place} in {self.function} ({self.operator})\n{before}\n{after}"


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str, module: cst.Module) -> None:
        self.file, self.module = file, module
        self.names: list[str] = []
        self.starts: list[int] = []
        self.found: list[Mutant] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._skipped(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.names.append(node.name.value)
        if isinstance(node, cst.BaseCompoundStatement | cst.SimpleStatementLine):
            self.starts.append(self.get_metadata(PositionProvider, node).start.line)
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for new in operator(node):
                    lines = range(self.starts[-1], self._end(node) + 1)
                    where = ".".join(self.names) or "the module"
                    self.found.append(Mutant(self.file, where, operator.__name__.removeprefix("operator_"), lines, self.module, node, new))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._skipped(original_node):
            return
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self.names.pop()
        if isinstance(original_node, cst.BaseCompoundStatement | cst.SimpleStatementLine):
            self.starts.pop()

    def _end(self, node: cst.CSTNode) -> int:
        head = node.test if isinstance(node, cst.If | cst.While) else node
        position = self.get_metadata(PositionProvider, head, None)
        return position.end.line if position else self.starts[-1]

    @staticmethod
    def _skipped(node: cst.CSTNode) -> bool:
        """Code that nothing, or only a person, reads at run time."""
        if isinstance(node, cst.If):
            return isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"
        if isinstance(node, cst.Arg):
            return node.keyword is not None and node.keyword.value in WORDS
        if isinstance(node, cst.Assign):
            return matches(node, Assign(targets=[AssignTarget(Name("__all__"))]) | Assign(value=Subscript(Name("Literal"))))
        return isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom)


def mutants_of(root: Path, file: Path) -> list[Mutant]:
    """All mutants of a source, in the order of its text."""
    wrapper = MetadataWrapper(cst.parse_module(file.read_text("utf-8")))
    finder = _Finder(file.relative_to(root).as_posix(), wrapper.module)
    wrapper.visit(finder)
    return finder.found
