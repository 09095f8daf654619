import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_weight_transports.cuda_ipc import IpcMemory
from roll_weight_transports.pool import Regions, aligned
from roll_weight_transports.shm import AnonymousMemory

KINDS = pytest.mark.parametrize("kind", [AnonymousMemory, IpcMemory])


def room_for(kind, *sizes):
    return Regions(kind.buffer_bytes(None, aligned(max(sizes))))


@KINDS
@given(sizes=st.lists(st.integers(0, 700 << 20), min_size=1, max_size=30), data=st.data())
def test_buckets_that_are_not_taken_keep_their_memory(kind, sizes, data):
    room = room_for(kind, *sizes)
    places, free = [], 0
    for size in sizes:
        free += data.draw(st.integers(0, len(places) - free))
        while (begin := room.take(size, free)) is None:
            assert free < len(places)  # with nothing under way there is room for each
            free += 1
        assert 0 <= begin <= begin + size <= room.num_bytes
        assert all(begin + size <= other or other + length <= begin for other, length in places[free:])
        places.append((begin, size))


def test_receivers_that_keep_up_are_sent_the_same_memory_again():
    room = room_for(AnonymousMemory, *[2 << 20] * 40)
    assert {room.take(2 << 20, max(0, number - 1)) for number in range(40)} == {0, 2 << 20}


def test_large_tensor_being_read_leaves_as_much_free_space():
    small = [2 << 20] * 60
    room = room_for(AnonymousMemory, 100 << 20, *small)
    assert room.take(100 << 20, 0) == 0
    fitting = 0
    while room.take(2 << 20, 0) is not None:
        fitting += 1
    assert fitting == 50
    assert room.take(2 << 20, 1) == 0


@pytest.mark.parametrize(("largest_mib", "room_mib"), [(100, 200), (256, 512), (400, 512), (600, 600)])
def test_device_has_space_for_two_buckets_or_the_largest_tensor(largest_mib, room_mib):
    assert room_for(IpcMemory, largest_mib << 20).num_bytes == room_mib << 20
