"""Input pipelines that keep the device fed: `build_pipeline()`, and `plan_pipeline()` to see what it decides.

- `arrays`, `dataset`, `images`, `records`: sources; `Source`, for one of your own
- `plan_pipeline(source, ...)`: a `PipelinePlan`; `print` it, then `.build()`
- `build_pipeline(source, ...)`: the same in one call, for `model.fit`
"""

from tfopt.pipelines.plan import PipelinePlan, build_pipeline, plan_pipeline
from tfopt.pipelines.sources.arrays import arrays
from tfopt.pipelines.sources.dataset import dataset
from tfopt.pipelines.sources.images import images
from tfopt.pipelines.sources.records import records
from tfopt.pipelines.sources.source import Source

__all__ = ["PipelinePlan", "Source", "arrays", "build_pipeline", "dataset", "images", "plan_pipeline", "records"]
