"""`fingerprint(value, name=...)`: names a cache on disk after the data, functions and options it was made from."""

from tfopt.pipelines.cache.fingerprint.graph import fingerprint

__all__ = ["fingerprint"]
