"""The exceptions that tfopt raises. Wrong arguments raise `ValueError` or `TypeError`, as in Keras."""

import difflib
import re
from collections.abc import Iterable


class TfoptError(Exception):
    """Something tfopt cannot do for a reason outside the call's arguments."""


class HardwareError(TfoptError):
    """A device or its driver did not answer as expected."""


class PipelineError(TfoptError):
    """Input data is missing, empty, damaged or inconsistent."""


class DeviceMemoryError(PipelineError):
    """The data do not fit into the device's memory."""


class OutOfMemoryError(TfoptError):
    """A step of training or evaluation needs more of the device's memory than is free."""


class ClusterError(TfoptError):
    """The cluster is described wrongly, or a peer in it does not answer."""


class CheckpointError(TfoptError):
    """A checkpoint cannot be saved, or none can be read."""


class ResultsError(TfoptError):
    """A recorded benchmark run cannot be read or compared."""


class UnsupportedError(TfoptError):
    """Keras, TensorFlow or this machine cannot do what was requested."""


def unknown_name(kind: str, received: object, valid: Iterable[str], meant: str | None = None) -> ValueError:
    """Returns the error for an unknown name, which suggests `meant` or the nearest valid one.

    Example:
        >>> str(unknown_name("suite", "precison", ["precision", "xla"]))
        "Expected a suite: 'precision' or 'xla'. Received: 'precison'. Did you mean 'precision'?"
    """
    names = list(valid)
    listed = " or ".join([", ".join(map(repr, names[:-1])), repr(names[-1])] if len(names) > 1 else map(repr, names))
    near = [meant] if meant else difflib.get_close_matches(str(received), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    article = "an" if kind[0] in "aeiou" else "a"
    return ValueError(f"Expected {article} {kind}: {listed}. Received: {received!r}.{hint}")


def summarize_error(error: BaseException) -> str:
    """Returns the message of an error of Keras or TensorFlow without colours, arguments and source locations."""
    where = ("Graph execution error", "Detected at node", "File ", "Stack trace", "[[{{node")
    text = re.sub(r"\x1b\[\d*m", "", str(error).split("Arguments received")[0])
    said = " ".join(line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith(where))
    return said.replace("Exception encountered when calling ", "in ").strip(" .") or type(error).__name__
