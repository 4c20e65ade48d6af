"""Memory of a CUDA GPU beside weights and KV cache: driver, library workspaces, captured passes.

This project measured none of these figures. Each names its source, and library figures hold for the named builds.
"""

from __future__ import annotations

# allocated on a GPU before a program allocates anything: 300 to 600 MiB, less if kernels load lazily
CONTEXT = 400 << 20
WORKING = 512 << 20  # bytes that the prefill of a chunk may compute with before chunks get smaller, or
SHARE = 24  # this fraction of a larger GPU
CHUNKS = (1024, 512, 256)  # chunk sizes in tokens, tried in order until one needs no more than that

# cuBLAS allocates 8.1 MiB per handle and stream, 32 MiB on Hopper (PyTorch's defaults). cuBLASLt allocates 1 MiB, 4 MiB
# on Ampere and Ada with 24 GB, 32 MiB from Hopper on, which includes every 50-series GPU (pytorch #120925).
CUBLAS, CUBLAS_HOPPER = 8_519_680, 32 << 20
LT, LT_LARGE, LT_HOPPER = 1 << 20, 4 << 20, 32 << 20
LARGE = 20 << 30

NODE = 64 << 10  # driver memory of one launch in a captured pass: an estimate, which python -m tests.gpu can measure
LAUNCHES = 39  # per layer, at most (docs/design/gpu.md)


def libraries(capability: tuple[int, int] | None, total: int) -> int:
    """Return the bytes of library workspaces. `capability` None: a described GPU, so the largest size is assumed."""
    major = capability[0] if capability is not None else 10
    product = CUBLAS_HOPPER if major == 9 else CUBLAS
    return product + (LT_HOPPER if major >= 9 else LT_LARGE if major == 8 and total >= LARGE else LT)


def captured(layers: int, passes: int) -> int:
    """Return the driver's bytes for `passes` captured passes of `layers` layers, without the passes' work memory."""
    return passes * LAUNCHES * layers * NODE


def working_most(available: int) -> int:
    """Return the bytes that a prefill pass may compute with before its chunk is made smaller."""
    return max(WORKING, available // SHARE)
