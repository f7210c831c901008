"""What a dataset must answer, and what it may assume about threads."""

from __future__ import annotations

from dataloader_rs.errors import type_name
from dataloader_rs.foreign import is_foreign_dataset
from dataloader_rs.hints import TYPE_CHECKING, Any, Generic, TypeVar
from dataloader_rs.stream import is_stream

if TYPE_CHECKING:
    from dataloader_rs.protocols import SupportsLenGetitem

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PyDataset(Generic[T_co]):
    """Base class of datasets: subclass it and implement ``__len__`` and ``__getitem__``.

    A subclass may also implement ``__getitems__(indices)``, which gets a fresh ``list`` of ``int`` and returns one
    sample for each of them, in order, as any iterable: it is then called once for each batch instead of
    ``__getitem__`` once for each item. ``__getitems__ = None`` in a subclass turns an inherited one off. It is looked
    up on the class, once for each loader.

    Attributes
    ----------
    serial_dataset : bool
        Whether loaders are to ask for one item at a time, however many workers they have; see `PyDataloader`. For a
        class to set, or an instance.

    Notes
    -----
    *Thread safety.* With ``num_workers > 0`` these methods run on several threads at once. A dataset that only reads
    is safe; one that seeks in a shared file, fills a cache or counts needs a lock, a `threading.local`, or
    ``serial_dataset = True``.

    Examples
    --------
    >>> class Squares(PyDataset[int]):
    ...     def __len__(self):
    ...         return 5
    ...     def __getitem__(self, index):
    ...         return index * index
    >>> Squares()[4]
    16
    """

    serial_dataset: bool = False

    def __len__(self) -> int:
        raise NotImplementedError(f"{type_name(self)} must implement __len__")

    def __getitem__(self, index: int) -> T_co:
        raise NotImplementedError(f"{type_name(self)} must implement __getitem__")

    @staticmethod
    def of(source: SupportsLenGetitem[T]) -> PyDataset[T]:
        """Adapt any object with ``__len__`` and ``__getitem__`` (and ``__getitems__``, if it has it).

        Parameters
        ----------
        source : object
            For example a list, an array, or a dataset of another library. It is not copied; a `PyDataset` is
            returned as it is.

        Returns
        -------
        PyDataset
            Asks `source` for its length and its items.

        Raises
        ------
        TypeError
            If one of the two methods is missing.

        Examples
        --------
        >>> letters = PyDataset.of(["a", "b", "c"])
        >>> len(letters), letters[1]
        (3, 'b')
        """
        if isinstance(source, PyDataset):
            return source
        for method in ("__len__", "__getitem__"):
            if getattr(type(source), method, None) is None:
                raise TypeError(f"source must have __len__ and __getitem__, "
                                f"got {type_name(source)} without {method}")
        if fetch_many_of(source) is not None:
            return _BatchedAdapter(source)
        return _Adapter(source)


PyDatasetBase = PyDataset


class _Adapter(PyDataset[T_co]):
    """An object that is no PyDataset, in the clothes of one."""

    def __init__(self, source: SupportsLenGetitem[T_co]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> T_co:
        return self.source[index]

    def __repr__(self) -> str:
        return f"PyDataset.of({self.source!r})"


class _BatchedAdapter(_Adapter[T_co]):
    def __getitems__(self, indices: list[int]) -> Any:
        source: Any = self.source
        return source.__getitems__(indices)


def checked_dataset(dataset: Any) -> Any:
    """A dataset of ours, or of torch or Hugging Face, which answers as one; anything else is a TypeError."""
    if isinstance(dataset, PyDataset) or is_foreign_dataset(dataset) or is_stream(dataset):
        return dataset
    is_only_iterated = hasattr(type(dataset), "__iter__") and not hasattr(type(dataset), "__getitem__")
    wrapper = "PyIterableDataset" if is_only_iterated else "PyDataset"
    raise TypeError(f"dataset must be a PyDataset (PyDatasetBase), got {type_name(dataset)}: subclass "
                    f"dataloader_rs.{wrapper}, or wrap the object with {wrapper}.of(obj)")


def fetch_many_of(dataset: object) -> Any:
    """The dataset's ``__getitems__``, bound, or None if its class has none or turned it off.

    Looked up as Python looks up its own special methods: on the class, so that neither an attribute of the instance
    nor a ``__getattr__`` that answers everything is mistaken for it.
    """
    for base in type(dataset).__mro__:
        if "__getitems__" in vars(base):
            method = vars(base)["__getitems__"]
            bind = getattr(type(method), "__get__", None)
            return method if bind is None else bind(method, dataset, type(dataset))
    return None


def dataset_name(dataset: object) -> str:
    """A dataset in a few words: its class, or that of the object behind an adapter."""
    if isinstance(dataset, _Adapter):
        return f"PyDataset.of({type_name(dataset.source)})"
    return type_name(dataset)


def indexed_object(dataset: object) -> object:
    """What workers ask for items: the object behind an adapter, which saves a call for each item."""
    return dataset.source if isinstance(dataset, _Adapter) else dataset
