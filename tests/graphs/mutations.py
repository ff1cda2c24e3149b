"""What the tests of graphs must notice: see tests/mutate.py."""

from mutate import Mutation

MUTATIONS = [
    Mutation(
        "what is kept of a record stays",
        "CapturedState._put_back",
        "place.put_back(values)",
        "pass",
        "test_captured_state.py",
    ),
    Mutation(
        "tensors may be changed in place",
        "CapturedState._put_back",
        "if kept.changed:",
        "if False:",
        "test_captured_state.py test_structure_checks.py",
    ),
    Mutation(
        "what a model keeps of a record is not compared",
        "require_same_changes",
        "if not _alike(one.get(key, MISSING), other.get(key, MISSING)):",
        "if False:",
        "test_captured_state.py",
    ),
    Mutation(
        "random numbers within a graph",
        "trace",
        "if is_draw(node) and not draws:",
        "if False:",
        "test_tracing.py",
    ),
    Mutation(
        "a reshape between two transpositions",
        "_product",
        "if transposed or shape(before)[:1] != shape(node)[:1]:",
        "if shape(before)[:1] != shape(node)[:1]:",
        "test_outer_products.py",
    ),
    Mutation(
        "simplified although it is written to in place",
        "_share",
        "if is_draw(node) or memory.is_written(node, *node.all_input_nodes):",
        "if is_draw(node):",
        "test_simplify.py",
    ),
    Mutation(
        "a copy is skipped although it is written to later",
        "_skip_copies",
        "if _layout(before) == _layout(node) and not memory.is_written(node, before):",
        "if _layout(before) == _layout(node):",
        "test_simplify.py",
    ),
    Mutation(
        "a copy takes the place of memory that others see",
        "_copy_at_once",
        "fresh = made.target in _EMPTY and set(made.users) == {node}",
        "fresh = made.target in _EMPTY",
        "test_simplify.py",
    ),
    Mutation(
        "constants that are written to in place",
        "_fold_constants",
        "if not (fresh or derived) or is_draw(node) or memory.is_written(node):",
        "if not (fresh or derived) or is_draw(node):",
        "test_simplify.py",
    ),
    Mutation(
        "two draws of a graph are one",
        "_share",
        "if is_draw(node) or memory",
        "if memory",
        "test_simplify.py",
    ),
    Mutation(
        "a draw of a graph is a constant",
        "_fold_constants",
        "or is_draw(node) or memory",
        "or memory",
        "test_simplify.py",
    ),
    Mutation(
        "numbers of inputs are taken for constants",
        "constant_number",
        'node.op == "placeholder" or is_draw(node)',
        "False",
        "test_tracing.py",
    ),
    Mutation(
        "what was written through a view is taken for a constant",
        "constant_number",
        "            reached |= _ancestors(node)\n",
        "            pass\n",
        "test_tracing.py",
    ),
]
