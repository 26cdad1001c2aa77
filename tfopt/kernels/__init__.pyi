from .attention.operation import dot_product_attention as dot_product_attention
from .attention_layers import use_flash_attention as use_flash_attention
from .batch_norm import fuse_batch_norm as fuse_batch_norm
from .chunked_loss import chunk_cross_entropy as chunk_cross_entropy
from .explanation import Explanation as Explanation
from .explanation import explain as explain
from .replacing import LayerPath as LayerPath
from .replacing import undo as undo
