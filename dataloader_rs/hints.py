"""Names for annotations: those of `typing`, whose import would take as long as that of all of this package.

Type checkers see the names of `typing` itself. At run time they stand for as little as will do: `object` where any type
will, overloads that are not kept, and generic classes that take parameters as ``list`` does. So annotations can still
be evaluated, by `typing.get_type_hints` for one, with `object` in place of `Any` and of type variables.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False  # all type checkers take it for true, by its name
if TYPE_CHECKING:
    from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, overload
else:
    Any = Literal = TypeAlias = object

    def TypeVar(name, covariant=False):
        return object

    def overload(function):
        return function

    class Generic:
        __slots__ = ()
        __class_getitem__ = classmethod(type(list[int]))  # types.GenericAlias

    class _NamedTupleMaker(type):
        def __new__(cls, name, bases, namespace):
            if not bases:
                return super().__new__(cls, name, bases, namespace)
            made = namedtuple(name, namespace["__annotations__"], module=namespace["__module__"])
            for key, value in namespace.items():
                if key not in ("__module__", "__qualname__"):
                    setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_NamedTupleMaker):
        pass

__all__ = ["TYPE_CHECKING", "Any", "Generic", "Literal", "NamedTuple", "TypeAlias", "TypeVar", "overload"]
