"""Input pipelines that keep the device fed: `build_pipeline()`, and `plan_pipeline()` to see what it decides.

- `plan_pipeline(source, ...)`: a `PipelinePlan`; `print` it, then `.build()`
- `build_pipeline(source, ...)`: the same in one call, for `model.fit`
- `arrays`, `dataset`, `hdf5`, `images`, `npy`, `records`, `tfds`: sources; `Source`, for one of your own
- `RandomCrop`, `CentralCrop`, `per_batch`: for the options `crop` and `augment`
- `clear_cache(...)`: removes what pipelines have cached on disk
- `write_records(source, folder)`, `verify_records(folder)`: examples as TFRecord files with checksums
- `profile_pipeline(plan)`: which stage is slow, and what it would be without
"""

from tfopt.pipelines.cache.folder import clear_cache
from tfopt.pipelines.crop import CentralCrop, RandomCrop
from tfopt.pipelines.options import per_batch
from tfopt.pipelines.plan import PipelinePlan, build_pipeline, plan_pipeline
from tfopt.pipelines.profiling import PipelineProfile, StageProfile, profile_pipeline
from tfopt.pipelines.sources.arrays import arrays
from tfopt.pipelines.sources.dataset import dataset
from tfopt.pipelines.sources.hdf5 import hdf5
from tfopt.pipelines.sources.images import images
from tfopt.pipelines.sources.npy import npy
from tfopt.pipelines.sources.records import records
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.sources.tfds import tfds
from tfopt.pipelines.tfrecords.verify import RecordsReport, verify_records
from tfopt.pipelines.tfrecords.write import write_records

__all__ = [
    "CentralCrop",
    "PipelinePlan",
    "PipelineProfile",
    "RandomCrop",
    "RecordsReport",
    "Source",
    "StageProfile",
    "arrays",
    "build_pipeline",
    "clear_cache",
    "dataset",
    "hdf5",
    "images",
    "npy",
    "per_batch",
    "plan_pipeline",
    "profile_pipeline",
    "records",
    "tfds",
    "verify_records",
    "write_records",
]
