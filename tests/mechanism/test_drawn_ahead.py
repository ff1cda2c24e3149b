"""Samples of several steps at once: each is used once, even if its step fails."""

import torch

from pyro_dp.mechanism.sampling import DrawnAhead


class Rows:
    """It replaces a column, and keeps the requests."""

    def __init__(self):
        self.held, self.passes, self.chosen = torch.empty(0), 0, None

    def hold(self, indices):
        self.held, self.passes = indices, self.passes + bool(len(indices))

    def choose(self, indices, places):
        self.chosen = indices, places


class Draws:
    """A sample for each call, never the same one."""

    def __init__(self):
        self.positions, self.generator = [], torch.Generator().manual_seed(0)

    def __call__(self, position):
        self.positions.append(position)
        return (torch.rand(50, generator=self.generator) < 0.3).nonzero().flatten()


def test_each_is_drawn_and_handed_out_once():
    rows, draw, positions = [Rows(), Rows()], Draws(), range(5, 12)
    ahead = DrawnAhead(3, rows)
    found = [ahead.sample(draw, p, left=12 - p).tolist() for p in positions]
    assert draw.positions == list(positions)  # none beyond the last step
    assert rows[0].passes == rows[1].passes == 3
    again = Draws()
    assert found == [again(p).tolist() for p in positions]


def test_the_rows_of_a_step_are_among_those_that_are_held():
    rows, draw = Rows(), Draws()
    ahead = DrawnAhead(4, [rows])
    for position in range(8):
        indices = ahead.sample(draw, position, None)
        chosen, places = rows.chosen
        assert torch.equal(chosen, indices) and torch.equal(rows.held[places], indices)
        assert torch.equal(rows.held, rows.held.unique())


def test_a_step_that_begins_again_draws_again():
    """And for those after it: nothing is used that was drawn for another try."""
    draw = Draws()
    ahead = DrawnAhead(3, [Rows()])
    first, again = (ahead.sample(draw, 0, None).tolist() for _ in range(2))
    assert draw.positions == [0, 1, 2] * 2 and first != again


def test_positions_that_others_took_are_left_out():
    draw = Draws()
    ahead = DrawnAhead(3, [Rows()])
    for position in (0, 2, 4):
        ahead.sample(draw, position, None)
    assert draw.positions == [0, 1, 2, 4, 5, 6]


def test_one_step_at_a_time():
    rows, draw = Rows(), Draws()
    assert len(DrawnAhead(1, [rows]).sample(draw, 7, None)) and draw.positions == [7]
    assert rows.passes == 0 and rows.chosen is None


def test_what_is_forgotten_is_drawn_again():
    rows, draw = Rows(), Draws()
    ahead = DrawnAhead(3, [rows])
    ahead.sample(draw, 0, None)
    ahead.forget()
    assert not len(rows.held)
    ahead.sample(draw, 1, None)
    assert draw.positions == [0, 1, 2, 1, 2, 3]


def test_a_pass_that_fails_leaves_nothing():
    draw, broken = Draws(), Rows()
    ahead = DrawnAhead(3, [broken])
    hold, broken.hold = broken.hold, lambda indices: hold(indices[: 1 // len(indices)])
    for _ in range(2):
        try:
            ahead.sample(draw, 0, None)
        except ZeroDivisionError:
            pass
    assert not ahead._samples
