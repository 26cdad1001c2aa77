"""What a repair is: a defect recognised by its source, and reversible patches that fix it."""

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals import probing
from tfopt.internals.patches import Patch, put, undo
from tfopt.internals.probe import NEEDED, UNFIT, Probe
from tfopt.internals.sources import find, fingerprint

Function = Callable[..., Any]
_lock = threading.RLock()
_thread = threading.local()


@dataclass(slots=True, kw_only=True, eq=False)
class Repair:
    """A defect of Keras or TensorFlow, recognised by its source, and the patches that repair it.

    Nothing is patched before `install`, which compares the source of every function the repair relies on with known
    fingerprints. Version numbers do not matter: a release that leaves these functions alone changes nothing, and in one
    that touches them a probe decides.

    Example:
        >>> tfopt.repairs.CLEAR_SESSION.install()
        >>> tfopt.repairs.CLEAR_SESSION.installed
        True
    """

    name: str
    """Name for `tfopt.repairs.install`."""
    defect: str
    """What is wrong, in a sentence."""
    reference: str
    """The upstream report, or the code at fault."""
    broken: Mapping[str, frozenset[str]]
    """Function ("module:Class.function" or "module:function") → fingerprints known to be broken or, for functions that
    are not replaced, known to work with the repair."""
    replace: Mapping[str, Callable[[Function], Function]]
    """Function → factory that turns the original into its replacement."""
    probe: Probe
    """How to try it where a function's source is not known."""
    without: str
    """How to go on without the repair."""
    unpatched: str = "It stays unpatched, and this may still be wrong:"
    """Consequence of not patching, for the error."""
    mended: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Function → fingerprints of versions fixed upstream."""
    found_in: str = ""
    """Public name of what has the defect, such as "optimizers.ScheduleFreeAdamW", if older releases lack it."""
    on_top: bool = False
    """Whether its patches stand over all others, since it observes what those do."""
    _patches: tuple[Patch, ...] = field(default=(), init=False, repr=False)
    _for_good: bool = field(default=False, init=False, repr=False)
    _blocks: int = field(default=0, init=False, repr=False)

    @property
    def installed(self) -> bool:
        """Whether the repair is installed."""
        return bool(self._patches)

    @property
    def is_absent(self) -> bool:
        """Whether this release of Keras does not have what has the defect."""
        try:
            return bool(self.found_in) and not operator.attrgetter(self.found_in)(keras)
        except AttributeError:
            return True

    @property
    def targets(self) -> tuple[str, ...]:
        """The functions that it replaces or relies on."""
        return tuple(self.broken)

    def applies(self) -> bool:
        """Whether the defect is here: True if it is known to be, False if it is fixed upstream or has nowhere to be.

        Where a function's source is not known, the repair is probed in a process of its own, once for each version.

        Raises:
            tfopt.errors.UnsupportedError: If a function is not known, and the repair does not work.
        """
        try:
            return self.known()
        except UnsupportedError as unknown:
            (verdict,) = probing.verdicts([self])
            if verdict.state == UNFIT:
                raise UnsupportedError(
                    f"{unknown} tfopt has tried the patch on this version: {verdict.why}. Its answers are in "
                    f"{probing.folder()}; to try again, remove them and start Python anew. docs/versions.md lists the "
                    "versions it knows."
                ) from unknown
            return verdict.state == NEEDED

    def standing(self) -> str:
        """Whether this Keras is "known", or else "tried" or "refused" by a probe, "unknown" before it, or "absent"."""
        if self.is_absent:
            return "absent"
        try:
            self.known()
        except UnsupportedError:
            verdict = probing.kept(self)
            return "unknown" if verdict is None else "refused" if verdict.state == UNFIT else "tried"
        return "known"

    def known(self) -> bool:
        """As `applies`, but without a probe: raises if a function is not known."""
        mended = self.is_absent
        for target, broken in () if mended else self.broken.items():
            try:
                found = fingerprint(getattr(*find(target)))
            except (ImportError, AttributeError, OSError, TypeError, SyntaxError) as error:
                raise self._unknown(target, f"its source cannot be read ({error})") from error
            if found in self.mended.get(target, ()):
                mended = True
            elif found not in broken:
                raise self._unknown(target, f"a version with the fingerprint {found}")
        return not mended

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Patches in a block whatever the version, for a probe."""
        patches = self._made()
        put(patches)
        try:
            yield
        finally:
            undo(patches)

    def install(self) -> None:
        """Installs the repair until `remove`, if the defect is there; raises as `applies`. Calls may be repeated."""
        with _lock:
            self._patch()
            self._for_good = self.installed

    def remove(self) -> None:
        """Restores the original functions.

        Raises:
            tfopt.errors.UnsupportedError: If a function has been patched again since.
        """
        with _lock:
            self._unpatch()
            self._for_good = False

    @contextmanager
    def during(self) -> Iterator[None]:
        """Installs the repair for a block; raises as `applies`. An `install` before or inside the block outlasts it."""
        with _lock:
            self._patch()
            self._blocks += 1
        try:
            yield
        finally:
            with _lock:
                self._blocks -= 1
                if not self._blocks and not self._for_good:
                    self._unpatch()

    def _patch(self) -> None:
        if self.installed or not self.applies():
            return
        patches = self._made()
        put(patches)
        self._patches = patches

    def _made(self) -> tuple[Patch, ...]:
        replaced = self.replace.items()
        return tuple(Patch(*find(target), make, self.name, self.on_top) for target, make in replaced)

    def _unpatch(self) -> None:
        undo(self._patches)
        self._patches = ()

    def _unknown(self, target: str, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"Expected a version of {target} that tfopt's patch {self.name!r} knows. Found: {found}, in TensorFlow "
            f"{tf.__version__} and Keras {keras.__version__}. {self.unpatched} {self.defect} {self.without}"
        )


def in_several_replicas() -> bool:
    """Whether the caller is one of several replicas under a tf.distribute strategy."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


@contextmanager
def alone() -> Iterator[None]:
    """Within the block, this thread's replica computes as if it were the only one: `trains_together` is False."""
    before, _thread.alone = is_alone(), True
    try:
        yield
    finally:
        _thread.alone = before


def is_alone() -> bool:
    """Whether the caller is inside `alone`."""
    return getattr(_thread, "alone", False)


def trains_together() -> bool:
    """Whether the caller is one of several replicas that synchronise in each step."""
    return in_several_replicas() and not is_alone()
