"""Whether an error leads to what it must not: a walk of its whole chain, as an error reporter makes it."""

from __future__ import annotations

from collections.abc import Iterator


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that led to it: `__cause__`, and `__context__` though `from None` hides it."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and one not in found:
            found.append(one)
            yield one
            left += [one.__cause__, one.__context__]


def held(error: BaseException) -> Iterator[tuple[str, str]]:
    """What an error holds: its text, `args`, every attribute, and what those of pydantic tell when called."""
    yield "str()", f"{error} {error!r}"
    for name in dir(error):
        if name in ("errors", "json"):
            yield f"{name}()", repr(getattr(error, name)())
        elif not name.startswith("__") or name == "__notes__":
            value = getattr(error, name, None)
            if not callable(value):
                yield name, repr(value)


def assert_no_leak(error: BaseException, *canaries: str | bytes) -> None:
    """Require that no canary, ASCII all, is anywhere in the chain of `error`."""
    assert canaries
    for one in chain(error):
        for where, shown in held(one):
            for canary in canaries:
                text = canary if isinstance(canary, str) else canary.decode("ascii")
                assert text.isascii()
                assert text not in shown, f"{type(one).__name__}.{where} holds it"
