"""Finds out what a value is, and describes it."""

import logging
import types
from typing import Any

from tfopt.pipelines.cache.fingerprint.callables import describe_callable
from tfopt.pipelines.cache.fingerprint.description import Description, RefusedError
from tfopt.pipelines.cache.fingerprint.functions import describe_code, describe_function
from tfopt.pipelines.cache.fingerprint.modules import describe_module
from tfopt.pipelines.cache.fingerprint.objects import describe_class, describe_object
from tfopt.pipelines.cache.fingerprint.refusals import reason_to_refuse
from tfopt.pipelines.cache.fingerprint.values import describe_value


def describe(value: Any) -> Description:
    """Returns what a value is made of.

    Raises:
        RefusedError: Its state cannot be read, or may change.
    """
    kind = type(value)
    if kind is types.FunctionType:
        return describe_function(value)
    if kind is types.CodeType:
        return describe_code(value)
    if issubclass(kind, type):
        return describe_class(value)
    if issubclass(kind, types.ModuleType):
        return describe_module(value)
    reason = reason_to_refuse(value)
    if reason:
        raise RefusedError(reason)
    if issubclass(kind, logging.Logger):
        return Description("logger", value.name)  # it computes nothing, and holds locks
    return describe_value(value) or describe_callable(value) or describe_object(value)
