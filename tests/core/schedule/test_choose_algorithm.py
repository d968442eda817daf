"""Which algorithm each table chooses; a file that is no table is refused with what is wrong."""

from __future__ import annotations

import re

import pytest

from sealring.core.schedule import (
    ALGORITHMS,
    CALLED,
    Action,
    Algorithm,
    Operation,
    Selection,
    Topology,
    choose,
    passes_records_on,
    program_for,
)
from sealring.core.schedule.choose import everywhere, parse_fixed
from sealring.core.schedule.table import (
    OPERATIONS,
    AlgorithmTable,
    Placement,
    Row,
    format_table,
    parse_table,
    shipped_table,
)
from sealring.errors import ConfigurationError

RING, DIRECT, TREE = Algorithm.RING, Algorithm.DIRECT, Algorithm.TREE
ONE_HOST, TWO_HOSTS, OWN_HOSTS = Topology((0,) * 4), Topology((0, 0, 1, 1)), Topology((0, 1, 2, 3))
FILE = """
[measured]
by = "hand"

[[all_reduce]]
hosts = "one"
ranks = 2
up_to_bytes = [1000, 5000]
algorithms = ["direct", "tree", "ring"]

[[all_reduce]]
hosts = "one"
ranks = 8
up_to_bytes = []
algorithms = ["parameter_server"]

[[broadcast]]
hosts = "several"
ranks = 3
up_to_bytes = [0]
algorithms = ["direct", "hierarchical"]
"""


def test_a_row_is_for_its_worlds_and_sizes() -> None:
    table = parse_table(FILE, "mine.toml")
    for world in (1, 2, 3, 7):
        row = table.row(Operation.ALL_REDUCE, Placement.ONE, world)
        assert [row.at(size) for size in (0, 1000, 1001, 5000, 5001, 1 << 40)] == [
            DIRECT, DIRECT, TREE, TREE, RING, RING
        ]  # fmt: skip
    for world in (8, 9, 1000):
        assert table.row(Operation.ALL_REDUCE, Placement.ONE, world).algorithms == (
            Algorithm.PARAMETER_SERVER,
        )


@pytest.mark.parametrize(
    ("topology", "placement"),
    [
        (Topology((0,)), Placement.ONE),
        (ONE_HOST, Placement.ONE),
        (OWN_HOSTS, Placement.ONE_RANK_EACH),
        (TWO_HOSTS, Placement.SEVERAL),
        (Topology((0, 1, 1)), Placement.SEVERAL),
    ],
)
def test_the_topology_has_a_say(topology, placement) -> None:
    assert Placement.of(topology) is placement


def test_a_group_chooses_by_its_topology() -> None:
    mine = parse_table(FILE, "mine.toml").over(shipped_table())
    assert Selection(ONE_HOST, mine)(Operation.ALL_REDUCE, 2000) is TREE
    assert Selection(TWO_HOSTS, mine)(Operation.BROADCAST, 1) is Algorithm.HIERARCHICAL
    # The shipped table decides what the file does not list.
    for operation in Operation:
        for size in (0, 1 << 12, 1 << 20):
            same = Selection(OWN_HOSTS)(operation, size)
            assert Selection(OWN_HOSTS, mine)(operation, size) is same


def test_what_was_fixed_comes_before_the_table() -> None:
    selection = Selection(ONE_HOST, fixed={Operation.BROADCAST: TREE})
    assert {selection(Operation.BROADCAST, size) for size in (0, 1 << 10, 1 << 30)} == {TREE}
    assert selection(Operation.ALL_REDUCE, 100) is choose(Operation.ALL_REDUCE, 4, 100)


def test_a_table_can_be_fixed_to_an_algorithm() -> None:
    table = shipped_table().fixed_to({Operation.ALL_REDUCE: TREE, Operation.BARRIER: DIRECT})
    for topology in (ONE_HOST, TWO_HOSTS, OWN_HOSTS):
        own, fixed = Selection(topology), Selection(topology, table)
        assert {fixed(Operation.ALL_REDUCE, size) for size in (4, 1 << 30)} == {TREE}
        assert fixed(Operation.BROADCAST, 4096) is own(Operation.BROADCAST, 4096)
    again = AlgorithmTable(dict(reversed(list(table.rows.items()))))
    assert again == table
    assert hash(again) == hash(table)


def test_the_shipped_table_is_whole() -> None:
    rows = shipped_table().rows
    assert rows.keys() == {(op, place) for op in OPERATIONS.values() for place in Placement}
    for operation in Operation:
        for world in (1, 2, 3, 4, 5, 64, 1000):
            for topology in (Topology((0,) * world), Topology(tuple(range(world)))):
                for size in (0, 1, 4096, 1 << 25):
                    chosen = Selection(topology)(operation, size)
                    assert chosen in ALGORITHMS[operation]


LARGE = {
    "one host": Topology((0,) * 300),
    "one rank each": Topology(tuple(range(300))),
    "eight a host": Topology(tuple(rank // 8 for rank in range(512))),
    "hosts of all sizes": Topology(tuple(int(rank**0.5) for rank in range(300))),
}


@pytest.mark.parametrize("topology", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("wired", [False, True])
def test_what_is_chosen_in_a_large_world_needs_few_links(topology: Topology, wired: bool) -> None:
    """Covers all operations except those from one rank to every other, or from all to one."""
    selection, world = Selection(topology), len(topology.host_of)
    selection = selection.without_forwards() if wired else selection
    ranks = sorted({0, 1, 7, world // 2, world - 1})
    for operation in set(Operation) - {Operation.GATHER, Operation.SCATTER, Operation.ALL_TO_ALL}:
        for size in (0, 4096, 1 << 25):
            for rank in ranks:
                program = program_for(
                    operation, selection(operation, size), world, rank, topology=topology
                )
                assert len({peer for step in program.steps for peer in step.peers}) <= 64


def test_a_large_world_takes_other_programs_only_where_it_must() -> None:
    barriers = {
        world: Selection(Topology((0,) * world))(Operation.BARRIER, 0) for world in (2, 8, 9, 5000)
    }
    assert barriers == {2: DIRECT, 8: DIRECT, 9: TREE, 5000: TREE}
    for operation in OPERATIONS.values():
        for size in (0, 4096, 1 << 25):
            assert Selection(Topology((0,) * 65))(operation, size) is choose(operation, 65, size)
    mine = {
        (Operation.ALL_REDUCE, Placement.ONE): (
            Row(2, (4096,), (DIRECT, Algorithm.PARAMETER_SERVER)),
        ),
        (Operation.BROADCAST, Placement.ONE): (Row(2, (), (DIRECT,)),),
    }
    table, large = AlgorithmTable(mine).over(shipped_table()), Topology((0,) * 66)
    assert Selection(Topology((0,) * 65), table)(Operation.ALL_REDUCE, 100) is DIRECT
    assert Selection(large, table)(Operation.ALL_REDUCE, 100) is TREE
    assert Selection(large, table)(Operation.ALL_REDUCE, 1 << 25) is RING
    assert Selection(large, table)(Operation.BROADCAST, 1 << 25) is TREE
    fixed = Selection(large, fixed={Operation.ALL_REDUCE: DIRECT})
    assert fixed(Operation.ALL_REDUCE, 1 << 25) is DIRECT, "what was set by hand"


def test_a_file_comes_back_as_it_was_written() -> None:
    table = shipped_table()
    text = format_table(table, {"by": "a test"})
    assert parse_table(text, "again") == table
    assert parse_table(text, "again").digest() == table.digest()


def test_every_difference_changes_the_digest() -> None:
    key = Operation.ALL_REDUCE, Placement.ONE
    tables = [
        AlgorithmTable({}),
        *(
            AlgorithmTable({key: (row,)})
            for row in (
                Row(2, (), (RING,)),
                Row(2, (), (DIRECT,)),
                Row(3, (), (RING,)),
                Row(2, (1,), (DIRECT, RING)),
                Row(2, (2,), (DIRECT, RING)),
            )
        ),
        AlgorithmTable({(Operation.REDUCE, Placement.ONE): (Row(2, (), (RING,)),)}),
        AlgorithmTable({(Operation.ALL_REDUCE, Placement.SEVERAL): (Row(2, (), (RING,)),)}),
    ]
    digests = {table.digest() for table in tables}
    assert len(digests) == len(tables)
    assert all(0 <= digest < 1 << 48 for digest in digests)


ENTRY = """
[[all_reduce]]
hosts = "one"
ranks = 2
up_to_bytes = [10]
algorithms = ["direct", "ring"]
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[all_reduce", "mine.toml is not TOML"),
        ("[[barrier]]", "'barrier' is not an operation that has a choice; there is all_reduce"),
        ("all_reduce = 3", "all_reduce must be a list of entries"),
        ("[all_reduce]", "all_reduce must be a list of entries"),
        ("all_reduce = [1]", "all_reduce must be a list of entries"),
        (ENTRY + "more = 1", "entry 1 of all_reduce must have algorithms, hosts, ranks"),
        (ENTRY.replace('"one"', '"two"'), "hosts must be one of one, one_rank_each, several"),
        (ENTRY.replace('"one"', "[]"), "hosts must be one of one, one_rank_each, several"),
        (ENTRY.replace("= 2", "= 0"), "ranks must be a number from 1"),
        (ENTRY.replace("= 2", "= true"), "ranks must be a number from 1"),
        (ENTRY.replace("[10]", "10"), "up_to_bytes must be a list of numbers of bytes"),
        (ENTRY.replace("[10]", "[1.5]"), "up_to_bytes must be a list of numbers of bytes"),
        (ENTRY.replace("[10]", "[-1]"), "up_to_bytes must be a list of numbers of bytes"),
        (ENTRY.replace("[10]", "[10, 10]"), "up_to_bytes must rise"),
        (ENTRY.replace('"ring"', '"star"'), "algorithms must be some of ring, direct, tree"),
        (ENTRY.replace('"ring"', "3"), "algorithms must be some of ring, direct, tree"),
        (ENTRY.replace(', "ring"', ""), "1 limits in up_to_bytes need 2 algorithms, not 1"),
        (ENTRY + ENTRY, "entry 2 of all_reduce: ranks must rise"),
        (
            ENTRY.replace("all_reduce", "all_gather").replace('"ring"', '"tree"'),
            "algorithms must be some of ring, direct, hierarchical",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_what_is_wrong(text, problem) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)) as refused:
        parse_table(text, "mine.toml")
    assert "mine.toml" in str(refused.value)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_one_name_is_for_all_operations_that_have_it(algorithm) -> None:
    fixed = parse_fixed(algorithm.name.lower(), "NAME")
    assert fixed == everywhere(algorithm)
    for operation in CALLED:
        assert (fixed.get(operation) is algorithm) == (algorithm in ALGORITHMS[operation])
        chosen = choose(operation, 4, 1 << 20, algorithm)
        assert chosen is (fixed.get(operation) or choose(operation, 4, 1 << 20))


def test_operations_have_names_of_their_own() -> None:
    assert parse_fixed("all_reduce=ring, broadcast=tree", "NAME") == {
        Operation.ALL_REDUCE: RING,
        Operation.BROADCAST: TREE,
    }
    # A choice for one operation wins over the general choice, in either order.
    for text in ("ring,broadcast=tree", "broadcast=tree,ring"):
        assert parse_fixed(text, "NAME") == {**everywhere(RING), Operation.BROADCAST: TREE}


WORLDS = [
    (0,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 1), (0, 1, 0, 1), (0, 1, 0, 2, 1), (0,) * 9,
    tuple(range(9)), (0, 1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 2, 3, 4, 5),
    (5, 5, 1, 1, 1, 2), tuple(range(12)) + (11,) * 3, tuple(rank // 4 for rank in range(24)),
]  # fmt: skip


@pytest.mark.parametrize("hosts", WORLDS, ids=str)
def test_a_small_world_tells_whether_a_large_one_passes_records_on(hosts: tuple[int, ...]) -> None:
    topology, world = Topology(hosts), len(hosts)
    for operation, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            found = any(
                step.action is Action.FORWARD
                for rank in range(world)
                for step in program_for(operation, algorithm, world, rank, topology=topology).steps
            )
            assert passes_records_on(operation, algorithm, world, topology) is found


def test_no_barrier_is_hierarchical() -> None:
    """Selections without forwarding choose only programs that the operation has."""
    selection = Selection(LARGE["eight a host"]).without_forwards()
    for operation in Operation:
        for size in (0, 1 << 25):
            assert selection(operation, size) in ALGORITHMS[operation]
