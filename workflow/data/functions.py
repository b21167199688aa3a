"""Users' own functions, named in the configuration as module:function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workflow.data.problems import Problem


class UserFunctionError(RuntimeError):
    """A user's function that cannot be imported or failed; the message names the key, the function and the problem."""


class UserFunction:
    """A function of a problem, wrapped so that whatever goes wrong in it is named.

    Args:
        key: the configuration key that names it.
        path: module:function.
        result: what its return value must be; called on it, so that e.g. ``float`` also converts.

    Raises:
        UserFunctionError: at once, when it cannot be imported.
    """

    def __init__(self, key: str, path: str, result: Callable[[Any], Any]):
        self._where = f"{key}={path!r}"
        self._result = result
        module, separator, name = path.partition(":")
        if not separator or not module or not name:
            raise UserFunctionError(f"{self._where}: write it as module:function")
        try:
            self._function = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise UserFunctionError(f"{self._where}: cannot be imported ({error!r})") from error
        if not callable(self._function):
            raise UserFunctionError(f"{self._where}: {type(self._function).__name__} is not callable")

    def __call__(self, *arguments: Any, problem: Problem) -> Any:
        """``function(*arguments, problem)``."""
        try:
            return self._result(self._function(*arguments, problem))
        except Exception as error:
            raise UserFunctionError(
                f"{self._where} on problem {problem.digest[:12]} ({problem.question[:80]!r}): {error!r}"
            ) from error
