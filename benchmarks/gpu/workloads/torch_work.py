"""Small versions of common GPU programs, with only PyTorch.

    --kind launches        element-wise additions on one number each: bound by launches
    --kind matmul          products of 8192 x 8192 bf16 matrices: long kernels
    --kind train           a small transformer, AdamW, eager; work is steps
    --kind train-compile   the same by torch.compile
    --kind train-graph     the same, a whole step as one CUDA graph
    --kind decode          tokens by a transformer with a cache of keys and values, batch 1, eager
    --kind decode-graph    the same, a token as one CUDA graph

Each keeps a bounded number of batches in flight and counts the finished ones. `infer` serves requests, each a forward
pass of a small transformer, waited for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from conversation import Answer, by_hand, count, requests
from torch import Tensor, nn

BATCHES_IN_FLIGHT = 3
VOCABULARY = 8192


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_forward = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as (batch, heads, time, width of a head)."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).split(width, dim=2)
        shape = (batch, time, self.heads, width // self.heads)
        return q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the output of attention, and of the feed-forward layer, to x."""
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.before_forward(x))))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join(x, functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Transformer(nn.Module):
    """Decoder of `depth` blocks."""

    def __init__(self, width: int = 512, heads: int = 8, depth: int = 6, length: int = 512) -> None:
        super().__init__()
        self.width, self.heads, self.length = width, heads, length
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def launches() -> Callable[[], None]:
    """Return a step that is one kernel with almost no work."""
    number = torch.zeros(1, device="cuda")
    return lambda: (number.add_(1), None)[1]


def matmul() -> Callable[[], None]:
    """Return a step that is one product of 8192 x 8192 matrices."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: (torch.matmul(a, b, out=out), None)[1]


def train(*, compiled: bool = False, graphed: bool = False) -> Callable[[], None]:
    """Return a training step on a fixed batch of 8 x 256 tokens."""
    model = Transformer().to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    tokens = torch.randint(0, VOCABULARY, (8, 257), device="cuda")
    given, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)
    forward = torch.compile(model) if compiled else model

    def learn() -> None:
        functional.cross_entropy(forward(given).float().view(-1, VOCABULARY), wanted).backward()
        optimizer.step()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        learn()

    if not graphed:
        return step
    warm(step)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        learn()
    return lambda: (graph.replay(), None)[1]


def decode(*, graphed: bool = False) -> Callable[[], None]:
    """Return a step that generates one token. All state between tokens stays on the GPU."""
    model = Transformer(width=1024, heads=16, depth=12).to("cuda", torch.bfloat16).eval()
    shape = (1, model.heads, model.length, model.width // model.heads)
    caches = [torch.zeros((2, *shape), device="cuda", dtype=torch.bfloat16) for _ in model.blocks]
    token = torch.zeros((1, 1), device="cuda", dtype=torch.long)
    place = torch.zeros(1, device="cuda", dtype=torch.long)
    order = torch.arange(model.length, device="cuda")

    def step() -> None:
        with torch.no_grad():
            x = model.tokens(token) + model.places(place)
            seen = (order <= place).view(1, 1, 1, -1)
            for block, cache in zip(model.blocks, caches, strict=True):
                assert isinstance(block, Block)
                q, k, v = block.split(x)
                cache[0].index_copy_(2, place, k)
                cache[1].index_copy_(2, place, v)
                x = block.join(x, functional.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen))
            token.copy_(model.head(model.norm(x)).argmax(dim=-1))
            place.add_(1).remainder_(model.length)

    if not graphed:
        return step
    warm(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda: (graph.replay(), None)[1]


def warm(step: Callable[[], None]) -> None:
    """Run a few steps on a second stream, as a capture requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


# by kind: function that returns a step, and number of steps in a batch
KINDS: dict[str, tuple[Callable[[], Callable[[], None]], int]] = {
    "launches": (launches, 200),
    "matmul": (matmul, 1),
    "train": (train, 1),
    "train-compile": (lambda: train(compiled=True), 1),
    "train-graph": (lambda: train(graphed=True), 1),
    "decode": (decode, 8),
    "decode-graph": (lambda: decode(graphed=True), 8),
}


class Work:
    """Batches of steps on the current stream. A bounded number of batches is in flight."""

    def __init__(self, kind: str) -> None:
        make, self._batch = KINDS[kind]
        self._step_once = make()
        self._events = [torch.cuda.Event(blocking=True) for _ in range(BATCHES_IN_FLIGHT)]
        self._submitted = 0
        self._model: nn.Module | None = None
        self._prompt: Tensor | None = None
        for _ in range(5):
            self._step()
        torch.cuda.synchronize()
        self._submitted = 0

    def run(self, *, settle: float, seconds: float, tail: float = 0.0) -> Answer:
        """Return the number of steps finished within the window."""
        answer = count(self._step, settle=settle, seconds=seconds, tail=tail)
        torch.cuda.synchronize()
        self._submitted = 0
        return answer

    def infer(self, *, seconds: float, rate: float, seed: int) -> Answer:
        """Serve requests, each a forward pass over 128 tokens, and wait for each."""
        if self._model is None:
            self._model = Transformer().to("cuda", torch.bfloat16).eval()
            self._prompt = torch.randint(0, VOCABULARY, (1, 128), device="cuda")
            for _ in range(20):
                self._serve_one()
        return requests(self._serve_one, seconds=seconds, rate=rate, seed=seed)

    @torch.no_grad()
    def _serve_one(self) -> None:
        assert self._model is not None
        self._model(self._prompt)
        torch.cuda.synchronize()

    def _step(self) -> float:
        event = self._events[self._submitted % BATCHES_IN_FLIGHT]
        finished = 0.0
        if self._submitted >= BATCHES_IN_FLIGHT:
            event.synchronize()
            finished = float(self._batch)
        for _ in range(self._batch):
            self._step_once()
        event.record()
        self._submitted += 1
        return finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="launches")
    parser.add_argument("--seconds", type=float, help="measure once and end")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    work = Work(arguments.kind)
    by_hand(
        {"run": work.run, "infer": work.infer},
        arguments.seconds,
        torch=torch.__version__,
        gpu=torch.cuda.get_device_name(),
    )


if __name__ == "__main__":
    main()
