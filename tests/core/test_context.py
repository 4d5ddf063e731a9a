"""Ragged contexts and prefixes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import Context, Draft, Lengths, Prefix, Stream
from outrider.testing import SoftmaxDistribution

token_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def contents(context):
    return [row[:n].tolist() for row, n in zip(context.tokens_BT, context.lengths, strict=True)]


@settings(deadline=None)
@given(
    st.lists(token_lists, min_size=1, max_size=4),
    st.lists(st.integers(1, 90), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_appending_is_list_extension(prompts, rounds, random):
    """Also past the capacity it starts with."""
    context = Context.start(prompts, SoftmaxDistribution(), [0] * len(prompts), range(len(prompts)))
    expected = [list(prompt) for prompt in prompts]
    for width in rounds:
        counts = [random.randint(1, width) for _ in prompts]
        emitted_BK = torch.randint(10, (len(prompts), width))
        context.append(emitted_BK, Lengths.of(counts))
        for row, tokens, count in zip(expected, emitted_BK.tolist(), counts, strict=True):
            row.extend(tokens[:count])
    assert contents(context) == expected
    assert context.length_B.tolist() == context.lengths
    assert context.root_B.tolist() == [row[-1] for row in expected]
    assert context.prompt_length_B.tolist() == [len(prompt) for prompt in prompts]


def test_rows_leave_and_enter():
    context = Context.start([[1], [2, 3], [4]], SoftmaxDistribution(), [5, 6, 7], [0, 1, 2])
    keys = context.key_B.tolist()
    context.keep([2, 1])
    other = Context.start([[8] * 300], SoftmaxDistribution(), [9], [3])
    context.join(other)
    assert contents(context) == [[4], [2, 3], [8] * 300]
    assert context.key_B.tolist() == [keys[2], keys[1], int(other.key_B)]
    assert context.prompt_length_B.tolist() == [1, 2, 300]


def test_rows_without_an_expected_output_join_rows_with_one():
    def rows(number, predictions):
        prompts, zeros = [[1]] * number, [0] * number
        return Context.start(prompts, SoftmaxDistribution(), zeros, zeros, predictions=predictions)

    for first, second, expected in (
        (rows(2, None), rows(1, [(4, 5)]), [(), (), (4, 5)]),
        (rows(1, [(4, 5)]), rows(2, None), [(4, 5), (), ()]),
        (rows(1, [(4,)]), rows(1, [(5,)]), [(4,), (5,)]),
        (rows(1, None), rows(1, None), None),
    ):
        first.join(second)
        assert first.predictions == expected


def test_random_numbers_are_keyed_by_the_roots_position():
    context = Context.start([[1, 2, 3]], SoftmaxDistribution(), [5], [6])
    assert (context.rng.position_B == 3).all()
    assert isinstance(context.rng, Stream)


def test_prefix_of_a_draft_is_each_nodes_path():
    context = Context.start([[7, 8], [9]], SoftmaxDistribution(), [0, 0], [0, 1])
    tokens_BN = torch.tensor([[8, 1, 2, 3], [9, 4, 5, 6]])
    parents_BN = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2]])
    draft = Draft(tokens_BN, parents_BN, torch.ones_like(tokens_BN).bool(), None, "chosen")
    prefix = Prefix.of_draft(context, draft)
    rows = [[prefix.row(b, m)[0].tolist() for m in range(4)] for b in range(2)]
    assert rows[0] == [[7, 8], [7, 8, 1], [7, 8, 2], [7, 8, 1, 3]]
    assert rows[1] == [[9], [9, 4], [9, 4, 5], [9, 4, 5, 6]]


def test_prefix_of_a_chain_is_all_of_it():
    context = Context.start([[7, 8]], SoftmaxDistribution(), [0], [0])
    prefix = Prefix.of_chain(context, [torch.tensor([3]), torch.tensor([4])])
    assert prefix.row(0, 0).tolist() == [[7, 8, 3, 4]]
