"""The summary writers of a program, with the folder of each, which TensorFlow does not keep."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_MODULE = "tensorflow.python.ops.summary_ops_v2"
#: The attribute of a writer that has the arguments of its constructor.
_NOTED = "_raytf_made_with"


@contextlib.contextmanager
def noted_writers() -> Iterator[None]:
    """Note the folder of each summary writer that is made while the `with` statement lasts."""
    from tensorflow.python.ops import summary_ops_v2

    kind = summary_ops_v2._ResourceSummaryWriter
    own = kind.__init__

    def init(self: Any, create_fn: Any, init_op_fn: Any, *args: Any, **kwargs: Any) -> None:
        own(self, create_fn, init_op_fn, *args, **kwargs)
        vars(self)[_NOTED] = getattr(init_op_fn, "keywords", {})

    kind.__init__ = init
    try:
        yield
    finally:
        kind.__init__ = own


def writer_folder(writer: Any) -> tuple[str | None, str]:
    """Return the folder in which a summary writer writes, None if it was not noted, and the suffix of its files."""
    noted = vars(writer).get(_NOTED, {})
    folder, suffix = (noted.get(name) for name in ("logdir", "filename_suffix"))
    return (None if folder is None else _text(folder)), ("" if suffix is None else _text(suffix))


def default_writer() -> tuple[Any, Any]:
    """Return the summary writer that the program has made the default one in this thread, and the default step.

    Returns:
        None for the writer where there is none, or where its folder was not noted.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return None, None
    writer, step = module._summary_state.writer, module._summary_state.step
    is_known = writer is not None and _NOTED in vars(writer)
    return (writer if is_known else None), step


def _text(value: Any) -> str:
    data = value.numpy() if hasattr(value, "numpy") else value
    return data.decode() if isinstance(data, bytes) else str(data)
