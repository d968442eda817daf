"""Hashes and proofs compared with RFC 6962's definitions and with published roots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.errors import ForkedLog, TamperedLog
from sealring.formats.log import tree
from sealring.formats.log.tree import Edge
from tests.codes import coded
from tests.record.statements import slow
from tests.record.statements.logs import numbered

# The inputs and roots of Certificate Transparency's own tests.
INPUTS = [
    bytes.fromhex(text)
    for text in (
        "", "00", "10", "2021", "3031", "40414243", "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]  # fmt: skip
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]

sizes = st.integers(1, 300)


def reader(entries: list[bytes]) -> tree.ReadSubtree:
    return lambda height, index: slow.mth(entries[index << height : index + 1 << height])


def test_published_roots() -> None:
    for size, expected in enumerate(ROOTS):
        entries = INPUTS[:size]
        edge = Edge()
        for entry in entries:
            edge.add(tree.leaf_hash(entry))
        found = {tree.tree_root(size, reader(entries)), edge.root(), slow.mth(entries)}
        assert found == {bytes.fromhex(expected)}


@given(sizes, st.data())
@settings(max_examples=60, deadline=None)
def test_proofs_are_those_of_the_definition_and_pass(size: int, data: st.DataObject) -> None:
    entries = numbered(size)
    root = slow.mth(entries)
    index = data.draw(st.integers(0, size - 1))
    inclusion = tree.inclusion_proof(index, size, reader(entries))
    assert inclusion == slow.path(index, entries)
    tree.check_inclusion(index, size, tree.leaf_hash(entries[index]), inclusion, root)
    old = data.draw(st.integers(1, size))
    consistency = tree.consistency_proof(old, size, reader(entries))
    assert consistency == slow.proof(old, entries)
    tree.check_consistency(old, slow.mth(entries[:old]), size, root, consistency)


@given(sizes, st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.threat("L3")
def test_a_changed_proof_or_another_place_does_not_pass(size: int, data: st.DataObject) -> None:
    entries = numbered(size)
    root = slow.mth(entries)
    index = data.draw(st.integers(0, size - 1))
    leaf = tree.leaf_hash(entries[index])
    proof = tree.inclusion_proof(index, size, reader(entries))
    wrong = [proof[:-1], [*proof, root], [*proof, proof[0]]] if proof else [[root]]
    if proof:
        at = data.draw(st.integers(0, len(proof) - 1))
        wrong.append([*proof[:at], bytes(32), *proof[at + 1 :]])
        wrong.append([*proof[:at], *proof[at + 1 :]])
    for hashes in wrong:
        with pytest.raises(TamperedLog, check=coded("log.not_included")):
            tree.check_inclusion(index, size, leaf, hashes, root)
    place = data.draw(st.integers(-1, size).filter(lambda other: other != index))
    with pytest.raises(TamperedLog, check=coded("log.not_included")):
        tree.check_inclusion(place, size, leaf, proof, root)
    with pytest.raises(TamperedLog, check=coded("log.not_included")):
        tree.check_inclusion(index, size, tree.leaf_hash(b"other"), proof, root)


@given(st.integers(2, 200), st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.threat("L2")
def test_no_proof_joins_two_logs_that_differ(size: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, size - 1))
    at = data.draw(st.integers(0, old - 1))
    entries = numbered(size)
    rewritten = [*entries[:at], b"rewritten", *entries[at + 1 :]]
    seen, root = slow.mth(entries[:old]), slow.mth(rewritten)
    for basis in (entries, rewritten):
        proof = tree.consistency_proof(old, size, reader(basis))
        with pytest.raises(ForkedLog):
            tree.check_consistency(old, seen, size, root, proof)
    honest = tree.consistency_proof(old, size, reader(entries))
    for hashes in ([], honest[:-1], [*honest, root], [bytes(32), *honest[1:]]):
        with pytest.raises(ForkedLog):
            tree.check_consistency(old, seen, size, slow.mth(entries), hashes)


def test_the_edges_of_consistency() -> None:
    root = slow.mth(numbered(5))
    tree.check_consistency(0, tree.EMPTY_ROOT, 5, root, [])
    tree.check_consistency(5, root, 5, root, [])
    tree.check_consistency(0, tree.EMPTY_ROOT, 0, tree.EMPTY_ROOT, [])
    for old, old_root, size, new_root, proof in (
        (0, tree.EMPTY_ROOT, 5, root, [root]),
        (0, root, 5, root, []),
        (5, bytes(32), 5, root, []),
        (5, root, 5, root, [root]),
        (6, root, 5, root, []),
        (0, tree.EMPTY_ROOT, 0, root, []),
        (2, slow.mth(numbered(2)), 5, root, [bytes(32)] * 64),
    ):
        with pytest.raises(ForkedLog):
            tree.check_consistency(old, old_root, size, new_root, proof)
