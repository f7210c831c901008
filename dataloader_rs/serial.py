"""``serial_dataset``: a dataset that is asked for one item at a time, whoever asks. Starts no threads.

NOTE [ one lock for a dataset ] The lock belongs to the object that is asked, so that all loaders of it share it, with
all their epochs, also those whose iterator was dropped while an item is stuck. Not every object can be hashed, referred
to weakly or given an attribute. So what is registered, weakly and by the id of the object, is the proxy that workers
ask instead of it: the proxy holds the object, and for as long as there is a proxy nothing else gets that id.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from weakref import WeakValueDictionary

from dataloader_rs.arguments import checked_flag
from dataloader_rs.hints import Any
from dataloader_rs.locks import ForkSafeLock


class SerialDataset:
    """Asks `source` for items, one at a time; a thread that is asked already may ask again.

    Parameters
    ----------
    source : object
        Answers ``source[index]``.
    """

    __slots__ = ("__weakref__", "_lock", "_source")

    def __init__(self, source: Any) -> None:
        self._source = source
        self._lock = ForkSafeLock()

    def __getitem__(self, index: int) -> object:
        with self._lock.here():
            return self._source[index]

    def serialized(self, fetch_many: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
        """The ``__getitems__`` of `source`, called under the same lock."""

        def fetch_many_serially(indices: list[int]) -> Any:
            with self._lock.here():
                samples = fetch_many(indices)
                # A generator reads when it is iterated. One that does not end is cut where it is surely too long.
                return samples if isinstance(samples, list) else list(islice(samples, 2 * len(indices) + 1000))

        return fetch_many_serially


def is_serial(source: Any, argument: bool | None) -> bool:
    """Whether `source` is to be asked serially: what the argument says, else the attribute ``serial_dataset``."""
    if argument is not None:
        return argument
    if _answers_as_it_likes(type(source)):
        import inspect  # late, since it takes as long as all of this package

        if inspect.getattr_static(source, "serial_dataset", None) is None:
            return False
    try:
        declared: Any = source.serial_dataset
    except AttributeError:
        if hasattr(type(source), "serial_dataset"):
            raise  # a property that fails is no answer
        return False
    return declared is not None and checked_flag("serial_dataset", declared)


def _answers_as_it_likes(kind: Any) -> bool:
    """Whether objects of this class may answer for attributes that they do not have."""
    return kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__")


def serial_proxy_of(source: object) -> SerialDataset:
    """The proxy of `source`, the same one for as long as anybody holds it."""
    with _finding.here():
        proxy = _proxies.get(id(source))
        if proxy is None:
            proxy = _proxies[id(source)] = SerialDataset(source)
        return proxy


_finding = ForkSafeLock()
_proxies: WeakValueDictionary[int, SerialDataset] = WeakValueDictionary()
