"""Errors that a user can cause, each with the exit code that it ends the program with.

Everything else that is raised is a defect of the program and ends it with code 4.
"""

from __future__ import annotations


class VerifierError(Exception):
    """Base of all errors whose message alone tells the user what to do."""

    exit_code = 4


class ConfigError(VerifierError):
    """A wrong command line, configuration key or value."""

    exit_code = 2


class LoadError(VerifierError):
    """A model, property or data file that cannot be read or is not supported."""

    exit_code = 3


class DeadlineExceeded(BaseException):
    """The time for this instance is used up; the verdict is `timeout`.

    Not an `Exception`: the alarm raises it anywhere, also below code that turns every exception of a
    library into a message about the model.
    """


def describe(error: BaseException) -> str:
    """An error on one line: its message if that alone tells the user what to do, else its type as well."""
    text = " ".join(str(error).split())
    return text if isinstance(error, VerifierError) else f"{type(error).__name__}: {text}"


def exit_code(error: BaseException) -> int:
    """Code that an error ends the program with."""
    return error.exit_code if isinstance(error, VerifierError) else VerifierError.exit_code


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the CPU or a device."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
