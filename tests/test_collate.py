"""default_collate keeps types and values, stacks arrays, and says what does not fit together and where."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import enum
import re
import sys
import types
from fractions import Fraction
from typing import NamedTuple

import pytest
from conftest import run_threaded
from toy_datasets import Ids

from dataloader_rs import PyDataloader, collate, default_collate, register_collate, torch_arguments

np = pytest.importorskip("numpy")


class Point(NamedTuple):
    x: object
    y: object


class Attributed(dict):
    """A dict that has more than its keys."""


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@pytest.fixture
def rules(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(collate, "_rules", dict(collate._rules))


def assert_same(left, right) -> None:
    """Equal in types, dtypes, keys and values, at any depth."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and left.shape == right.shape
        np.testing.assert_array_equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def arrays_in(batch):
    if isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from arrays_in(part)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from arrays_in(part)


# ---- B57: types and values ----


@pytest.mark.parametrize(("samples", "dtype"), [
    ([1, 2], "int64"), ([0.5, 2.0], "float64"), ([True, False], "bool"), ([1j, 2 + 1j], "complex128"),
    ([Level.LOW, Level.HIGH], "int64"), ([-2**63, 2**63 - 1], "int64"),
    ([np.float32(1), np.float32(2)], "float32"), ([np.float64(1), np.float64(2)], "float64"),
    ([np.uint8(1), np.uint8(255)], "uint8"), ([np.bool_(True), np.bool_(False)], "bool"),
    ([np.float16(1)], "float16"), ([np.uint64(2**64 - 1)], "uint64"), ([np.complex64(1j)], "complex64"),
    ([np.longdouble(1)], "longdouble"), ([np.datetime64("2020-01-01", "D")], "datetime64[D]"),
    ([np.timedelta64(3, "s"), np.timedelta64(4, "s")], "timedelta64[s]"),
], ids=lambda value: str(value)[:40])
def test_numbers_become_an_array_of_their_dtype(samples, dtype):
    """B57: Python's numbers get the widest dtype of their kind, NumPy's keep theirs; one sample keeps the axis."""
    for batch in (samples, samples[:1], tuple(samples), iter(samples)):
        expected = samples[:1] if batch == samples[:1] else samples
        assert_same(default_collate(batch), np.array(expected, dtype=dtype))


def test_classes_that_come_to_one_dtype_may_be_mixed():
    """An int beside an int64, a float beside a float64, a scalar beside an array without axes: nothing is lost."""
    assert_same(default_collate([1, np.int64(2), Level.HIGH, np.array(4)]), np.array([1, 2, 2, 4]))
    assert_same(default_collate([1.5, np.float64(2)]), np.array([1.5, 2]))
    assert_same(default_collate([np.float32(1), np.array(2, "f4")]), np.array([1, 2], "f4"))
    assert_same(default_collate([True, np.False_]), np.array([True, False]))


@pytest.mark.parametrize("text", ["str", "bytes"])
def test_texts_stay_a_list(text):
    """B57: nothing is made of strings and bytes; subclasses of them stay what they are."""
    samples = ["a", "bcd", np.str_("e")] if text == "str" else [b"a", b"\0", np.bytes_(b"e")]
    batch = default_collate(samples)
    assert batch == samples and batch is not samples
    assert list(map(type, batch)) == list(map(type, samples))
    assert default_collate([{"k": sample} for sample in samples]) == {"k": samples}


@pytest.mark.parametrize("dtype", ["f4", "f8", "u1", "i2", "?", "c8", "U3", "S2", "M8[ns]", "m8[D]",
                                   [("a", "i4"), ("b", "f8", (2,))], np.dtype("V5")], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3, 4), (40, 50)], ids=str)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_equal_arrays_are_stacked(dtype, shape, length):
    """B57: a new first axis, the same dtype and the values of np.stack, for sizes on both sides of recycling."""
    count = int(np.prod(shape))
    samples = []
    for number in range(length):
        raw = np.arange(count * np.dtype(dtype).itemsize, dtype="i8").astype("u1") + np.uint8(number)
        if dtype == "U3":
            samples.append(np.array([f"{number}{i}"[:3] for i in range(count)], dtype).reshape(shape))
        else:
            samples.append((raw % 2 if dtype == "?" else raw).astype("u1").view(dtype).reshape(shape))
    batch = default_collate(samples)
    assert type(batch) is np.ndarray and batch.shape == (length, *shape) and batch.dtype == np.dtype(dtype)
    assert batch.flags.c_contiguous and batch.flags.writeable and batch.flags.aligned
    assert batch.tobytes() == b"".join(sample.tobytes() for sample in samples)


@pytest.mark.parametrize("size", [4, 100])
def test_layout_of_the_samples_does_not_matter(size):
    """Strides, Fortran order, byte order, read-only memory and overlap: the values arrive, C-contiguous and native."""
    plain = np.arange(size * size * 3, dtype="f4").reshape(size, size, 3)
    read_only = plain.copy()
    read_only.flags.writeable = False
    wide = np.repeat(plain, 2, axis=0)
    same = [plain, np.asfortranarray(plain), wide[::2], plain[::-1][::-1], plain.astype(">f4"), read_only,
            np.moveaxis(np.moveaxis(plain, 2, 0).copy(), 0, 2), np.broadcast_to(plain, (2, size, size, 3))[1]]
    for samples in (same, *([sample] * 3 for sample in same)):
        batch = default_collate(samples)
        assert_same(batch, np.stack([plain] * len(samples)))
        assert batch.flags.c_contiguous and batch.dtype.isnative
    foreign = np.zeros(size, [("a", ">i4"), ("b", ">M8[s]")])
    foreign["a"] = np.arange(size)
    batch = default_collate([foreign, foreign])
    assert batch.dtype.isnative and batch["a"].tolist() == [list(range(size))] * 2
    base = np.arange(size * 20)
    overlapping = [base[start:start + size * 10] for start in range(5)]
    assert_same(default_collate(overlapping), np.stack(overlapping))


def test_strings_of_different_widths_get_the_widest():
    """Arrays of names have the width of the longest in them, which differs from sample to sample."""
    assert_same(default_collate([np.array(["a"]), np.array(["bcd"])]), np.array([["a"], ["bcd"]]))
    assert_same(default_collate([np.array([b"abc"]), np.array([b"d"])]), np.array([[b"abc"], [b"d"]]))


def test_strings_of_variable_width_are_stacked():
    """NumPy's StringDType holds its memory itself."""
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("NumPy 2 has it")
    samples = [np.array(["a", "long " * 20], dtype=np.dtypes.StringDType()) for _ in range(2)]
    batch = default_collate(samples)
    assert batch.dtype == samples[0].dtype and batch.tolist() == [sample.tolist() for sample in samples]


def test_memory_mapped_files_become_an_array(tmp_path):
    """A batch of np.load(mmap_mode) is memory, not a file."""
    np.save(tmp_path / "a.npy", np.arange(12.0))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert_same(default_collate([mapped, mapped]), np.stack([np.arange(12.0)] * 2))
    assert_same(default_collate([mapped, np.arange(12.0)]), np.stack([np.arange(12.0)] * 2))


def test_containers_keep_their_type():
    """B57: dicts keep the order of their keys, subclasses what they are, tuples and lists become columns."""
    assert_same(default_collate([{"b": 1, "a": 2}, {"a": 4, "b": 3}]), {"b": np.array([1, 3]), "a": np.array([2, 4])})
    assert_same(default_collate([(1, "a"), (2, "b")]), (np.array([1, 2]), ["a", "b"]))
    assert_same(default_collate([[1, 2.5], [3, 4.5]]), [np.array([1, 3]), np.array([2.5, 4.5])])
    assert_same(default_collate([Point(1, {"k": b"x"})] * 2), Point(np.array([1, 1]), {"k": [b"x", b"x"]}))
    assert_same(default_collate([(), ()]), ())
    assert_same(default_collate([{}, {}]), {})
    ordered = collections.OrderedDict(b=1, a=2)
    assert_same(default_collate([ordered]), collections.OrderedDict(b=np.array([1]), a=np.array([2])))


def test_mappings_keep_what_else_they_have():
    """The factory of a defaultdict, attributes of a subclass, and what is no subclass of dict; values are not added."""
    batch = default_collate([collections.defaultdict(list, a=1), collections.defaultdict(list, a=2)])
    assert type(batch) is collections.defaultdict and batch.default_factory is list
    assert_same(batch["a"], np.array([1, 2]))
    samples = [Attributed(a=1), Attributed(a=2)]
    samples[0].origin = "disk"
    batch = default_collate(samples)
    assert type(batch) is Attributed and batch.origin == "disk"
    assert_same(default_collate([collections.Counter("aab"), collections.Counter("abb")])["a"], np.array([2, 1]))
    batch = default_collate([collections.UserDict(a=1), collections.UserDict(a=2)])
    assert type(batch) is collections.UserDict
    assert_same(batch["a"], np.array([1, 2]))
    batch = default_collate([types.MappingProxyType({"a": 1})])
    assert type(batch) is types.MappingProxyType
    assert_same(batch["a"], np.array([1]))


def test_other_sequences_become_columns():
    """deque and subclasses of list and tuple keep their type; what cannot hold arrays becomes a list."""

    class Columns(list):
        pass

    class Pair(tuple):
        __slots__ = ()

    class Strict(tuple):
        __slots__ = ()

        def __new__(cls, left, right):
            return super().__new__(cls, (left, right))

    for kind in (collections.deque, Columns, Pair):
        batch = default_collate([kind([1, "a"]), kind([2, "b"])])
        assert type(batch) is kind
        assert_same(list(batch), [np.array([1, 2]), ["a", "b"]])
    assert_same(default_collate([Strict(1, 2), Strict(3, 4)]), (np.array([1, 3]), np.array([2, 4])))
    assert_same(default_collate([range(2), range(2)]), [np.array([0, 0]), np.array([1, 1])])
    assert_same(default_collate([array.array("i", [5, 6])]), [np.array([5]), np.array([6])])


def nested(number: int, samples: int):
    return {
        "image": np.full((3, 40, 40), number, "f4"),
        "boxes": [(np.arange(4) + number, "cat"), (np.arange(4), "dog")],
        "more": collections.OrderedDict(point=Point(number, np.float32(0.5)), flags={"ok": True, "name": b"x"}),
    }


@pytest.mark.parametrize("length", [1, 3])
def test_anything_may_be_nested_in_anything(length):
    """B57: rules apply at any depth."""
    batch = default_collate([nested(number, length) for number in range(length)])
    numbers = np.arange(length)
    assert_same(batch, {
        "image": np.stack([np.full((3, 40, 40), number, "f4") for number in numbers]),
        "boxes": [(np.arange(4) + numbers[:, None], ["cat"] * length),
                  (np.stack([np.arange(4)] * length), ["dog"] * length)],
        "more": collections.OrderedDict(point=Point(numbers, np.full(length, 0.5, "f4")),
                                        flags={"ok": np.ones(length, "?"), "name": [b"x"] * length}),
    })


def test_samples_are_left_alone():
    """B57: no sample changes, none shares memory with the batch, and no default is made in a defaultdict."""
    samples = [nested(number, 2) for number in range(2)]
    before = copy.deepcopy(samples)
    batch = default_collate(samples)
    inside = list(arrays_in(samples))
    for made in arrays_in(batch):
        assert not any(np.shares_memory(made, array) for array in inside)
        made.fill(7)
    assert_same(samples, before)
    lists = [["a"], ["b"]]
    default_collate(lists)[0].append("c")
    names = ["a", "b"]
    default_collate(names).append("c")
    assert lists == [["a"], ["b"]] and names == ["a", "b"]
    defaults = [collections.defaultdict(int, a=1, b=1), collections.defaultdict(int, a=1)]
    with pytest.raises(ValueError, match="keys differ"):
        default_collate(defaults)
    assert len(defaults[1]) == 1
    one = collections.OrderedDict(a=1)
    default_collate([one])
    assert one == {"a": 1}


# ---- what does not fit ----


@dataclasses.dataclass
class Record:
    mask: object


class Units(np.ndarray):
    """An array with a meaning of its own."""


@pytest.mark.parametrize(("sample", "name"), [
    (None, "NoneType"), ({1, 2}, "set"), (Record(1), "Record"), (object(), "object"), (Fraction(1, 2), "Fraction"),
    (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"), (np.zeros(3).view(Units), "Units"),
    (bytearray(b"ab"), "bytearray"), (memoryview(b"ab"), "memoryview"), (np.recarray(3, "i4"), "recarray"),
], ids=lambda value: type(value).__name__ if not isinstance(value, str) else value)
def test_type_without_a_rule_is_named_with_path_and_positions(sample, name):
    """B57: one unknown type, anywhere, is a TypeError that says where."""
    with pytest.raises(TypeError) as raised:
        default_collate([sample, sample])
    assert str(raised.value).startswith(f"cannot collate sample: no rule for {name} at positions 0, 1; ")
    with pytest.raises(TypeError) as raised:
        default_collate([[{"image": Point(1, 1)}], [{"image": Point(1, sample)}]])
    assert f'cannot collate sample[0]["image"].y: no rule for {name} at position 1; ' in str(raised.value)
    if sample is not None:
        assert f"register_collate({name}, fn)" in str(raised.value)


@pytest.mark.parametrize(("error", "samples", "message"), [
    (ValueError, [np.zeros((3, 4)), np.zeros((3, 4)), np.zeros((3, 5))],
     "sample: shapes differ: (3, 4) at positions 0, 1; (3, 5) at position 2"),
    (ValueError, [np.zeros((1,) * 8), np.zeros((1,) * 7 + (2,))],
     "sample: shapes differ: (1, 1, 1, 1, 1, 1, 1, 1) at position 0; (1, 1, 1, 1, 1, 1, 1, 2) at position 1"),
    (ValueError, [{"x": np.zeros(2)}, {"x": np.zeros(2, "f4")}],
     'sample["x"]: dtypes differ: float64 at position 0; float32 at position 1'),
    (ValueError, [1, 2.5, 3], "sample: dtypes differ: int64 at positions 0, 2; float64 at position 1"),
    (ValueError, [True, 2], "sample: dtypes differ: bool at position 0; int64 at position 1"),
    (ValueError, [1, np.array([1])], "sample: shapes differ: () at position 0; (1,) at position 1"),
    (ValueError, [np.datetime64(1, "s"), np.datetime64(1, "D")],
     "sample: dtypes differ: datetime64[s] at position 0; datetime64[D] at position 1"),
    (ValueError, [np.void(b"ab"), np.void(b"abc")], "sample: dtypes differ: |V2 at position 0; |V3 at position 1"),
    (ValueError, [{"a": 1, "b": 2}, {"a": 1}], "sample: keys differ: ['a', 'b'] at position 0; ['a'] at position 1"),
    (ValueError, [{"a": 1}, {"a": 1, "b": 2}], "sample: keys differ: ['a'] at position 0; ['a', 'b'] at position 1"),
    (ValueError, [{"k": [1, 2]}, {"k": [1]}, {"k": [2, 1]}],
     'sample["k"]: lengths differ: 2 at positions 0, 2; 1 at position 1'),
    (ValueError, [[]] * 20 + [[1]], "sample: lengths differ: 0 at positions 0, 1, 2, 3, 4, 5, 6, 7, ... 20 in all; "
                                    "1 at position 20"),
    (TypeError, ["a", 1], "sample: types differ: str at position 0; int at position 1"),
    (TypeError, ["a", b"a"], "sample: types differ: str at position 0; bytes at position 1"),
    (TypeError, [{}, collections.OrderedDict()], "sample: types differ: dict at position 0; OrderedDict at position 1"),
    (TypeError, [(1, 2), Point(1, 2)], "sample: types differ: tuple at position 0; Point at position 1"),
    (TypeError, [(1, 2), [1, 2]], "sample: types differ: tuple at position 0; list at position 1"),
    (TypeError, [1, None, None], "sample: no rule for NoneType at positions 1, 2; "),
    (TypeError, [np.zeros(1), np.ma.zeros(1)], "sample: no rule for MaskedArray at position 1; "),
    (TypeError, [np.array([1, None])], "sample: an array of dtype object holds Python objects"),
    (TypeError, [np.array([(1, None)], [("a", "i4"), ("b", "O")])[0]], "holds Python objects"),
    (OverflowError, [1, 2**63], "sample: ints must fit int64, got 9223372036854775808 at position 1"),
    (OverflowError, [{"id": (-2**63 - 1,)}],
     'sample["id"][0]: ints must fit int64, got -9223372036854775809 at position 0'),
    (OverflowError, [np.int64(1), 2**64], "sample: ints must fit int64, got 18446744073709551616 at position 1"),
    (OverflowError, [10**5000], "sample: ints must fit int64, got <int> at position 0"),
    (ValueError, [], "samples must hold at least one sample, got none"),
    (ValueError, [{1.5: {'say "x"': [1]}}, {1.5: {'say "x"': []}}],
     """sample[1.5]['say "x"']: lengths differ: 1 at position 0; 0 at position 1"""),
], ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_what_does_not_fit_is_named_with_path_and_positions(error, samples, message):
    """Shapes, dtypes, keys, lengths and types that differ: which, where in the sample, and in which samples."""
    with pytest.raises(error) as raised:
        default_collate(samples)
    # CPython 3.14 says of a huge int how long it is.
    assert message in re.sub("<int instance.*?>", "<int>", str(raised.value))


# ---- registered types ----


def test_registered_type_is_collated_at_any_depth(rules):
    """B57: the function gets the objects of one place, in order; subclasses follow, the most specific class wins."""

    class Base:
        def __init__(self, value):
            self.value = value

    class Derived(Base):
        pass

    class Special(Derived):
        pass

    register_collate(Base, lambda objects: ("base", [one.value for one in objects]))
    assert default_collate([Base(1), Base(2)]) == ("base", [1, 2])
    assert default_collate([{"k": [Derived(1)]}, {"k": [Derived(2)]}]) == {"k": [("base", [1, 2])]}
    assert default_collate([Base(1), Special(2)]) == ("base", [1, 2])
    register_collate(Derived, lambda objects: ("derived", [one.value for one in objects]))
    assert default_collate([(Special(1),)]) == (("derived", [1]),)
    assert default_collate([Base(1)]) == ("base", [1])
    with pytest.raises(TypeError, match="types differ: Base at position 0; Special at position 1"):
        default_collate([Base(1), Special(2)])


def test_registered_type_may_have_a_rule_already(rules):
    """What is registered replaces the rule of a class, not that of a more specific one."""
    register_collate(dict, lambda objects: "dicts")
    register_collate(int, lambda objects: "ints")
    register_collate(np.ndarray, lambda objects: "arrays")
    register_collate(np.floating, lambda objects: "floating")
    register_collate(type(None), lambda objects: "nothing")
    assert default_collate([collections.OrderedDict()]) == "dicts"
    assert default_collate([1]) == default_collate([Level.LOW]) == "ints"
    assert_same(default_collate([True]), np.array([True]))
    with pytest.raises(TypeError, match="no rule for object"):
        default_collate([object()])  # looks for rules that NumPy brings
    assert default_collate([np.ma.zeros(1)]) == "arrays"
    assert default_collate([np.float32(1)]) == "floating"
    assert_same(default_collate([np.int8(1)]), np.array([1], "i1"))
    assert default_collate([None, None]) == "nothing"


def test_error_of_a_registered_function_comes_out_with_a_note(rules):
    """The object itself, with one note that says for which part it was called, also when it is raised again."""
    failure = KeyError("inside")

    def fail(objects):
        raise failure

    register_collate(Record, fail)
    for _ in range(2):
        with pytest.raises(KeyError) as raised:
            default_collate([{"r": Record(1)}])
        assert raised.value is failure
    assert failure.__notes__ == ['raised by the function that was registered for sample["r"] (Record)']


@pytest.mark.parametrize(("arguments", "message"), [
    ((3, len), r"type must be a class, got 3 \(int\)"),
    ((list[int], len), r"type must be a class, got list\[int\]"),
    ((Record, 5), r"fn must be callable, got 5 \(int\)"),
    ((Record, None), r"fn must be callable, got None"),
])
def test_wrong_argument_of_register_collate_is_named(arguments, message):
    """The argument, the rule and the value."""
    with pytest.raises(TypeError, match=message):
        register_collate(*arguments)


def test_threads_may_register_and_collate_at_once(rules):
    """Each thread finds the rule it has registered, however many others register and collate."""

    def work(number: int) -> None:
        for round_number in range(50):
            kind = type(f"Kind{number}", (), {})
            register_collate(kind, lambda objects, answer=(number, round_number): answer)
            assert default_collate([{"k": kind()}, {"k": kind()}]) == {"k": (number, round_number)}
            assert_same(default_collate([np.full(1000, number)] * 4), np.full((4, 1000), number))

    run_threaded(work, 4)


# ---- beside other libraries ----


def test_numpy_is_imported_only_for_numbers(run_script):
    """Importing the package and collating texts need no NumPy; numbers without NumPy are a clear ImportError."""
    run_script("""
        import sys
        import dataloader_rs
        assert dataloader_rs.default_collate([{"a": "x", "b": (b"y",)}]) == {"a": ["x"], "b": ([b"y"],)}
        assert "numpy" not in sys.modules and "torch" not in sys.modules
        assert dataloader_rs.default_collate([1, 2]).tolist() == [1, 2]
        assert "numpy" in sys.modules and "torch" not in sys.modules
        """)
    run_script("""
        import sys
        sys.modules["numpy"] = None
        import dataloader_rs
        assert dataloader_rs.default_collate(["x"]) == ["x"]
        try:
            dataloader_rs.default_collate([1])
        except ImportError as error:
            assert "default_collate makes NumPy arrays of numbers, and NumPy cannot be imported" in str(error)
        else:
            raise AssertionError("no error")
        """)


class FakeTensor:
    """What default_collate asks of a tensor."""

    def __init__(self, shape, value):
        self.shape = shape
        self.value = value


@pytest.fixture
def fake_torch(monkeypatch, rules):
    torch = types.ModuleType("torch")
    torch.Tensor = FakeTensor
    torch.stack = lambda tensors: FakeTensor((len(tensors), *tensors[0].shape), [tensor.value for tensor in tensors])
    torch.utils = types.ModuleType("torch.utils")
    torch.utils.data = types.ModuleType("torch.utils.data")
    torch.utils.data.default_collate = lambda samples: ("torch", samples)
    for name, module in (("torch", torch), ("torch.utils", torch.utils), ("torch.utils.data", torch.utils.data)):
        monkeypatch.setitem(sys.modules, name, module)
    return torch


def test_tensors_are_stacked_by_torch(fake_torch):
    """Once torch is imported, tensors become a tensor; shapes that differ are named like those of arrays."""
    batch = default_collate([{"x": FakeTensor((2,), 1)}, {"x": FakeTensor((2,), 2)}])
    assert type(batch["x"]) is FakeTensor and batch["x"].shape == (2, 2) and batch["x"].value == [1, 2]
    with pytest.raises(ValueError, match=r'sample\["x"\]: shapes differ: \(2,\) at position 0; \(3,\) at position 1'):
        default_collate([{"x": FakeTensor((2,), 1)}, {"x": FakeTensor((3,), 2)}])
    with pytest.raises(TypeError, match="types differ: FakeTensor at position 0; ndarray at position 1"):
        default_collate([FakeTensor((2,), 1), np.zeros(2)])


def test_error_of_torch_comes_out_with_a_note(fake_torch):
    """torch says what is wrong, and the note where."""

    def fail(tensors):
        raise RuntimeError("of torch")

    fake_torch.stack = fail
    with pytest.raises(RuntimeError, match="of torch") as raised:
        default_collate([(FakeTensor((2,), 1),)])
    assert raised.value.__notes__ == ["raised by torch.stack for sample[0]"]


def test_collate_fn_may_be_named(fake_torch):
    """None and callables mean themselves, "torch" torch's own function; all else names argument, rule and value."""
    assert torch_arguments.resolve_collate(None) is None
    assert torch_arguments.resolve_collate(len) is len
    assert torch_arguments.resolve_collate("torch") is fake_torch.utils.data.default_collate
    with pytest.raises(ValueError, match="""collate_fn must be callable, None or "torch", got 'numpy'"""):
        torch_arguments.resolve_collate("numpy")
    with pytest.raises(TypeError, match=r"""collate_fn must be callable, None or "torch", got 5 \(int\)"""):
        torch_arguments.resolve_collate(5)


def test_named_collate_fn_without_torch_is_a_clear_error(monkeypatch):
    """The message names the argument and what is missing."""
    for name in ("torch", "torch.utils.data"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match='collate_fn="torch" needs torch, which cannot be imported'):
        torch_arguments.resolve_collate("torch")


# Fits torch as well: what it does otherwise is that tuples become lists and arrays tensors.
SAMPLES = [
    [1, 2], [1.5, 2.5], [True, False], ["a", "b"], [b"a", b"b"], [np.float32(1), np.float32(2)],
    [np.zeros((2, 3), "u1"), np.ones((2, 3), "u1")], [{"a": 1, "b": "x"}, {"b": "y", "a": 2}],
    [(1, "a"), (2, "b")], [[1, 2.5], [3, 4.5]], [Point(1, 2.0), Point(3, 4.0)],
    [collections.OrderedDict(b=1, a=(2, 3))] * 2, [collections.defaultdict(list, a=1)] * 3,
    [{"k": [Point({"deep": np.arange(3)}, "s")]}] * 2, [{}], [Level.LOW, Level.HIGH],
]


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda value: str(value)[:40])
def test_rules_are_those_of_torch(samples):
    """B57: the same types, dtypes and values as torch's default_collate, with arrays for tensors and tuples kept."""
    torch_data = pytest.importorskip("torch.utils.data")

    def as_numpy(ours, theirs):
        if isinstance(ours, np.ndarray):
            return theirs.numpy()
        if isinstance(ours, dict):
            assert type(theirs) is type(ours)
            for key in ours:
                theirs[key] = as_numpy(ours[key], theirs[key])
            return theirs
        if isinstance(ours, tuple) and hasattr(ours, "_fields"):
            return type(theirs)._make(map(as_numpy, ours, theirs))
        if isinstance(ours, (list, tuple)):
            assert isinstance(theirs, (list, tuple))  # texts below a sequence are a tuple there
            return type(ours)(map(as_numpy, ours, theirs))
        return theirs

    ours = default_collate(samples)
    assert_same(ours, as_numpy(ours, torch_data.default_collate(samples)))


def test_real_tensors_become_a_tensor():
    """With torch itself."""
    torch = pytest.importorskip("torch")
    batch = default_collate([{"x": torch.arange(3), "n": 1}, {"x": torch.arange(3) + 1, "n": 2}])
    assert torch.equal(batch["x"], torch.tensor([[0, 1, 2], [1, 2, 3]]))
    assert_same(batch["n"], np.array([1, 2]))
    assert torch.from_numpy(default_collate([np.zeros((50, 50), ">f4")] * 2)).shape == (2, 50, 50)


class Samples(Ids):
    def __getitem__(self, index: int):
        return {"image": np.full((8, 1024), index, "f4"), "label": index, "name": str(index)}


def test_loader_gives_equal_batches_with_any_number_of_workers(num_workers):
    """As a collate_fn it runs on the workers; batches are those of one thread."""
    loader = PyDataloader(Samples(22), batch_size=4, num_workers=num_workers, collate_fn=default_collate)
    expected = [[Samples(22)[index] for index in range(start, min(start + 4, 22))] for start in range(0, 22, 4)]
    for batch, samples in zip(loader, expected, strict=True):
        assert_same(batch, {
            "image": np.stack([sample["image"] for sample in samples]),
            "label": np.array([sample["label"] for sample in samples]),
            "name": [sample["name"] for sample in samples]})
