"""Writes checkpoints: first the arrays, then the manifest; old ones are removed last."""

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tfopt import checks
from tfopt.checkpoint.folder.blobs import FOLDER, lay_out, path_of, problems_of, write_blob
from tfopt.checkpoint.folder.contents import content_of
from tfopt.checkpoint.folder.keeping import remove_old, remove_unneeded
from tfopt.checkpoint.folder.locking import FolderLock, now
from tfopt.checkpoint.folder.manifest import Found, Manifest, as_json, find_manifests, write_manifest
from tfopt.checkpoint.folder.packing import groups_to_write, stored_before
from tfopt.checkpoint.folder.reading import Checkpoint, read
from tfopt.errors import CheckpointError
from tfopt.files import sync
from tfopt.warn import warn_once

_Signature = tuple[int, int, int]


class Store:
    """A folder with one training's checkpoints; nobody else can save there until `close`.

    Once `write` returns, no kill, power loss or full disk destroys the checkpoint; an unfinished one leaves nothing
    behind. Data unchanged since the checkpoint last written or read is not written again. The disk needs room for one
    checkpoint more than are kept.

    On file systems without locks, such as Lustre mounted without `flock`, nobody is kept out.

    Args:
        folder: For this training alone. It is made if needed.
        keep: How many checkpoints stay, the newest ones. Older ones are removed when a newer one has been read back.
        best: A metric and "min" or "max", such as `("val_loss", "min")`: the checkpoint whose
            `metadata["metrics"]["val_loss"]` is best, the earliest of equal ones, is kept beside them.
        replaces: Whether the checkpoints in the folder are of an earlier training, and go when the first of this one is
            safe. Default: False.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `folder` is a file, `keep` is below 1, or `best` is not a name with "min" or "max".
        tfopt.errors.CheckpointError: If another training saves to the folder, or it cannot be written.

    Example:
        >>> with Store("checkpoints", keep=3, best=("val_loss", "min")) as store:
        ...     last = store.read()
        ...     step = last.step if last else 0
        ...     store.write(step + 1, {"kernel": np.ones((2, 3))}, {"epoch": 0, "metrics": {"val_loss": 0.5}})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        best: tuple[str, str] | None = None,
        replaces: bool = False,
    ):
        self.folder = checks.folder("folder", folder, "Name a folder for the checkpoints.").absolute()
        self._keep = checks.integer("keep", keep, "Pass how many checkpoints to keep.", least=1)
        self._best = checked_best(best)
        self._last: Manifest | None = None  # what is in its blobs is not written again
        self._whole: dict[str, _Signature] = {}  # blobs that were read whole, as their files were then
        self._damaged: set[Path] = set()
        self._guard = threading.Lock()
        try:
            self._lock = FolderLock(self.folder)
            try:
                (self.folder / FOLDER).mkdir(exist_ok=True)
                found = find_manifests(self.folder)
                remove_unneeded(self.folder, found)
                self._first = 1 + max((each.number for each in found), default=0) if replaces else 0
                self._lock.sync_folders()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise self._failed("to save checkpoints", error) from error

    def write(self, step: int, arrays: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> int:
        """Saves a checkpoint, which is safe when this returns, and then removes old ones.

        Args:
            step: Of the training. An earlier checkpoint of the same step is replaced.
            arrays: By name: NumPy arrays or scalars of numbers or bools, those of ml_dtypes included. They must not
                change during the call. Each is read once or twice, one at a time, so a lazy mapping needs memory for
                only one.
            metadata: JSON values; keys must be strings. NaN is allowed. `best` reads `metadata["metrics"]`.

        Returns:
            The bytes that were written of arrays, without what was stored already.

        Raises:
            TypeError: If a value of `arrays` is not a NumPy array or has a dtype that cannot be saved, or the metadata
                is not JSON.
            ValueError: If `step` is negative or an array has the reserved name `__metadata__`.
            tfopt.errors.CheckpointError: If it cannot be saved. The earlier checkpoints are intact, and the next
                `write` may succeed.
        """
        step = checks.integer("step", step, "Pass the number of the step.", least=0)
        if "__metadata__" in arrays:  # reserved by the files' format
            raise ValueError(
                "Expected array names other than '__metadata__', which the file format reserves. Rename it."
            )
        about = as_json(metadata or {})
        with self._guard:
            try:
                self._lock.expect_held()
                found = find_manifests(self.folder)
                manifest, written_bytes = self._write_arrays(step, arrays, about, found)
                write_manifest(self.folder, manifest)
            except BaseException as error:
                self._remove_part()
                if isinstance(error, OSError):
                    raise self._failed(f"to save step {step}", error) from error
                raise
            self._last = manifest
            self._whole = {blob: seen for blob, seen in self._whole.items() if blob in manifest.blobs}
            self._remove_old()
            return written_bytes

    def read(self, step: int | None = None) -> Checkpoint | None:
        """Returns the newest whole checkpoint, or the one of a step; see `tfopt.checkpoint.folder.reading.read`.

        The next `write` does not write again what is in this one.
        """
        with self._guard:
            found = read(self.folder, step)
            if found is not None:
                self._last = found.manifest
                self._damaged.update(found.passed_over)
                self._remember_whole(found.manifest.blobs)
            return found

    def close(self) -> None:
        """Lets another training save here; waits for a `write` in another thread. A second call does nothing."""
        with self._guard:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _write_arrays(
        self, step: int, arrays: Mapping[str, Any], metadata: dict[str, Any], found: list[Found]
    ) -> tuple[Manifest, int]:
        """Writes what is not stored yet; returns the manifest, and how many bytes that was."""
        last = self._last or next((each.manifest for each in found if each.manifest), None)
        contents = {name: content_of(name, arrays[name]) for name in arrays}
        stored = stored_before(contents.values(), last, partial(self._is_whole, last)) if last else {}
        sizes = {place.blob: last.blobs[place.blob] for place in stored.values()} if last else {}
        layouts = [lay_out(group) for group in groups_to_write(contents, stored, last)]
        for layout in layouts:
            write_blob(self.folder, layout, arrays)
            stored.update({place.content: place for place in layout.places.values()})
        if layouts:
            sync(self.folder / FOLDER)
        new = {layout.name: layout.size for layout in layouts}
        self._remember_whole(new)
        manifest = Manifest(
            number=1 + max((each.number for each in found), default=0),
            step=step,
            time=now(),
            best=self._best,
            metadata=metadata,
            blobs=sizes | new,
            arrays={name: stored[content] for name, content in contents.items()},
        )
        return manifest, sum(size.file_bytes for size in new.values())

    def _is_whole(self, last: Manifest, blob: str) -> bool:
        """Whether a blob of the last checkpoint was read whole, and its file has not changed since."""
        if blob not in self._whole or self._whole[blob] != _signature(path_of(self.folder, blob)):
            if problems_of(path_of(self.folder, blob), blob, last.blobs[blob], last.by_blob()[blob]):
                return False
            self._remember_whole([blob])
        return True

    def _remember_whole(self, blobs: Iterable[str]) -> None:
        self._whole |= {blob: found for blob in blobs if (found := _signature(path_of(self.folder, blob)))}

    def _remove_part(self) -> None:
        """Removes what a failed `write` has left, which would take the room of the next one."""
        with suppress(OSError, CheckpointError):
            self._lock.expect_held()  # or the files may be another training's
            remove_unneeded(self.folder, find_manifests(self.folder))

    def _remove_old(self) -> None:
        try:
            self._lock.expect_held()
            found = find_manifests(self.folder)
            remove_old(self.folder, found, keep=self._keep, best=self._best, damaged=self._damaged, since=self._first)
        except OSError as error:
            warn_once(
                f"old_checkpoints {self.folder}",
                f"Expected to remove old checkpoints from {os.fspath(self.folder)!r}. Found: {error}. New ones are "
                "still saved. Watch the space on the disk.",
            )

    def _failed(self, purpose: str, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"Expected {purpose} in the folder of checkpoints {os.fspath(self.folder)!r}. Found: {error}. Earlier "
            "checkpoints there are as they were. Check that the folder exists, can be written and has free space."
        )


def checked_best(best: Any) -> tuple[str, str] | None:
    """Returns a metric and which of its values is best; raises TypeError or ValueError for anything else."""
    if best is None:
        return None
    if not isinstance(best, tuple | list) or len(best) != 2 or not all(isinstance(each, str) for each in best):
        raise TypeError(
            f"Expected best to be a metric and 'min' or 'max'. Received: {best!r}. Pass ('val_loss', 'min')."
        )
    if best[1] not in ("min", "max"):
        raise ValueError(f"Expected 'min' or 'max'. Received: {best[1]!r}. Pass best=('val_loss', 'min').")
    return best[0], best[1]


def _signature(path: Path) -> _Signature | None:
    """Returns what changes when a file is written or replaced; None if it is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
