"""Input pipelines that keep the device fed: `build_pipeline()`, and `plan_pipeline()` to see what it decides.

- `plan_pipeline(source, ...)`: a `PipelinePlan`; `print` it, then `.build()`
- `build_pipeline(source, ...)`: the same in one call, for `model.fit`
- `mix([(a, 0.7), (b, 0.3)])`: several sources or plans in fixed proportions, as one plan
- `images`, `images_with_masks`, `files`: sources whose examples are files
- `arrays`, `dataset`, `hdf5`, `npy`, `records`, `table`, `tar`, `tfds`: other sources; `Source`, for your own
- `loader(data)`: a PyDataset, a generator function, a PyTorch or Grain loader as a source of batches
- `tokens`, `lines`, `next_tokens`: documents of token ids, the lines of text files, and what a language model trains on
- `fetch(urls)`: local copies of files in object stores and on web servers
- `RandomCrop`, `CentralCrop`, `RandomFlip`, `per_batch`: for the options `crop` and `augment`
- `clear_cache(...)`: removes what pipelines have cached on disk
- `write_records(source, folder)`, `verify_records(folder)`: examples as TFRecord files with checksums
- `profile_pipeline(plan)`: which stage is slow, and what it would be without
"""

import lazy_loader

# The names stand in __init__.pyi, for type checkers and for lazy_loader alike.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
