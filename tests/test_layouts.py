"""Draft layouts, and which drafts of one are accepted."""

import jax
import numpy as np
import pytest

from m2r2_jax.decoding import loop
from m2r2_jax.decoding.drafting import Layout, Proposal


@pytest.mark.parametrize(
    "parent", [(), (0,), (-1, 1), (-1, 0, 3), (-1, -1), (-1, 0, 2, 1), (-1, 0, -2)]
)
def test_layout_refuses_what_is_no_tree(parent):
    with pytest.raises(ValueError, match="not a tree"):
        Layout(parent)


@pytest.mark.parametrize("length", [0, -1])
def test_chain_without_drafts_is_refused(length):
    with pytest.raises(ValueError, match=f"draft length {length}"):
        Layout.chain(length)


def test_layout_of_a_chain_written_out():
    layout = Layout.chain(2)
    assert (layout.parent, layout.size) == ((-1, 0, 1), 3)
    assert Layout((-1,)).at_least(3) == layout == layout.at_least(2)
    assert layout.is_chain
    np.testing.assert_array_equal(layout.offset, [0, 1, 2])
    np.testing.assert_array_equal(layout.mask, np.tril(np.ones((3, 3))))
    np.testing.assert_array_equal(layout.path, [[0, 0, 0], [0, 1, 0], [0, 1, 2]])


def test_layout_of_a_tree_written_out():
    layout = Layout((-1, 0, 0, 2, 1))
    assert not layout.is_chain
    np.testing.assert_array_equal(layout.offset, [0, 1, 1, 2, 2])
    np.testing.assert_array_equal(
        layout.mask,
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 0, 1, 0, 0],
            [1, 0, 1, 1, 0],
            [1, 1, 0, 0, 1],
        ],
    )
    np.testing.assert_array_equal(layout.path[3], [0, 2, 3, 0, 0])
    np.testing.assert_array_equal(layout.path[4], [0, 1, 4, 0, 0])


def test_layouts_of_one_shape_are_one_key():
    """Drafters are static arguments: equal layouts must not compile twice."""
    assert hash(Layout.chain(3)) == hash(Layout((-1, 0, 1, 2)))
    assert Layout.chain(3) == Layout((-1, 0, 1, 2)) != Layout.chain(2)


jitted_accept = jax.jit(loop.accept, static_argnums=0)


def accept(layout, tokens, target, valid=None):
    tokens = np.array(tokens)
    valid = np.ones(tokens.shape, bool) if valid is None else np.array(valid, bool)
    best, depth = jitted_accept(layout, Proposal(tokens, valid), np.array(target))
    return best.tolist(), depth.tolist()


def test_accept_takes_the_agreeing_start_of_a_chain():
    tokens = [[9, 1, 2, 3]] * 4
    target = [[1, 2, 3, 4], [1, 2, 0, 4], [0, 2, 3, 4], [1, 0, 3, 4]]
    assert accept(Layout.chain(3), tokens, target) == ([3, 2, 0, 1], [3, 2, 0, 1])


def test_accept_stops_at_an_invalid_row():
    valid = [[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0]]
    result = accept(Layout.chain(3), [[9, 1, 2, 3]] * 3, [[1, 2, 3, 4]] * 3, valid)
    assert result == ([1, 0, 2], [1, 0, 2])


def test_accept_takes_the_deepest_path_of_a_tree():
    layout = Layout((-1, 0, 0, 1, 2, 4))
    tokens = [[9, 1, 2, 3, 4, 5]] * 4
    target = [
        [1, 3, 4, 0, 5, 0],  # The first child, then its child.
        [2, 3, 4, 0, 5, 0],  # The second child, down to the last row.
        [2, 3, 0, 0, 5, 0],  # The second child alone.
        [0, 3, 4, 0, 5, 0],  # Neither, though rows below them would agree.
    ]
    assert accept(layout, tokens, target) == ([3, 5, 2, 0], [2, 3, 1, 0])


def test_accept_takes_the_first_of_equally_deep_rows():
    layout = Layout((-1, 0, 0, 1, 2))
    tokens, target = [[9, 1, 1, 2, 2]], [[1, 2, 2, 0, 0]]
    assert accept(layout, tokens, target) == ([3], [2])
    assert accept(layout, tokens, target, [[1, 1, 1, 0, 1]]) == ([4], [2])


def test_accept_needs_no_draft():
    assert accept(Layout((-1,)), [[9], [9]], [[1], [2]]) == ([0, 0], [0, 0])
