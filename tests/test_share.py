"""share() changes no value, no identity and no order; it spares threads the counting. With the GIL it does nothing."""

from __future__ import annotations

import collections
import copy
import enum
import gc
import itertools
import sys
import threading
import time
import weakref

import pytest
from conftest import run_threaded

from dataloader_rs import PyDataloader, PyDataset, _share, share, sharing

# An interpreter that was built free-threaded is so as well while the GIL is switched on.
BUILT_FREE_THREADED = _share.FREE_THREADED
DEFERS = BUILT_FREE_THREADED and sys.version_info >= (3, 14)
# More than anything here is referenced; immortal objects say a number of this size.
MANY = 2**30

free_threaded = pytest.mark.skipif(not BUILT_FREE_THREADED, reason="immortal objects are for free-threaded builds")


def fresh(text: str) -> str:
    """An equal string that is nobody else's."""
    return "".join(list(text))


def is_immortal(obj: object) -> bool:
    return sys.getrefcount(obj) > MANY


class Words(dict):
    """A table that can be watched with a weak reference."""


class Plain:
    """An instance of a class."""


class Colour(enum.IntEnum):
    RED = 70_001


class Named(str):
    """A string that may carry more than its text."""


Pair = collections.namedtuple("Pair", "first second")


def tables() -> dict:
    """One of each kind, made anew."""
    return {
        "none": None,
        "int": int("123456789"),
        "str": fresh("a string"),
        "dict": {fresh(f"word {n}"): n + 10**6 for n in range(5)},
        "empty": [{}, [], (), set(), frozenset(), "", b""],
        "list": [float("nan"), float("1.5"), int("-70000"), complex(1, 2), bytes([1, 2, 3]), True, None],
        "tuples": (("a", (1.5, (fresh("deep"),))), ([1],), ()),
        "sets": [{fresh("x1"), 10**7}, frozenset({fresh("y1"), (1, 2)})],
        "keys": [{1: "int"}, {True: "bool"}, {1.0: "float"}, {(1, 1.0): 2, frozenset({3}): 4, None: 5}],
        "subclasses": [collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {"k": [1]}),
                       collections.Counter("aab"), Pair([1], 2), Words(c=3), Named("n"), Colour.RED],
        "others": [Plain, len, Plain(), bytearray(b"1"), range(3), sys, collections.deque([1, 2])],
    }


def nested(depth: int, wrap, inner):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def unwrapped(obj, unwrap) -> int:
    """Levels of nesting. Takes the object apart, since dropping it whole may recurse."""
    depth = 0
    while obj != "end":
        obj = unwrap(obj)
        depth += 1
    return depth


def parts(obj: object) -> list:
    """Ids of all that is in the containers of `obj`, in order, by plain recursion: the reference for small tables."""
    found = [(id(obj), type(obj))]
    if isinstance(obj, dict):
        for key, value in obj.items():
            found += parts(key) + parts(value)
    elif isinstance(obj, (list, tuple, set, frozenset)):
        for item in obj:
            found += parts(item)
    return found


class Record:
    """What `walk` did to a table, on any build: nothing is really done."""

    def __init__(self, monkeypatch, table: object, immortal: bool = True, refused: tuple = ()) -> None:
        self.deferred: list = []
        self.leaves: list = []
        self.lasting: dict[int, object] = {}
        self.refused = refused
        monkeypatch.setattr(sharing, "is_immortal", lambda obj: id(obj) in self.lasting)
        sharing.walk(table, self.deferred.append, self.make_immortal if immortal else None)

    def make_immortal(self, obj: object) -> bool:
        self.leaves.append(obj)
        if any(obj is other for other in self.refused):
            return False
        self.lasting[id(obj)] = obj
        return True


def same(found: list, expected: list) -> bool:
    """The same objects, each as often, in any order."""
    return sorted(map(id, found)) == sorted(map(id, expected))


@pytest.mark.parametrize("immortal", [False, True])
@pytest.mark.parametrize("name", tables())
def test_any_object_comes_back_itself_and_unchanged(name, immortal):
    """The same object, with the same objects in it, in the same order; a nan and a 1.0 stay what they are."""
    table = tables()[name]
    before, text = parts(table), repr(table)
    for _ in range(2):
        assert share(table, immortal=immortal) is table
        assert parts(table) == before
        assert repr(table) == text


@pytest.mark.parametrize("value", [1, 0, None, "yes", 1.0, [True]], ids=repr)
def test_immortal_that_is_no_bool_is_a_type_error(value):
    """On every build; the message has the argument, the rule and the value."""
    with pytest.raises(TypeError, match="^immortal must be True or False, got ") as caught:
        share({}, immortal=value)
    assert repr(value) in str(caught.value)


def test_immortal_is_given_by_keyword():
    """``share(a, b)`` does not make `a` immortal because there is a `b`."""
    with pytest.raises(TypeError):
        share({}, True)


def test_shared_table_can_be_changed_copied_and_compared():
    """It is an ordinary dict afterwards."""
    table = share({fresh("one"): [1], fresh("two"): (2, 2.5)}, immortal=True)
    other = copy.deepcopy(table)
    assert other == table
    table["three"] = {3}
    del table["one"]
    assert table == {"two": (2, 2.5), "three": {3}}
    assert list(other) == ["one", "two"]


@pytest.mark.parametrize("immortal", [False, True])
def test_containers_and_instances_are_deferred_once(monkeypatch, immortal):
    """Each once, however often it is reached; leaves and other objects never."""
    shared: list = [1]
    item = Plain()
    words = Words(a=shared, b={2: shared})
    table = [words, shared, {3, 4}, Pair(shared, item), item, (shared, ()), len, bytearray(), Colour.RED, "text"]
    table.append(table)
    record = Record(monkeypatch, table, immortal)
    expected = [table, words, shared, words["b"], table[2], table[3], item, table[5], Colour.RED]
    assert same(record.deferred, expected + ([] if immortal else [()]))


def test_leaves_and_keys_are_made_immortal(monkeypatch):
    """Of exactly the immutable types; keys as well as values."""
    leaves = [fresh("k1"), 10**9, float("2.5"), complex(0, 1), bytes(5)]
    record = Record(monkeypatch, [dict.fromkeys(leaves), [Named("s"), Colour.RED, True, None, bytearray(1), Plain()]])
    assert same(record.leaves, leaves)


def test_without_immortal_no_leaf_is_touched(monkeypatch):
    """The default only defers."""
    record = Record(monkeypatch, tables(), immortal=False)
    assert record.leaves == []


@pytest.mark.parametrize("make", [tuple, frozenset])
def test_tuple_of_immortal_objects_is_a_leaf(monkeypatch, make):
    """And so is a tuple of such tuples; with a list, or a leaf that was refused, inside it is a container."""
    inner = make([fresh("v1"), 7.5])
    outer = make([inner, 8.5])
    refused = fresh("v2")
    half = make([refused, 9.5])
    holder = tuple([half])
    unhashable = ([1],)
    # `inner` is met on its own before and after it is met in `outer`.
    record = Record(monkeypatch, [inner, outer, inner, half, holder, unhashable], refused=(refused,))
    assert [obj for obj in record.leaves if type(obj) is make] in ([inner, outer], [inner, outer, inner])
    assert same(record.deferred[1:] if type(record.deferred[0]) is list else record.deferred,
                [half, holder, unhashable, unhashable[0]])


def test_tuples_become_immortal_from_the_inside_out(monkeypatch):
    """Whatever order they are met in: `late` holds what an earlier place of the table holds as well."""
    inner = (fresh("i1"),)
    late = (inner, inner)
    for table in ([inner, late], [late, inner], [(late, inner), inner, late], {inner: late}, {late: inner}):
        record = Record(monkeypatch, table)
        assert not any(type(obj) is tuple for obj in record.deferred), table


def test_tuple_in_a_cycle_is_a_container(monkeypatch):
    """Its list is mutable, so the cycle has no immortal part."""
    items: list = []
    cycle = (items, (1.5, items))
    items.append(cycle)
    record = Record(monkeypatch, cycle)
    assert same(record.deferred, [items, cycle, cycle[1]])


def test_tuples_that_share_their_parts_take_no_exponential_time(monkeypatch):
    """200 levels of ``(t, t)`` are 200 tuples."""
    record = Record(monkeypatch, nested(200, lambda inner: (inner, inner), (fresh("leaf"),)))
    assert len(record.leaves) == 202
    assert record.deferred == []


def test_instances_are_not_looked_into(monkeypatch):
    """An attribute may lead anywhere; ``vars()`` says that it is meant."""
    holder = Plain()
    holder.words = {"a": 1}
    record = Record(monkeypatch, [holder])
    assert same(record.deferred[1:], [holder])
    record = Record(monkeypatch, vars(holder))
    assert same(record.deferred, [vars(holder), holder.words])


DEEP = {
    "list": (lambda inner: [inner], lambda obj: obj.pop()),
    "dict": (lambda inner: {0: inner}, lambda obj: obj.popitem()[1]),
    "tuple": (lambda inner: (inner,), lambda obj: obj[0]),
    "frozenset": (lambda inner: frozenset((inner,)), lambda obj: next(iter(obj))),
    "subclass": (lambda inner: Pair(0, inner), lambda obj: obj[1]),
}


@pytest.mark.parametrize("kind", DEEP)
def test_nesting_of_100_000_levels_is_walked(monkeypatch, kind):
    """Without recursion, in the walk as in the real thing."""
    wrap, unwrap = DEEP[kind]
    # A frozenset hashes what is in it, and that is as deep.
    depth = 100 if kind == "frozenset" else 100_000
    table = nested(depth, wrap, "end")
    record = Record(monkeypatch, table)
    assert len([obj for obj in [*record.deferred, *record.leaves] if type(obj) is type(table)]) == depth
    del record
    monkeypatch.undo()
    share(table, immortal=True)
    assert unwrapped(table, unwrap) == depth


class Asked(Exception):
    pass


def asked(*_):
    raise Asked


class AskedMeta(type):
    """Raises whenever anybody compares, hashes or looks at the class."""

    armed = False

    def __getattribute__(cls, name):
        if AskedMeta.armed:
            raise Asked(name)
        return super().__getattribute__(name)

    def __hash__(cls):
        return asked() if AskedMeta.armed else super().__hash__()

    def __eq__(cls, other):
        return asked() if AskedMeta.armed else cls is other

    __instancecheck__ = __subclasscheck__ = asked


HOSTILE = {name: asked for name in ("__iter__", "__len__", "__getitem__", "__contains__", "__repr__", "__bool__",
                                    "keys", "values", "items", "copy", "__getattribute__", "__eq__")}


@pytest.mark.parametrize("base", [dict, list, tuple, set, frozenset, object, str, int])
def test_no_code_of_the_user_is_run(monkeypatch, base):
    """Subclasses may override whatever they like; what the base holds is what counts."""

    def of_object(self):
        return asked() if AskedMeta.armed else 17

    kind = AskedMeta("Hostile", (base,), {**HOSTILE, "__hash__": of_object, "__class__": property(asked)})
    content = [fresh("content")]
    hostile = {dict: lambda: kind({"k": content}), list: lambda: kind([content]), tuple: lambda: kind((content,)),
               set: lambda: kind({(1.25,)}), frozenset: lambda: kind({(1.25,)})}.get(base, kind)()
    table = {hostile: hostile} if base in (tuple, frozenset, object, str, int) else [hostile]
    monkeypatch.setattr(AskedMeta, "armed", True)
    share(table)
    share(table, immortal=True)
    record = Record(monkeypatch, table)
    assert same(record.deferred, [table, hostile] + ([content] if base in (dict, list, tuple) else []))
    assert len(record.leaves) == {dict: 2, list: 1, tuple: 1, set: 2, frozenset: 2}.get(base, 0)


@free_threaded
def test_immortal_leaves_are_not_counted():
    """Every kind of leaf, at any depth, as key and value; also a copy of a string that is interned already."""
    interned = sys.intern("a word that is interned")
    leaves = [fresh("a word"), fresh(interned), fresh("ä𝄞"), "é" * 3, int("99999999999999999999"), int("1000"),
              float("0.125"), complex(3, 4), bytes([9, 9]), tuple([float("0.25"), (fresh("in"),)]),
              frozenset([float("0.5")])]
    assert leaves[1] is not interned
    assert not any(map(is_immortal, leaves))
    table = [{leaf: [leaf]} for leaf in leaves] + [({leaf},) for leaf in leaves]
    share(table, immortal=True)
    assert all(map(is_immortal, leaves))
    assert is_immortal(leaves[9][0]) and is_immortal(leaves[9][1]) and is_immortal(leaves[9][1][0])
    assert not any(is_immortal(part) for part in [table, table[0], table[-1], table[-1][0]])


@free_threaded
def test_without_immortal_leaves_stay_mortal():
    """The default never leaks."""
    leaf = fresh("mortal")
    share([{leaf: leaf}, (leaf,)])
    assert not is_immortal(leaf)


@free_threaded
def test_immortal_string_is_the_interned_one_if_there_was_none():
    """A later ``sys.intern`` of an equal string gives the very key of the table."""
    key = fresh("a key of the table, never seen before")
    share({key: 1}, immortal=True)
    assert sys.intern(fresh(key)) is key


@free_threaded
def test_immortal_copy_of_an_interned_string_can_be_interned():
    """Interning it gives the other one, before and after, and harms neither."""
    interned = sys.intern("interned long before")
    copied = fresh(interned)
    share([copied], immortal=True)
    for _ in range(3):
        assert sys.intern(copied) is interned
    assert copied == interned and is_immortal(copied)
    assert {copied: 1}[interned] == 1


@free_threaded
@pytest.mark.parametrize("ended", [False, True])
def test_leaf_of_another_thread_is_left_alone(ended):
    """Its count is that thread's to write, also when its id may be in use again. Whoever owns it can share it."""
    table, made, end = {}, threading.Event(), threading.Event()
    own = fresh("made here")

    def load():
        table.update({fresh("made there"): int("123123123"), own: 1})
        made.set()
        end.wait()

    thread = threading.Thread(target=load)
    thread.start()
    made.wait()
    if ended:
        end.set()
        thread.join()
    share(table, immortal=True)
    there, number = next(iter(table.items()))
    assert not is_immortal(there) and not is_immortal(number)
    assert is_immortal(own)
    end.set()
    thread.join()
    gc.collect()
    assert table == {"made there": 123123123, "made here": 1}


@free_threaded
def test_table_can_be_shared_on_the_thread_that_made_it():
    """And is then used by others, after that thread has ended."""
    tables = run_threaded(lambda number: share({fresh(f"key {number} {n}"): n + 10**6 for n in range(100)},
                                               immortal=True), 2)
    gc.collect()
    for number, table in enumerate(tables):
        assert all(map(is_immortal, table)) and all(map(is_immortal, table.values()))
        assert table == {f"key {number} {n}": n + 10**6 for n in range(100)}


@free_threaded
def test_object_whose_owner_gave_it_up_is_made_immortal():
    """It is nobody's then: its maker dropped all references while another thread held one."""
    given: list = []
    made, copied = threading.Event(), threading.Event()

    def make():
        given.extend([float("123.5"), fresh("given up"), (float("0.5"),)])
        made.set()
        copied.wait()
        given.clear()

    thread = threading.Thread(target=make)
    thread.start()
    made.wait()
    values = list(given)
    copied.set()
    thread.join()
    share(values, immortal=True)
    assert all(map(is_immortal, values[:2]))
    # The number in the tuple is held by the tuple alone, and still counted by the thread that made both.
    assert not is_immortal(values[2])
    assert values == [123.5, "given up", (0.5,)]


@pytest.mark.skipif(BUILT_FREE_THREADED, reason="for builds with the GIL")
@pytest.mark.parametrize("immortal", [False, True])
def test_with_the_gil_nothing_happens(monkeypatch, immortal):
    """No count changes, no string is interned, and the table is not even walked."""
    interned = sys.intern("some interned string")
    table = [fresh(interned), fresh("not interned"), float("0.75"), (fresh("inner"),), {}]
    before = [sys.getrefcount(item) for item in table]
    monkeypatch.setattr(sharing, "walk", asked)
    share(table, immortal=immortal)
    assert [sys.getrefcount(item) for item in table] == before
    assert sys.intern(fresh("not interned")) is not table[1]


@pytest.mark.skipif(BUILT_FREE_THREADED, reason="for builds with the GIL")
def test_with_the_gil_no_memory_is_kept():
    """A table that is shared and dropped is gone."""
    def once():
        share({fresh(f"word {n}"): (n + 10**6, float(n)) for n in range(100)}, immortal=True)

    once()
    before = sys.getallocatedblocks()
    for _ in range(100):
        once()
    assert sys.getallocatedblocks() - before < 300


@pytest.mark.parametrize("immortal", [False, True])
def test_dropped_container_is_freed_by_a_collection(immortal):
    """At the latest; at once where counts are not deferred."""
    # In a function, so that nothing of this frame still holds it.
    def made() -> weakref.ref:
        table = share(Words({"k": ["v"], "self": None}), immortal=immortal)
        return weakref.ref(table)

    reference = made()
    assert (reference() is not None) == DEFERS
    for _ in range(2):
        gc.collect()
    assert reference() is None


def test_dropped_cycle_is_freed_by_a_collection():
    """Sharing makes no cycle uncollectable."""
    table = Words()
    table["self"] = [table, (table, 1.5)]
    reference = weakref.ref(share(table, immortal=True))
    del table
    for _ in range(2):
        gc.collect()
    assert reference() is None


def test_shared_tables_survive_collections():
    """The collector leaves immortal tuples, and what they hold, alone."""
    table = {(fresh(f"k{n}"), float(n)): [((n + 10**6, fresh(f"v{n}")), frozenset([float(n)]))] for n in range(200)}
    expected = repr(table)
    share(table, immortal=True)
    for _ in range(20):
        gc.collect()
        share(table, immortal=True)
    assert repr(table) == expected
    values = list(table.values())
    table.clear()
    gc.collect()
    assert [value[0][0][1] for value in values] == [f"v{n}" for n in range(200)]


def test_big_table_takes_little_time():
    """200,000 words and numbers: a fifth of a second here, and not minutes anywhere."""
    table = {fresh(f"word{n}"): n + 10**6 for n in range(200_000)}
    start = time.perf_counter()
    share(table, immortal=True)
    assert time.perf_counter() - start < 10
    assert not BUILT_FREE_THREADED or (all(map(is_immortal, table)) and all(map(is_immortal, table.values())))


class Tokens(PyDataset):
    def __init__(self, vocabulary: dict, texts: list) -> None:
        self.vocabulary = vocabulary
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list:
        return [self.vocabulary[word] for word in self.texts[index].split()]


@pytest.mark.parametrize("immortal", [False, True])
def test_workers_read_a_table_while_it_is_shared(num_workers, immortal):
    """The loader gives the same batches whether the table is shared before, meanwhile or not at all."""
    words = [f"w{n}" for n in range(500)]
    vocabulary = {fresh(word): (n + 10**6, [float(n)]) for n, word in enumerate(words)}
    texts = [" ".join(words[start::37]) for start in range(200)]
    expected = [[vocabulary[word] for word in text.split()] for text in texts]
    batches = iter(PyDataloader(Tokens(vocabulary, texts), batch_size=4, num_workers=num_workers))
    found = next(batches)
    for batch in batches:
        share(vocabulary, immortal=immortal)
        found += batch
    assert found == expected


@free_threaded
def test_leaf_in_its_owners_queue_does_not_become_mortal_again():
    """Another thread dropped a reference that this one had counted, and this one has yet to merge the counts. Between
    that and the call no Python code runs here, which would merge them."""
    leaves = [float("0.5"), fresh("queued"), (float("1.5"),)]
    dropped = list(leaves)
    waiting, done = threading.Lock(), threading.Lock()
    waiting.acquire()
    done.acquire()

    def drop():
        waiting.acquire()
        dropped.clear()
        done.release()

    thread = threading.Thread(target=drop)
    thread.start()
    steps = itertools.chain(iter(waiting.release, None), iter(done.acquire, True), leaves)
    answers = list(map(_share.make_immortal, steps))
    thread.join()
    assert [_share.is_immortal(leaf) for leaf in leaves] == answers
    if sys.version_info < (3, 14):  # later ones may merge for an owner that waits
        assert not any(answers)
    share(leaves, immortal=True)
    gc.collect()
    assert all(map(_share.is_immortal, leaves))
    assert leaves == [0.5, "queued", (1.5,)]


@free_threaded
def test_references_taken_and_dropped_meanwhile_free_nothing(run_script):
    """Threads take and drop references to leaves while these become immortal, also such that the leaves wait in the
    owner's queue. Every leaf lives on, what is immortal stays so, and a second call adds what was refused."""
    run_script("""
        import gc
        import sys
        import threading

        from dataloader_rs import share
        from dataloader_rs._share import is_immortal

        for attempt in range(8):
            numbers = [float(n) + 0.5 for n in range(20_000)]
            words = ["".join(["w", str(n), "-", str(attempt)]) for n in range(20_000)]
            pairs = [(float(n) + 0.25,) for n in range(20_000)]
            table = [numbers, words, pairs]
            ready = threading.Barrier(4)
            stop = threading.Event()

            def drop(own):  # references that were counted locally, dropped by another thread
                ready.wait()
                for part in own:
                    part.clear()

            def read():  # references counted and dropped by another thread
                ready.wait()
                while not stop.is_set():
                    for part in table:
                        copied = part[::7]
                        del copied

            threads = [threading.Thread(target=drop, args=([list(part) for part in table],)),
                       threading.Thread(target=drop, args=([part[::-1] for part in table],)),
                       threading.Thread(target=read)]
            for thread in threads:
                thread.start()
            ready.wait()
            share(table, immortal=True)
            lasting = [leaf for part in table for leaf in part if is_immortal(leaf)]
            assert len(lasting) > 1000
            stop.set()
            for thread in threads:
                thread.join()
            for _ in range(2):
                gc.collect()
            assert all(map(is_immortal, lasting))
            assert numbers == [float(n) + 0.5 for n in range(20_000)]
            assert words == [f"w{n}-{attempt}" for n in range(20_000)]
            assert pairs == [(float(n) + 0.25,) for n in range(20_000)]
            share(table, immortal=True)
            for part in table:
                assert all(sys.getrefcount(leaf) > 2**30 and is_immortal(leaf) for leaf in part)
        """, timeout=60)


def test_process_that_shared_ends_cleanly(run_script):
    """With tables in globals, in threads, in cycles, and in a loader that is still running: nothing on stderr."""
    run_script("""
        import gc
        import threading

        from dataloader_rs import PyDataloader, PyDataset, share

        def made(name):
            table = {"".join([name, str(n)]): (n + 10**6, [str(n), float(n)], {n + 0.5}) for n in range(2000)}
            table["self"] = table
            return share(table, immortal=True)

        here = made("here")
        there = []
        threads = [threading.Thread(target=lambda n=n: there.append(made(f"there{n}"))) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        running = iter(PyDataloader(PyDataset.of([here, *there] * 50), num_workers=2))
        print(len(next(running)[0]))
        """)
