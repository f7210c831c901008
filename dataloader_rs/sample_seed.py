"""A key as something that NumPy makes bit generators from. Imports NumPy, so it is imported when that is needed."""

from __future__ import annotations

from typing import Any

import numpy
from numpy.random import SeedSequence
from numpy.random.bit_generator import ISpawnableSeedSequence


class SampleSeed(ISpawnableSeedSequence):
    """The key of a `numpy.random.Philox`, which then gives the same bits as ``Philox(key=key)``.

    That call would first ask the system for entropy and mix it, only to throw it away, and take twice as long; and
    nothing could be spawned from its generator.

    Parameters
    ----------
    key : bytes
        16 of them, of a little-endian number.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence: SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = numpy.uint32) -> Any:
        """The key as two words of 64 bits, as Philox asks for it; for anybody else, words that are made from it."""
        if n_words == 2 and numpy.dtype(dtype) == numpy.uint64:
            return numpy.frombuffer(self._key, dtype="<u8").astype(numpy.uint64, copy=False)
        return self._spawner().generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[Any]:
        """Seeds of independent streams, the same ones whenever this sample is loaded."""
        return self._spawner().spawn(n_children)

    def _spawner(self) -> SeedSequence:
        if self._sequence is None:
            self._sequence = SeedSequence(int.from_bytes(self._key, "little"))
        return self._sequence


def generator_of(key: bytes) -> numpy.random.Generator:
    """A generator on top of Philox with this key."""
    seed: Any = SampleSeed(key)  # NumPy takes any ISeedSequence, which its types do not say
    return numpy.random.Generator(numpy.random.Philox(seed))
