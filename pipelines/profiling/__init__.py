"""Finds out which stage of an input pipeline is slow."""

from tfopt.pipelines.profiling.profile import profile_pipeline
from tfopt.pipelines.profiling.report import PipelineProfile, StageProfile

__all__ = ["PipelineProfile", "StageProfile", "profile_pipeline"]
