"""Counter-based random numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.core import NUM_PER_ROLE, Context, Lengths, Role, Stream, row_keys
from outrider.core.rng import UpcomingUniforms, as_uniform, fold, mix
from outrider.testing import chi2_p_value


def stream(seeds, requests, positions):
    return Stream(row_keys(seeds, requests, "cpu"), torch.tensor(positions))


def test_mix_is_the_finaliser_of_splitmix64():
    """First outputs of SplitMix64 seeded with 0, from its authors' code."""
    golden = -7046029254386353131
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = torch.stack([torch.tensor(golden), torch.tensor(golden) * 2, torch.tensor(golden) * 3])
    assert [x % 2**64 for x in mix(states).tolist()] == expected


@pytest.mark.parametrize("vary", ["seed", "request", "position", "number"])
@pytest.mark.parametrize("role", list(Role))
def test_numbers_are_uniform(vary, role):
    """Varies each part of the key. False-alarm probability 1e-6 per case."""
    n = 50_000
    numbers = list(range(n))
    match vary:
        case "seed":
            u = stream(numbers, [3] * n, [17] * n).uniform(role, 1)
        case "request":
            u = stream([3] * n, numbers, [17] * n).uniform(role, 1)
        case "position":
            u = stream([3] * n, [5] * n, numbers).uniform(role, 1)
        case "number":
            u = stream([3], [5], [17]).uniform(role, n)
    counts = torch.bincount((u.flatten() * 64).long(), minlength=64)
    assert chi2_p_value(counts, torch.ones(64)) > 1e-6


@pytest.mark.parametrize("vary", ["seed", "request", "position", "role"])
def test_neighbours_are_independent(vary):
    """Pairs (key, next key) fill the square evenly. False-alarm probability 1e-6 per case."""
    n = 50_000
    numbers, ones = list(range(n)), [1] * n
    roles = (Role.DRAFT, Role.DRAFT)
    first, second = [ones, ones, ones], [ones, ones, ones]
    if vary == "role":
        first = second = [ones, numbers, ones]
        roles = (Role.DRAFT, Role.ACCEPT)
    else:
        part = ["seed", "request", "position"].index(vary)
        first[part] = numbers
        second[part] = [x + 1 for x in numbers]
    u = stream(*first).uniform(roles[0], 1)[:, 0]
    v = stream(*second).uniform(roles[1], 1)[:, 0]
    cells = (u * 12).long() * 12 + (v * 12).long()
    assert chi2_p_value(torch.bincount(cells, minlength=144), torch.ones(144)) > 1e-6


def test_no_two_numbers_of_different_keys_collide():
    """160,000 keys. A fair generator of 52 bits collides with probability 3e-6."""
    grid = [(s, r, p) for s in range(20) for r in range(20) for p in range(20)]
    seeds, requests, positions = (list(part) for part in zip(*grid, strict=True))
    rows = stream(seeds, requests, positions)
    u = torch.cat([rows.uniform(role, 5) for role in Role], 1)
    assert len(u.unique()) == u.numel()


@given(st.integers(-(2**63), 2**64), st.integers(0, 2**64))
def test_any_whole_number_is_a_seed(seed, request_number):
    u = stream([seed], [request_number], [0]).uniform(Role.NEXT, 3)
    assert ((u >= 0) & (u < 1)).all()


def test_numbers_are_multiples_of_the_unit_below_one():
    u = stream([0], [0], [0]).uniform(Role.DRAFT, 100_000)
    units = u * 2.0**52
    assert (units == units.round()).all()
    assert float(u.max()) < 1
    assert float(u.min()) >= 0


def test_numbers_do_not_depend_on_the_batch():
    together = stream([7, 8, 9], [1, 2, 3], [10, 20, 30]).uniform(Role.ACCEPT, 6)
    for row in range(3):
        alone = stream([7 + row], [1 + row], [10 + 10 * row]).uniform(Role.ACCEPT, 6)
        assert (alone == together[row]).all()


def test_the_same_row_twice_is_the_same():
    u = stream([7, 7], [1, 1], [10, 10]).uniform(Role.ACCEPT, 6)
    assert (u[0] == u[1]).all()


@given(st.integers(0, 20), st.integers(1, 20))
def test_first_skips_numbers(first, num):
    rows = stream([7], [1], [10])
    assert (
        rows.uniform(Role.DRAFT, first + num)[:, first:] == (rows.uniform(Role.DRAFT, num, first))
    ).all()


def test_at_moves_the_position_only():
    here = stream([7], [1], [10])
    there = stream([7], [1], [11])
    assert (
        here.at(torch.tensor([11])).uniform(Role.NOISE, 4) == (there.uniform(Role.NOISE, 4))
    ).all()


def test_fold_depends_on_the_order_of_parts():
    key = torch.tensor(5)
    assert fold(fold(key, 1), 2) != fold(fold(key, 2), 1)
    assert fold(key, 3) == fold(key, torch.tensor(3))


@pytest.mark.parametrize("vary", ["child and parent", "number", "position", "row"])
def test_children_are_independent(vary):
    """Pairs of numbers from a child and from a related stream fill the square evenly.
    False-alarm probability 1e-6 per case."""
    n = 50_000
    numbers, ones = list(range(n)), [1] * n
    parent = stream(ones, numbers, ones)
    one = parent.child(0)
    other = {
        "child and parent": parent,
        "number": parent.child(1),
        "position": stream(ones, numbers, [2] * n).child(0),
        "row": stream(ones, [x + 1 for x in numbers], ones).child(0),
    }[vary]
    u, v = (s.uniform(Role.DRAFT, 1)[:, 0] for s in (one, other))
    counts = torch.bincount((u * 8).long() * 8 + (v * 8).long(), minlength=64)
    assert chi2_p_value(counts, torch.ones(64)) > 1e-6


@pytest.mark.parametrize(("num", "first"), [(1, 0), (5, 0), (3, 13), (2, 15), (40, 0), (3, 100)])
@pytest.mark.parametrize("role", list(Role))
def test_numbers_generated_together_are_those_of_their_keys(role, num, first):
    """In advance or not, by numpy or by torch: bit for bit the hash of their counter."""
    rows = stream([7, -8, 2**63], [1, 2, 3], [10, 0, 2**40])
    key_B1 = fold(rows.key_B, rows.position_B)[:, None]
    counter_J = torch.arange(first, first + num) + (int(role) << 40)
    assert torch.equal(rows.uniform(role, num, first), as_uniform(fold(key_B1, counter_J)))
    assert torch.equal(rows.bits(role, torch.arange(first, first + num)), fold(key_B1, counter_J))


def test_a_child_is_keyed_by_its_number():
    rows = stream([7, -8], [1, 2], [10, 0])
    for number in (0, 3):
        expected_B1 = rows.bits(Role.INNER, torch.tensor([number]))
        assert torch.equal(rows.child(number).key_B, expected_B1[:, 0])


def test_upcoming_numbers_are_those_of_their_positions():
    key_B = row_keys([1, 2, 3], [4, 5, 6], "cpu")
    coming = UpcomingUniforms(key_B, [7, 30, 2])
    assert coming.num_positions > 4
    for step in (0, 1, coming.num_positions - 1):
        for lengths in ([7 + step, 30, 2 + step], [7 + step, 30 + step, 2 + step]):
            assert coming.covers(lengths)
            wanted = Stream(key_B, torch.tensor(lengths)).uniforms_BJ
            for start, stop in ((0, 3 * NUM_PER_ROLE), (16, 21), (16, 21)):
                assert torch.equal(coming.at(lengths, start, stop), wanted[:, start:stop])
    assert not coming.covers([7, 30, 2 + coming.num_positions])
    assert not coming.covers([6, 30, 2])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_context_and_its_rows_alone_have_the_same_numbers(rows):
    """Also with upcoming numbers, when rows grow at different rates, leave and join."""
    generator = torch.Generator().manual_seed(rows)

    def context(first, num):
        prompts = [[1] * (1 + row % 5) for row in range(num)]
        return Context.start(prompts, None, range(first, first + num), range(num))

    def check(batch):
        plain = Stream(batch.key_B, batch.length_B)
        for role in (Role.DRAFT, Role.ACCEPT, Role.NEXT, Role.NOISE):
            for num in (1, 5, 20):
                assert torch.equal(batch.rng.uniform(role, num), plain.uniform(role, num))

    def grow(batch):
        emitted_BK = torch.zeros(batch.num_rows, 6, dtype=torch.int64)
        num_B = torch.randint(1, 7, (batch.num_rows,), generator=generator)
        batch.append(emitted_BK, Lengths.read(num_B))

    batch = context(0, rows)
    for _ in range(8):
        check(batch)
        grow(batch)
    batch.join(context(99, 2))
    check(batch)
    batch.keep(list(range(batch.num_rows))[1:])
    check(batch)
    grow(batch)
    check(batch)


def test_numbers_generated_on_the_host_are_the_same():
    """Those of more counters than are generated in advance; many are generated by the device."""
    here = Stream(row_keys([3, 4], [0, 1], "cpu"), torch.tensor([5, 9]))
    asked = []

    def on_host():
        asked.append(True)
        return here

    given = Stream(here.key_B, here.position_B, on_host=on_host)
    assert torch.equal(given.uniform(Role.DRAFT, 40), here.uniform(Role.DRAFT, 40))
    assert torch.equal(given.uniform(Role.NOISE, 2, 7), here.uniform(Role.NOISE, 2, 7))
    assert len(asked) == 2
    assert torch.equal(given.uniform(Role.DRAFT, 20_000), here.uniform(Role.DRAFT, 20_000))
    assert len(asked) == 2


def test_precomputed_numbers_are_used_first():
    given_BJ = torch.rand(2, 3 * NUM_PER_ROLE, dtype=torch.float64)
    there = stream([1, 2], [3, 4], [5, 6])
    given = Stream(there.key_B, there.position_B, precomputed=lambda a, b: given_BJ[:, a:b])
    assert torch.equal(given.uniform(Role.DRAFT, 4), given_BJ[:, :4])
    assert torch.equal(
        given.uniform(Role.NEXT, 2, 1), given_BJ[:, 2 * NUM_PER_ROLE + 1 : 2 * NUM_PER_ROLE + 3]
    )
    for role, num in ((Role.NOISE, 4), (Role.DRAFT, NUM_PER_ROLE + 1)):
        assert torch.equal(given.uniform(role, num), there.uniform(role, num))


def test_bits_do_not_depend_on_how_many_are_asked_for() -> None:
    """Few are generated by numpy, many by torch."""
    rng = Stream(row_keys([3, 4], [0, 7], "cpu"), torch.tensor([5, 11]))
    number_J = torch.arange(1 << 16)
    many_BJ = rng.bits(Role.NOISE, number_J.expand(2, -1))
    few_BJ = rng.bits(Role.NOISE, number_J[:300].expand(2, -1))
    assert torch.equal(many_BJ[:, :300], few_BJ)
