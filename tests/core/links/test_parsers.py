"""Bytes from the store and the kernel, and offers from peers, are parsed or refused."""

from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sealring.core.links.addresses import interface_addresses, own_addresses, parse_if_inet6
from sealring.core.links.memory import parse_offer
from sealring.core.links.rendezvous import encode_addresses, parse_addresses
from sealring.errors import ConfigurationError, MalformedSetup


def is_plain(ip: IPv4Address | IPv6Address) -> bool:
    """Whether it is a worker's address in its shortest form."""
    mapped = isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None
    return not (mapped or ip.is_multicast or ip.is_unspecified)


ADDRESSES = st.lists(
    st.tuples(st.ip_addresses().filter(is_plain).map(str), st.integers(1, 65535)),
    min_size=1,
    max_size=8,
)


@given(ADDRESSES)
def test_addresses_survive(addresses: list[tuple[str, int]]) -> None:
    assert list(parse_addresses(encode_addresses(addresses).encode())) == addresses


@given(st.binary(max_size=1100))
@example(b"[" * 1024)
@pytest.mark.threat("W13")
def test_any_bytes(raw: bytes) -> None:
    with pytest.raises(MalformedSetup):
        parse_addresses(raw)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        [["127.0.0.1", 1]] * 9,
        [["127.0.0.1"]],
        [["127.0.0.1", 1, 2]],
        [["localhost", 1]],
        [["127.0.0.1", 0]],
        [["127.0.0.1", 65536]],
        [["127.0.0.1", True]],
        [["127.0.0.1", 1.0]],
        [["127.0.0.1", "1"]],
        [["127.1", 1]],
        [["fe80::1%lo", 1]],
        [["::", 1]],
        [["0.0.0.0", 1]],
        [["224.0.0.1", 1]],
        [["ff02::1", 1]],
        [[2130706433, 1]],
        [["127.0.0.1\u0000", 1]],
    ],
)
@pytest.mark.threat("S3")
def test_what_is_no_address(value: object) -> None:
    with pytest.raises(MalformedSetup):
        parse_addresses(json.dumps(value).encode())


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"socket": "0" * 64},
        {"token": "0" * 64},
        {"socket": "0" * 64, "token": "0" * 64, "more": 1},
        {"socket": "0" * 62, "token": "0" * 64},
        {"socket": "0" * 64, "token": "0" * 66},
        {"socket": "A" * 64, "token": "0" * 64},
        {"socket": "0" * 64, "token": "0" * 63 + "g"},
        {"socket": 1, "token": "0" * 64},
        {"socket": "0" * 64, "token": None},
    ],
)
def test_what_is_no_offer(value: object) -> None:
    with pytest.raises(MalformedSetup):
        parse_offer(value)


def test_where_to_listen() -> None:
    assert own_addresses({}) == ["127.0.0.1"]
    assert own_addresses({"MASTER_ADDR": "127.0.0.1"}) == ["127.0.0.1"]
    assert own_addresses({"MASTER_ADDR": "::1"}) == ["::1"]
    assert own_addresses({"SEALRING_ADDRESS": "0:0::1"}) == ["::1"]
    assert "127.0.0.1" in interface_addresses("lo")


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"SEALRING_ADDRESS": "none0"}, "an interface of this machine: lo"),
        ({"SEALRING_ADDRESS": "10.0.0"}, "set it to an IP address that peers"),
        ({"SEALRING_ADDRESS": "::"}, "give the one address that peers"),
        ({"SEALRING_ADDRESS": "0.0.0.0"}, "give the one address that peers"),
        ({"MASTER_ADDR": "no such host"}, "cannot be resolved"),
    ],
)
@pytest.mark.threat("S13")
def test_where_not_to_listen(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        own_addresses(environ)


def test_the_kernels_table_of_ipv6_addresses() -> None:
    table = (
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "20010db8000000000000000000000005 02 40 00 80     eth0\n"
        "20010db8000000000000000000000006 02 40 00 40     eth0\n"
    )
    assert parse_if_inet6(table, "eth0") == ["2001:db8::5"]
    assert parse_if_inet6(table, "lo") == ["::1"]
    assert parse_if_inet6("", "lo") == []
