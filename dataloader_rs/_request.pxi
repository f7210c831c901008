# What the calling thread is, and what it is asked for.

from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint64_t


def current_worker():
    """The crew that the calling thread belongs to and its number there, or None if it is no worker of a crew."""
    cdef PyObject *crew = dlrs_get_current_crew()
    if crew == NULL:
        return None
    return <object>crew, dlrs_get_current_worker()


def current_request():
    """What a loader asks the calling thread for at this moment, or None if it is nothing.

    Returns
    -------
    tuple or None
        What kind of call it is (``ASKED_ITEM``, ``ASKED_MANY`` or ``ASKED_COLLATE``); the position in the epoch of the
        item, or of the first of many, or for ``collate_fn`` the number of the batch; how many items; a dict that lasts
        as long as the call, or as a run of calls for single items; the loader's rng_seed; the number of the epoch.
    """
    cdef dlrs_place *place = dlrs_get_place()
    cdef int64_t item = 0
    cdef _Epoch epoch
    if place == NULL or place.asked == DLRS_ASKED_NOTHING:
        return None
    if place.iterator != NULL:
        item = asked_position(<object>place.iterator, place.count)
        if item < 0:
            return None
    if place.generators == NULL:
        place.generators = new_reference({})
    epoch = <_Epoch>place.epoch
    return (place.asked, place.first + <uint64_t>item, place.count if place.iterator == NULL else 1,
            <object>place.generators, epoch.recipe.rng_seed, epoch.number)


ASKED_ITEM = DLRS_ASKED_ITEMS
ASKED_MANY = DLRS_ASKED_MANY
ASKED_COLLATE = DLRS_ASKED_COLLATE
