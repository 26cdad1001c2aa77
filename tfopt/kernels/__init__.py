"""Fast paths that Keras on TensorFlow lacks, put in place layer by layer and taken back by `undo`."""

from tfopt.kernels.attention import dot_product_attention
from tfopt.kernels.attention_layers import use_flash_attention
from tfopt.kernels.batch_norm import fuse_batch_norm
from tfopt.kernels.installing import Explanation, LayerPath, explain, undo

__all__ = [
    "Explanation",
    "LayerPath",
    "dot_product_attention",
    "explain",
    "fuse_batch_norm",
    "undo",
    "use_flash_attention",
]
