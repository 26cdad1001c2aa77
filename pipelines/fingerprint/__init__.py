"""Fingerprints of what a pipeline is made of: a cache on disk is named after them.

- `fingerprint(value, name=...)`: of functions, options and other values
- `files(paths)`: what tells the files of a source from others
"""

from tfopt.pipelines.fingerprint.files import files
from tfopt.pipelines.fingerprint.graph import fingerprint

__all__ = ["files", "fingerprint"]
