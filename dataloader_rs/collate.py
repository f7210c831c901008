"""default_collate: a list of samples becomes one batch of arrays. Knows no loader and no threads.

What is stacked lies in recycled memory: ``_buffers.pyx`` makes arrays of it, and ``_store.c`` says what is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence

from dataloader_rs import _buffers
from dataloader_rs.arguments import checked_count
from dataloader_rs.containers import container_like
from dataloader_rs.errors import shown, type_name
from dataloader_rs.hints import Any, TypeAlias, TypeVar

# Stacked arrays of fewer bytes are made by NumPy: malloc has pieces of that size at hand without asking the system.
LEAST_RECYCLED = 4096

# Groups of values, and positions of each, that a message lists.
MOST_SHOWN = 8

# Where a part lies in a sample: None for the sample itself, else the path of what it is a part of, and the last step,
# which is a key or position (ITEM) or the name of a field. The text is made when there is something to complain of.
ITEM, FIELD = "item", "field"
Path: TypeAlias = tuple[Any, str, Any] | None

Rule: TypeAlias = Callable[[list[Any], Path], Any]

S = TypeVar("S")

# For where an argument has that name.
_class = type

# NumPy, once there were numbers.
_numpy_module: Any = None


def default_collate(samples: Iterable[Any]) -> Any:
    """Make a batch of NumPy arrays from a list of samples.

    Parameters
    ----------
    samples : iterable
        At least one sample, all of the same type and layout, by these rules:

        =================================== ======================================================================
        a sample is                         the batch is
        =================================== ======================================================================
        bool, int, float, complex           an array of bool, int64, float64, complex128, shape (samples,)
        a NumPy scalar                      an array of its dtype, shape (samples,)
        a NumPy array (or memmap)           one array of the same dtype, shape (samples, ...); all have one shape
        a torch tensor                      what ``torch.stack`` makes of them
        str, bytes                          the list, unchanged
        dict, other mapping                 a mapping of the same type; each value is a batch of its own
        tuple, named tuple, list, sequence  a sequence of the same type, with a batch for each position
        of a type given to register_collate what the function given there returns
        =================================== ======================================================================

        Subclasses follow the rule of the class they are derived from, the most specific one. Subclasses of
        ``numpy.ndarray`` have no rule, since stacking would lose their mask or unit, and neither have None, sets and
        dataclasses.

    Returns
    -------
    object
        The batch. It shares no memory with the samples, which are not changed.

    Raises
    ------
    TypeError
        If there is no rule for a type, or types are mixed in one place. The message has the path in the sample, such
        as ``sample[0]["image"]``, and the positions in the batch.
    ValueError
        If shapes, dtypes, lengths or keys differ between samples, or there are none. The message is like that.
    OverflowError
        If an int does not fit int64.
    ImportError
        If there are numbers and NumPy is not installed.

    Notes
    -----
    Arrays are in the machine's byte order and C-contiguous, whatever the samples were. Arrays of strings of different
    widths become one of the widest. The memory of stacked arrays of 4 KiB and more begins at a multiple of 64, and is
    used again for a later batch once neither the array nor any view of it is left: see `buffer_usage`.
    The rules are those of ``torch.utils.data.default_collate`` with arrays in place of tensors, but that nothing is
    converted to make samples fit.
    *Thread safety.* Any number of threads may call this.

    Examples
    --------
    >>> from dataloader_rs import default_collate
    >>> default_collate([{"x": 1, "name": "a"}, {"x": 2, "name": "b"}])
    {'x': array([1, 2]), 'name': ['a', 'b']}
    """
    batch = list(samples)
    if not batch:
        raise ValueError("samples must hold at least one sample, got none")
    return _collate(batch, None)


def register_collate(type: type[S], fn: Callable[[list[S]], Any]) -> None:
    """Set what `default_collate` makes of samples of a type, at any depth, for the whole process.

    Parameters
    ----------
    type : type
        The class. Its subclasses are included, unless a more specific class has a rule of its own. May be one that
        has a rule already, like `dict`, which is then replaced.
    fn : callable
        ``fn(list of objects) -> batch``; gets the objects of one place in the samples, in order.

    Raises
    ------
    TypeError
        If `type` is no class or `fn` cannot be called.

    Notes
    -----
    The class must be among the bases of a sample's class; those that an abstract class only claims with its
    ``register`` do not count. *Thread safety.* Any thread may call this; batches that are being collated meanwhile
    may still follow the old rule.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from dataloader_rs import default_collate, register_collate
    >>> @dataclass
    ... class Point:
    ...     x: float
    ...     y: float
    >>> register_collate(Point, lambda points: Point(*default_collate([(point.x, point.y) for point in points])))
    >>> default_collate([Point(1.0, 2.0), Point(3.0, 4.0)])
    Point(x=array([1., 3.]), y=array([2., 4.]))
    """
    if not issubclass(_class(type), _class):
        raise TypeError(f"type must be a class, got {shown(type)} ({type_name(type)})")
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {shown(fn)} ({type_name(fn)})")
    _rules[type] = _Registered(fn)


def buffer_usage() -> dict[str, int]:
    """What the memory of stacked arrays comes to, in this process.

    Returns
    -------
    dict
        ``in_use`` and ``kept``: bytes that arrays hold, and free ones that are kept for the next batch; ``limit``:
        most bytes that may be kept. ``taken``: arrays made so far; ``reused``: those of them that needed no memory
        from the system.

    Notes
    -----
    Never more is kept than twice what was in use at once within the last 10 to 20 seconds, nor more than the limit,
    which is an eighth of the machine's memory unless `limit_buffers` sets another. What was not wanted for 20 seconds
    goes.
    This is looked at when an array is made or dies; a process that is done with loading may call `release_buffers`.
    """
    return _buffers.usage()


def release_buffers() -> int:
    """Give all memory that is kept for later batches back to the system.

    Arrays are not affected. May be called at any time, from any thread.

    Returns
    -------
    int
        How many bytes that was.
    """
    return _buffers.release()


def limit_buffers(num_bytes: int) -> None:
    """Set how much memory may be kept for later batches, in this process.

    Parameters
    ----------
    num_bytes : int
        At most so many bytes, >= 0. With 0 no memory is used again.

    Raises
    ------
    TypeError
        If `num_bytes` is no integer.
    ValueError
        If it is negative.
    """
    _buffers.set_limit(min(checked_count("num_bytes", num_bytes, least=0), 2**63))


# ---- which rule ----


def _collate(samples: list[Any], path: Path) -> Any:
    kinds = set(map(type, samples))
    if len(kinds) > 1:
        return _collate_mixed(samples, path)
    (kind,) = kinds
    rule = _rules.get(kind)
    if rule is None:
        base = _base_with_rule(kind)
        if base is None:
            raise _no_rule(samples, path)
        rule = _rules[base]
    return rule(samples, path)


def _collate_mixed(samples: list[Any], path: Path) -> Any:
    bases = [_base_with_rule(type(sample)) for sample in samples]
    if None in bases:
        raise _no_rule([sample for sample, base in zip(samples, bases, strict=True) if base is None], path,
                       [position for position, base in enumerate(bases) if base is None])
    rules = {_rules[base] for base in bases}
    if rules <= NUMERIC:
        return _mixed_numbers(samples, path)
    if len(set(bases)) == 1 and not rules & TYPE_KEEPING:
        return rules.pop()(samples, path)
    raise TypeError(f"cannot collate {_shown_path(path)}: types differ: "
                    f"{_grouped([type_name(sample) for sample in samples])}")


def _base_with_rule(kind: Any) -> Any:
    """The class whose rule `kind` follows: itself or the nearest of its bases that has one, or None."""
    for base in kind.__mro__:
        if base in _rules:
            return base
    if _learn_libraries():
        return _base_with_rule(kind)
    if not issubclass(kind, BINARY):
        for base in (Mapping, Sequence):
            if issubclass(kind, base):
                return base
    return None


def _learn_libraries() -> bool:
    """Add the rules for classes of NumPy and torch once the user has imported them; were there any to add?

    Nothing is imported here. NumPy's scalars that derive from float and complex may follow those rules before: they
    come to the same.
    """
    num_rules = len(_rules)
    for module_name, name, rule in (("numpy", "ndarray", _arrays), ("numpy", "generic", _numpy_scalars),
                                    ("torch", "Tensor", _tensors)):
        # A module that another thread is importing may lack its classes, and then no sample is of one.
        kind = getattr(sys.modules.get(module_name), name, None)
        if isinstance(kind, type):
            _rules.setdefault(kind, rule)
    return len(_rules) > num_rules


class _Registered:
    """The rule that ``fn`` makes."""

    def __init__(self, fn: Callable[[list[Any]], Any]) -> None:
        self.fn = fn

    def __call__(self, samples: list[Any], path: Path) -> Any:
        try:
            return self.fn(samples)
        except Exception as error:
            note = f"raised by the function that was registered for {_shown_path(path)} ({type_name(samples[0])})"
            _add_note_once(error, note)
            raise


# ---- numbers ----


def _bools(samples: list[Any], path: Path) -> Any:
    numpy = _numpy()
    return numpy.array(samples, dtype=numpy.bool_)


def _ints(samples: list[Any], path: Path) -> Any:
    numpy = _numpy()
    try:
        return numpy.array(samples, dtype=numpy.int64)
    except OverflowError:
        raise _overflow(samples, path) from None


def _floats(samples: list[Any], path: Path) -> Any:
    numpy = _numpy()
    return numpy.array(samples, dtype=numpy.float64)


def _complexes(samples: list[Any], path: Path) -> Any:
    numpy = _numpy()
    return numpy.array(samples, dtype=numpy.complex128)


def _numpy_scalars(samples: list[Any], path: Path) -> Any:
    dtype = samples[0].dtype
    # Of the others, the class says it all.
    if dtype.kind in "mMV" and any(sample.dtype != dtype for sample in samples):
        raise _differ("dtypes", [sample.dtype for sample in samples], path)
    _refuse_objects(samples, dtype, path)
    return _numpy().array(samples, dtype=dtype)


def _arrays(samples: list[Any], path: Path) -> Any:
    numpy = _numpy()
    first = samples[0]
    if not _is_plain(numpy, type(first)):
        raise _no_rule(samples, path)
    shape, dtype = first.shape, first.dtype
    for sample in samples:
        if sample.shape != shape:
            raise _differ("shapes", [sample.shape for sample in samples], path)
        if sample.dtype != dtype:
            dtype = _common_dtype(numpy, [sample.dtype for sample in samples], path)
            break
    _refuse_objects(samples, dtype, path)
    if dtype.hasobject:  # strings of variable width, which look after their memory themselves
        return numpy.stack(samples)
    if dtype.kind in "biufc":
        stacked_dtype = numpy.dtype(dtype.char)  # NumPy's own object, which unpickled arrays do not have
    else:
        stacked_dtype = dtype if dtype.isnative else dtype.newbyteorder("=")
    return _stack(numpy, samples, shape, stacked_dtype)


def _stack(numpy: Any, samples: list[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Stack arrays of one shape, whose dtypes can be converted to `dtype` without a loss."""
    row_size = samples[0].size * dtype.itemsize
    size = len(samples) * row_size
    if size > sys.maxsize:
        raise MemoryError(f"no memory for an array of {size} bytes")
    if size < LEAST_RECYCLED:
        stacked = numpy.empty((len(samples), *shape), dtype)
    else:
        stacked = _buffers.empty_array(numpy.ndarray, (len(samples), *shape), dtype, size)
    by_numpy: Any = range(len(samples))
    if samples[0].dtype == dtype and all(sample.dtype == dtype for sample in samples):
        by_numpy = _buffers.copy_rows(stacked, samples, row_size)
    for position in by_numpy:
        stacked[position] = samples[position]
    return stacked


def _mixed_numbers(samples: list[Any], path: Path) -> Any:
    """Collate numbers of different classes, which is fine if they come to the same dtype."""
    numpy = _numpy()
    dtypes = []
    for position, sample in enumerate(samples):
        rule = _rules[_base_with_rule(type(sample))]
        if rule is _arrays and not _is_plain(numpy, type(sample)):
            raise _no_rule([sample], path, [position])
        dtypes.append(sample.dtype if rule in (_arrays, _numpy_scalars) else numpy.dtype(DTYPES[rule]))
    shapes = [getattr(sample, "shape", ()) for sample in samples]
    if len(set(shapes)) > 1:
        raise _differ("shapes", shapes, path)
    try:
        arrays = [numpy.asarray(sample, dtype) for sample, dtype in zip(samples, dtypes, strict=True)]
    except OverflowError:
        raise _overflow(samples, path) from None
    return _arrays([array.view(numpy.ndarray) for array in arrays], path)


def _is_plain(numpy: Any, kind: type) -> bool:
    """Is the class an array and nothing more? Others have a mask, a unit, or another meaning of their axes."""
    return kind is numpy.ndarray or kind is numpy.memmap


def _common_dtype(numpy: Any, dtypes: list[Any], path: Path) -> Any:
    native = {dtype if dtype.isnative else dtype.newbyteorder("=") for dtype in dtypes}
    kinds = {dtype.kind for dtype in native}
    if len(native) == 1 or kinds == {"U"} or kinds == {"S"}:
        return max(native, key=lambda dtype: dtype.itemsize)
    raise _differ("dtypes", dtypes, path)


def _refuse_objects(samples: list[Any], dtype: Any, path: Path) -> None:
    if dtype.hasobject and dtype.kind in "OV":
        raise TypeError(f"cannot collate {_shown_path(path)}: an array of dtype {dtype} holds Python objects, "
                        f"for which there is no rule ({_at(range(len(samples)))})")


def _tensors(samples: list[Any], path: Path) -> Any:
    shapes = [tuple(sample.shape) for sample in samples]
    if len(set(shapes)) > 1:
        raise _differ("shapes", shapes, path)
    try:
        return sys.modules["torch"].stack(samples)
    except Exception as error:
        _add_note_once(error, f"raised by torch.stack for {_shown_path(path)}")
        raise


def _numpy() -> Any:
    global _numpy_module
    if _numpy_module is None:
        try:
            import numpy
        except ImportError as error:
            raise ImportError(f"default_collate makes NumPy arrays of numbers, and NumPy cannot be imported: "
                              f"{error}") from error
        _numpy_module = numpy
    return _numpy_module


# ---- what holds others ----


def _kept(samples: list[Any], path: Path) -> list[Any]:
    return samples


def _mappings(samples: list[Any], path: Path) -> Any:
    first = samples[0]
    keys = first.keys()
    if any(sample.keys() != keys for sample in samples):
        raise _differ("keys", [list(sample) for sample in samples], path)
    columns = {key: _collate([sample[key] for sample in samples], (path, ITEM, key)) for key in first}
    return container_like(first, columns, columns, MutableMapping)


def _sequences(samples: list[Any], path: Path) -> Any:
    first: Any = samples[0]
    kind: Any = type(first)
    length = len(first)
    if any(len(sample) != length for sample in samples):
        raise _differ("lengths", [len(sample) for sample in samples], path)
    names = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    steps = ((path, ITEM, position) for position in range(length)) if names is None else (
        (path, FIELD, name) for name in names)
    columns = [_collate(list(column), step) for column, step in zip(zip(*samples, strict=True), steps, strict=True)]
    return container_like(first, columns, range(length), MutableSequence)


# ---- what errors say ----


def _differ(what: str, values: list[Any], path: Path) -> ValueError:
    return ValueError(f"cannot collate {_shown_path(path)}: {what} differ: {_grouped(values)}")


def _no_rule(samples: list[Any], path: Path, positions: Iterable[int] | None = None) -> TypeError:
    if positions is None:
        positions = range(len(samples))
    kinds = [type_name(sample) for sample in samples]
    name = kinds[0]
    hint = "leave it out or put a value in its place" if samples[0] is None else (
        f"dataloader_rs.register_collate({name}, fn) adds one")
    return TypeError(f"cannot collate {_shown_path(path)}: no rule for {_grouped(kinds, list(positions))}; {hint}")


def _overflow(samples: list[Any], path: Path) -> OverflowError:
    beyond = [position for position, sample in enumerate(samples)
              if isinstance(sample, int) and not -2**63 <= sample < 2**63]
    return OverflowError(f"cannot collate {_shown_path(path)}: ints must fit int64, "
                         f"got {_grouped([shown(samples[position]) for position in beyond], beyond)}")


def _shown_path(path: Path) -> str:
    steps = []
    while path is not None:
        path, kind, key = path
        if kind == FIELD:
            steps.append(f".{key}")
        elif type(key) is str and key.isprintable() and not {'"', "\\"} & set(key):
            steps.append(f'["{key}"]')
        else:
            steps.append(f"[{shown(key)}]")
    return "sample" + "".join(reversed(steps))


def _grouped(values: list[Any], positions: list[int] | None = None) -> str:
    """Which values there are, and where: ``(3, 4) at positions 0, 1; (3, 5) at position 2``."""
    places: dict[str, list[int]] = {}
    for position, value in zip(range(len(values)) if positions is None else positions, values, strict=True):
        places.setdefault(value if isinstance(value, str) else _short(value), []).append(position)
    parts = [f"{value} {_at(where)}" for value, where in list(places.items())[:MOST_SHOWN]]
    return "; ".join(parts) + (f"; {len(places)} in all" if len(places) > MOST_SHOWN else "")


def _short(value: Any) -> str:
    # reprlib would shorten shapes to their first six axes, which is not where they differ.
    try:
        text = repr(value) if isinstance(value, tuple) else str(value) if hasattr(value, "itemsize") else shown(value)
        return text if len(text) <= 200 else text[:200] + "..."
    except Exception:
        return shown(value)


def _at(positions: Sequence[int]) -> str:
    listed = ", ".join(map(str, positions[:MOST_SHOWN]))
    more = f", ... {len(positions)} in all" if len(positions) > MOST_SHOWN else ""
    return f"at position{'s' if len(positions) > 1 else ''} {listed}{more}"


def _add_note_once(error: BaseException, note: str) -> None:
    """Add the note unless it is there already: the same object may be raised again and again."""
    try:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    except Exception:
        # An exception that takes no notes is worth more than the note.
        pass


NUMERIC = {_bools, _ints, _floats, _complexes, _numpy_scalars, _arrays}
DTYPES: dict[Rule, str] = {_bools: "bool", _ints: "int64", _floats: "float64", _complexes: "complex128"}
# Where another class at another position would lose what it has more than the first.
TYPE_KEEPING = {_mappings, _sequences}
# Sequences that nobody means to be taken apart, into one array for each byte.
BINARY = (bytearray, memoryview)

# The rule of each class. Threads look into it and add to it, one step each, without a lock.
_rules: dict[type, Rule] = {
    bool: _bools, int: _ints, float: _floats, complex: _complexes, str: _kept, bytes: _kept, dict: _mappings,
    list: _sequences, tuple: _sequences, Mapping: _mappings, Sequence: _sequences,
}
