"""What Keras tells no callback, and the functions that call it know."""

import sys
from types import FrameType
from typing import TypeVar

Kind = TypeVar("Kind")


def variable_of_a_caller(name: str, kind: type[Kind]) -> Kind | None:
    """The local variable `name` of the nearest caller in which it is a `kind`, or None."""
    # Not by way of this function's own frame: a frame that is one of its own variables is a cycle, and keeps what was
    # found. An iterator of tf.data would then end at some later garbage collection, for which a step waits.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # Only then: asked for its variables, a frame keeps all of them until it ends, those that it deletes as well.
        if name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            found = frame.f_locals.get(name)
            if isinstance(found, kind):
                return found
        frame = frame.f_back
    return None
