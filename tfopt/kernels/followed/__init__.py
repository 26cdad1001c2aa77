"""Attention of any layer through cuDNN, whoever wrote it. Not yet what `tfopt.kernels.use_flash_attention` does.

layers.py      replaces the methods of a model's layers that compute attention
following.py   runs such a method with operations that note products, and recognize the one that ends an attention
weights.py     reads off the graph how the attention weights are computed
masks.py       takes masks apart, into the causal one and what each batch brings
call.py        one attention, however it was found: its obstacles, and its form for cuDNN
"""
