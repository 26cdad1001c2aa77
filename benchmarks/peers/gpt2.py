"""GPT-2 with 124 million parameters in PyTorch, as tfopt-bench's workload gpt2 trains it: AdamW, batch 16 of 1,024.

    pip install -r benchmarks/peers/requirements.txt
    python benchmarks/peers/gpt2.py [--device cpu] [--tiny] [--variants NAME ...]

scaled_dot_product_attention, fused AdamW, bfloat16 autocast; eager and compiled, resident and fed from pinned memory; a
line of JSON each. Exit code 3 where torch is not installed.
"""

import re
import sysconfig
from functools import cache, partial
from pathlib import Path

from training import Workload, arguments, run  # isort: skip

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a perceptron, each on a normalized input and added to it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        batch, length, width = hidden.shape
        parts = self.projections(self.norm_1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.outer(functional.gelu(self.inner(self.norm_2(hidden)), approximate="tanh"))


class Gpt2(nn.Module):
    """From tokens to the loss; the last layer's matrix is the embedding's."""

    def __init__(self, blocks, width, heads, vocabulary, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, following):
        hidden = self.norm(self.blocks(self.tokens(tokens) + self.positions))
        logits = functional.linear(hidden, self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


@cache
def text(vocabulary):
    """The source files of Python's standard library as tokens: words and signs, numbered as in tfopt-bench."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    words = re.findall(rb"\s*\w+|\s*[^\w\s]", b"".join(file.read_bytes() for file in files))
    numbers = {}
    return torch.tensor([numbers.setdefault(word, len(numbers)) for word in words]) % vocabulary


def batch(size, length, vocabulary, number):
    """Tokens of text and those that follow them, each (size, length)."""
    tokens, generator = text(vocabulary), torch.Generator().manual_seed(number)
    starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    cut = tokens[starts + torch.arange(length + 1)]
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def workload(tiny):
    """GPT-2, or one of two small blocks."""
    blocks, width, heads, vocabulary, length = (2, 32, 2, 256, 16) if tiny else (12, 768, 12, 50304, 1024)
    size = 2 if tiny else 16
    return Workload(
        name="gpt2",
        batch_size=size,
        model=partial(Gpt2, blocks, width, heads, vocabulary, length),
        batch=partial(batch, size, length, vocabulary),
        optimizer=partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True),
        steps=2 if tiny else 10,
        samples=2 if tiny else 10,
    )


if __name__ == "__main__":
    options = arguments(__doc__)
    run(workload(options.tiny), options)
