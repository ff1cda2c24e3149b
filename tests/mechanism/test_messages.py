"""Others send a message of the expected kind, or there is a ClusterError."""

import pytest
import torch

from pyro_dp import ClusterError
from pyro_dp.mechanism import messages
from pyro_dp.mechanism.messages import Message
from pyro_dp.utils.torch_state import torch_states

LEDGER = ({"version": 1}, 1.5, 0, "run 1")
KNOWN = [
    messages.NoiseMultiplier(1.5),
    messages.CalibratedNoise(1.5),
    messages.Share(0.5),
    messages.Flag(True),
    messages.Seed(2**64 - 1),
    messages.Failure("ValueError."),
    messages.Settings({"num_steps": None, "sampling": "full", "secure": True, "bound": 1.0}),
    messages.Ledger(*LEDGER),
    messages.Start({"num_steps": 5}, torch_states(), LEDGER),
    messages.Shapes(["x", "y"], [(3, (2,), "torch.float32"), (3, (), "torch.int64")]),
]
# A field may be empty, or a text.
ALLOWED = {
    (messages.NoiseMultiplier, 0): (None,),
    (messages.Failure, 0): ("5",),
    (messages.Settings, 0): ({},),
    (messages.Ledger, 0): ({}, {"x": []}),  # the accountant that follows it checks the rest
    (messages.Ledger, 1): (None,),
    (messages.Ledger, 3): ("5",),
    (messages.Start, 0): ({},),
    (messages.Start, 1): ([],),
    (messages.Start, 2): (None,),
}


def read(known, said):
    """The message of the second of two."""
    return known.of_all(lambda own: [own, said], "rank")[1]


def test_each_kind_is_here():
    assert {type(each) for each in KNOWN} == set(Message.__subclasses__())


@pytest.mark.parametrize("known", KNOWN, ids=lambda each: type(each).__name__)
def test_a_packed_message_is_read(known):
    found = read(known, known.packed())
    assert type(found) is type(known) and found.packed() == known.packed()


@pytest.mark.parametrize("known", KNOWN, ids=lambda each: type(each).__name__)
def test_another_kind_is_not(known):
    """The message, and each of its fields, are replaced."""
    others = ["5", None, 10**400, -1, float("nan"), [], {}, (), [None], {"x": []}, torch.ones(2)]
    packed = known.packed()
    for other in others:
        with pytest.raises(ClusterError, match="message of rank 1 cannot be read"):
            read(known, other)
        for place in range(len(packed)):
            said = (*packed[:place], other, *packed[place + 1 :])
            allowed = ALLOWED.get((type(known), place), ())
            if any(type(other) is type(each) and other == each for each in allowed):
                continue
            with pytest.raises(ClusterError, match="message of rank 1 cannot be read"):
                read(known, said)


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (messages.Settings({}), ({"num_steps": [5]},)),
        (messages.Share(0.5), (1.5,)),
        (messages.Start({}, [], None), ({}, [torch.ones(5056)], None)),
        (messages.Start({}, [], None), ({}, [torch.ones(3, dtype=torch.uint8)], None)),
        (messages.Ledger(*LEDGER), ({}, 1.5, 0, "two\nlines")),
        (messages.Start({}, [], None), ({}, [], ({}, 1.5, 0))),
        (messages.Shapes([], []), (["x"], [])),
        (messages.Shapes([], []), (["x"], [(3, (2,), None)])),
        (messages.Shapes([], []), ([None], [(3, (2,), "int")])),
        (messages.Shapes([], []), (["x"], [(3, (-2,), "int")])),
        (messages.Shapes([], []), (["x"], [(10**400, (), "int")])),
        (messages.Shapes([], []), (["x"], [(3, [2], "int")])),
        (messages.Shapes([], []), (["x"], [3])),
    ],
)
def test_within_a_field(known, said):
    with pytest.raises(ClusterError, match="cannot be read"):
        read(known, said)
