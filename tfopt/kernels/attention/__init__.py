"""One attention through cuDNN: found in the method of a layer of any class, or asked for by a layer of one's own.

following.py   runs a method with operations that note products, and recognizes the one that ends an attention
weights.py     reads off the graph how the attention weights are computed
masks.py       takes masks apart, into what is known when a step is traced and what each batch brings
call.py        one attention, however it was found: what keeps cuDNN from it, and the forms in which cuDNN computes it
operation.py   dot_product_attention, for layers of one's own
"""
