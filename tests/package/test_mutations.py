"""The mutations of every room can be made: each names one text of the package, and its tests."""

import mutate
import pytest


@pytest.mark.long
@pytest.mark.every_case
@pytest.mark.parametrize("room", mutate.rooms())
def test_every_mutation_has_its_place(room):
    for mutation in mutate.mutations(room):
        path, _ = mutate.place(mutation, mutate.ROOT)
        assert path.relative_to(mutate.ROOT).parts[1] == room, mutation.name
        assert mutate.test_files(mutation, mutate.TESTS)
        assert mutation.old != mutation.new


def test_no_name_twice():
    names = [each.name for room in mutate.rooms() for each in mutate.mutations(room)]
    assert len(names) == len(set(names)) > 250


def test_a_place_that_is_gone_is_told():
    gone = mutate.Mutation("gone", "ClippedSum.add", "no such text", "", "test_clipping.py")
    with pytest.raises(LookupError, match="gone: 0 places in ClippedSum.add"):
        mutate.place(gone, mutate.ROOT)
    lost = mutate.Mutation("lost", "ClippedSum.add", "rows", "", "test_nothing.py")
    with pytest.raises(LookupError, match="0 files test_nothing.py"):
        mutate.test_files(lost, mutate.TESTS)
    lost = mutate.Mutation("lost", "ClippedSum.add", "rows", "", "test_clipping.py::test_nothing")
    with pytest.raises(LookupError, match="no test test_clipping.py::test_nothing"):
        mutate.test_files(lost, mutate.TESTS)
