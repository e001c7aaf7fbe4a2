"""The client with one check taken out, one check at a time, from a list made of its source."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from tests.explore.machines import SOURCE


@dataclass(frozen=True)
class Mutant:
    """A check of the client, by its function and condition, and the client without it."""

    check: str
    tree: ast.Module


@cache
def mutants() -> tuple[Mutant, ...]:
    """The client's source without one check: each `raise`, each call of a verifier, each operand of an `or`.

    A call of a verifier stands alone in its statement: what it checks, it checks by raising.
    """
    source = SOURCE.read_text()
    made = []
    for place, check in enumerate(_checks(ast.parse(source))):
        tree = ast.parse(source)
        _checks(tree)[place].delete()
        made.append(Mutant(check.label, ast.fix_missing_locations(tree)))
    return tuple(made)


@dataclass(frozen=True)
class _Check:
    label: str
    delete: Callable[[], None]


def _checks(tree: ast.Module) -> list[_Check]:
    found = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for parent in ast.walk(function):
            for operands in _alternatives(parent):
                for operand in operands:
                    label = f"{function.name}: operand {ast.unparse(operand)}"
                    found.append(_Check(label, partial(_never, operands, operand)))
            for name in ("body", "orelse", "handlers", "finalbody"):
                block: list[ast.stmt] = getattr(parent, name, None) or []
                for statement in list(block) if isinstance(block, list) else []:
                    if isinstance(statement, ast.Raise) or _verifies(statement):
                        label = f"{function.name}: {_condition(parent, statement)}"
                        found.append(_Check(label, partial(_replace, block, statement)))
    return found


def _alternatives(node: ast.AST) -> list[list[ast.expr]]:
    """The operands of the `or` under which `node` raises, if it does."""
    raises = isinstance(node, ast.If) and any(isinstance(one, ast.Raise) for one in node.body)
    test = node.test if raises and isinstance(node, ast.If) else None
    return [test.values] if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else []


def _verifies(statement: ast.stmt) -> bool:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    called = statement.value.func
    return isinstance(called, ast.Attribute) and called.attr.lstrip("_").startswith(("check", "verify"))


def _condition(parent: ast.AST, statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr):
        return ast.unparse(statement)
    if isinstance(parent, ast.If):
        return f"if {ast.unparse(parent.test)}"
    return (
        f"except {ast.unparse(parent.type)}"
        if isinstance(parent, ast.ExceptHandler) and parent.type
        else "raise"
    )


def _replace(block: list[ast.stmt], statement: ast.stmt) -> None:
    block[block.index(statement)] = ast.Pass()


def _never(operands: list[ast.expr], operand: ast.expr) -> None:
    operands[operands.index(operand)] = ast.Constant(False)
