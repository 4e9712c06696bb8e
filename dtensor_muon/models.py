"""Shapes of the matrices of well-known models, for planning and benchmarks.

A shape with three dims is a stack of experts. The sizes are those of the published `config.json` or `params.json`:

    llama3-8B, llama3-70B   A. Grattafiori et al., "The Llama 3 Herd of Models", table 3: width 4096 and 8192,
                            feed-forward 14336 and 28672, 8 key-value heads of 128
    qwen3-30B-A3B           A. Yang et al., "Qwen3 Technical Report": width 2048, 32 heads and 4 key-value heads of 128,
                            128 experts of 768
    deepseek-v3             A. Liu et al., "DeepSeek-V3 Technical Report", section 4.2: width 7168, 128 heads of
                            128 + 64, latents of 1536 and 512 + 64, 256 experts of 2048 and a shared one, 3 dense
                            layers of 18432
"""

import math
from collections import Counter
from collections.abc import Sequence

MODELS: dict[str, list[tuple[tuple[int, ...], int]]] = {
    "llama3-8B": [((4096, 4096), 64), ((1024, 4096), 64), ((14336, 4096), 64), ((4096, 14336), 32)],
    "llama3-70B": [((8192, 8192), 160), ((1024, 8192), 160), ((28672, 8192), 160), ((8192, 28672), 80)],
    "qwen3-30B-A3B": [
        ((4096, 2048), 48), ((2048, 4096), 48), ((512, 2048), 96), ((128, 768, 2048), 96), ((128, 2048, 768), 48)
    ],
    "deepseek-v3": [
        ((1536, 7168), 61), ((24576, 1536), 61), ((576, 7168), 61), ((32768, 512), 61), ((7168, 16384), 61),
        ((18432, 7168), 6), ((7168, 18432), 3), ((2048, 7168), 116), ((7168, 2048), 58),
        ((256, 2048, 7168), 116), ((256, 7168, 2048), 58),
    ],
}  # fmt: skip
NUM_LAYERS = {"llama3-8B": 32, "llama3-70B": 80, "qwen3-30B-A3B": 48, "deepseek-v3": 61}


def model_shapes(name: str, num_layers: int | None = None) -> list[tuple[int, ...]]:
    """Returns the shape of every matrix of a model, or of its first `num_layers` layers, rounded to whole matrices.

    Raises:
        ValueError: An unknown model, or a number of layers that it does not have.
    """
    if name not in MODELS:
        raise ValueError(f"model is {name!r}; it must be one of {', '.join(map(repr, MODELS))}")
    layers = NUM_LAYERS[name] if num_layers is None else num_layers
    if not 1 <= layers <= NUM_LAYERS[name]:
        raise ValueError(f"layers is {layers}; {name} has 1 to {NUM_LAYERS[name]}")
    return [shape for shape, count in MODELS[name] for _ in range(max(1, count * layers // NUM_LAYERS[name]))]


def owner_share(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> list[tuple[int, ...]]:
    """Returns the matrices of the busiest rank when those of each shape are shared out to `num_ranks` ranks.

    Raises:
        ValueError: Fewer than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"the matrices are shared out to {num_ranks} ranks; it must be at least 1")
    counts: Counter[tuple[int, ...]] = Counter()
    for shape in shapes:
        counts[shape[-2:]] += math.prod(shape[:-2])
    return [shape for shape, count in counts.items() for _ in range(-(-count // num_ranks))]
