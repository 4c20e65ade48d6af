"""What a CUDA card's memory goes to beside weights, keys and values: the driver, workspaces, captured passes.

Nothing here was measured by this project: each figure names its source, and those of libraries are of their builds.
"""

from __future__ import annotations

CONTEXT = 400 << 20  # of a card before a program allocates anything: 300 to 600 MiB, less where kernels load lazily
WORKING = 512 << 20  # what reading a chunk may take before chunks get smaller, and
SHARE = 24  # of larger cards, this part of them
CHUNKS = (1024, 512, 256)  # tokens read in one pass, where more of them take more than that

# cuBLAS takes 8.1 MiB a handle and stream, 32 MiB on Hopper (PyTorch's defaults); cuBLASLt 1 MiB, 4 MiB on Ampere and
# Ada with 24 GB, 32 MiB from Hopper on, so on every 50-series card (pytorch #120925)
CUBLAS, CUBLAS_HOPPER = 8_519_680, 32 << 20
LT, LT_LARGE, LT_HOPPER = 1 << 20, 4 << 20, 32 << 20
LARGE = 20 << 30

NODE = 64 << 10  # the driver's, of a launch in a captured pass: a guess, which python -m tests.gpu can settle
LAUNCHES = 39  # of a layer, at most (docs/gpu.md)


def libraries(capability: tuple[int, int] | None, total: int) -> int:
    """Bytes of workspaces; `capability` None: of a card that is only described, the most of any it may be."""
    major = capability[0] if capability is not None else 10
    product = CUBLAS_HOPPER if major == 9 else CUBLAS
    return product + (LT_HOPPER if major >= 9 else LT_LARGE if major == 8 and total >= LARGE else LT)


def captured(layers: int, passes: int) -> int:
    """Bytes of the driver for so many captured passes of so many layers, beside what these compute with."""
    return passes * LAUNCHES * layers * NODE


def working_most(available: int) -> int:
    """What a pass that reads may compute with before its chunk is made smaller."""
    return max(WORKING, available // SHARE)
