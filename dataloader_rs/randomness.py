"""Random numbers that depend on what is loaded, not on which thread loads it when. Knows no threads.

NOTE [ keys ] Whatever is random has a key of 128 bits: BLAKE2b, with a digest of 16 bytes and the personalisation
"dataloader_rs 1", of four little-endian 64-bit numbers. These are what it is for (0 a sample, 1 a batch, 2 workers),
rng_seed, the number of the epoch, and the position of the sample or batch in its epoch (both 0 for workers). Philox
takes the digest as a little-endian number; the seed of worker n is the first half of it plus n times an odd constant,
modulo 2**64. That two keys among 2**40 are equal has a chance of 2**-49. All this is frozen: if it ever
changes, so does the personalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from dataloader_rs._core import ASKED_COLLATE, ASKED_MANY, current_request
from dataloader_rs.arguments import checked_integer
from dataloader_rs.errors import shown
from dataloader_rs.hints import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy

FOR_SAMPLE, FOR_BATCH, FOR_WORKERS = 0, 1, 2
VERSION = b"dataloader_rs 1"

# Odd, so that multiples of it differ in their low bits too; the golden ratio, so that they lie far from each other.
SEED_STEP = 0x9E3779B97F4A7C15


def sample_rng(offset: int | None = None) -> numpy.random.Generator:
    """The random number generator of the sample that is being loaded.

    It is keyed by the loader's ``rng_seed``, the number of the epoch and the position of the sample in the epoch, so it
    gives the same numbers for any number of workers, any prefetch depth, and whichever sample is ready first. Another
    call for the same sample returns the same object, whose stream goes on.

    Parameters
    ----------
    offset : int, optional
        In ``__getitems__(indices)``, where it must be given: ``sample_rng(k)`` is for ``indices[k]``, and draws what it
        would in ``__getitem__``.

    Returns
    -------
    numpy.random.Generator
        On top of `numpy.random.Philox`. In ``collate_fn`` that of the batch, keyed by the batch's number in the epoch.

    Raises
    ------
    RuntimeError
        Outside of ``__getitem__``, ``__getitems__`` and ``collate_fn``, or on a thread that these have started.
    TypeError, ValueError
        If `offset` is missing, out of place, or not the position of one of the samples.
    ImportError
        Without NumPy.

    Notes
    -----
    The position counts, not the index: an index that a sampler yields twice gets two generators. Where an item iterates
    another loader, the items of that one have their own, and the outer item has its own again afterwards.

    The global generators (``random``, ``numpy.random``) are no substitute. All threads draw from one stream, so what a
    sample gets depends on how much was drawn before it on other threads, which no seed decides.

    The key, BLAKE2b [2]_ of `rng_seed`, epoch and position, is fixed, and so are the bits that Philox [1]_ makes of it.
    How NumPy turns bits into numbers may change with its version.

    References
    ----------
    .. [1] J. Salmon, M. Moraes, R. Dror, D. Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    .. [2] RFC 7693, "The BLAKE2 cryptographic hash and message authentication code".

    Examples
    --------
    >>> from dataloader_rs import PyDataloader, PyDataset, sample_rng
    >>> class Noise(PyDataset):
    ...     def __len__(self):
    ...         return 4
    ...     def __getitem__(self, index):
    ...         return int(sample_rng().integers(1000))
    >>> first, second = (PyDataloader(Noise(), 2, num_workers=n, rng_seed=7) for n in (0, 3))
    >>> list(first) == list(second)
    True
    """
    request = current_request()
    if request is None:
        raise RuntimeError("sample_rng() is for code that a loader calls, on the thread it calls it on: __getitem__, "
                           "__getitems__ and collate_fn")
    asked, position, count, generators, rng_seed, epoch = request
    if asked == ASKED_COLLATE:
        if offset is not None:
            raise TypeError("offset is for __getitems__: in collate_fn there is one generator, for the batch")
    elif offset is not None:
        position += _checked_offset(offset, count)
    elif asked == ASKED_MANY:
        raise TypeError("offset must be given in __getitems__: sample_rng(k) is for indices[k]")
    generator = generators.get(position)
    if generator is None:
        if asked != ASKED_MANY:
            generators.clear()  # of the item before this one
        purpose = FOR_BATCH if asked == ASKED_COLLATE else FOR_SAMPLE
        generator = generators[position] = _generator_of()(key_of(purpose, rng_seed, epoch, position))
    return generator


def key_of(purpose: int, rng_seed: int, epoch: int, position: int) -> bytes:
    """See NOTE [ keys ]. All four are at least 0 and below 2**64; the result has 16 bytes."""
    blake2b, pack = _hashing()
    key: bytes = blake2b(pack(purpose, rng_seed, epoch, position), digest_size=16, person=VERSION).digest()
    return key


def worker_seed(rng_seed: int, worker: int) -> int:
    """The seed of a worker, below 2**64; those of a loader differ from each other, also modulo 2**32."""
    first = int.from_bytes(key_of(FOR_WORKERS, rng_seed, 0, 0)[:8], "little")
    return (first + worker * SEED_STEP) % 2**64


def _checked_offset(offset: object, count: int) -> int:
    checked = checked_integer("offset", offset)
    if not 0 <= checked < count:
        raise ValueError(f"offset must be >= 0 and < {count}, the number of samples asked for, got {shown(offset)}")
    return checked


# What these import comes when it is first needed, since it takes as long as all of this package.


@cache
def _generator_of() -> Callable[[bytes], numpy.random.Generator]:
    try:
        from dataloader_rs.sample_seed import generator_of
    except ImportError as error:
        raise ImportError("sample_rng() needs NumPy, which cannot be imported: pip install numpy") from error
    return generator_of


@cache
def _hashing() -> tuple[Callable[..., Any], Callable[..., bytes]]:
    import hashlib
    import struct

    return hashlib.blake2b, struct.Struct("<4Q").pack
