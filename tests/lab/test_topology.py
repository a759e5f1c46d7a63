"""Topology files: permitted contents, and assignment of addresses."""

from pathlib import Path

import pytest

from labs import CLEAN, wan
from sealane.daemon.runtime.sections import load_section
from sealane.errors import UsageError
from sealane.lab.plan import hosts_file, plan
from sealane.lab.topology import Topology, check_name


def load(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "topology.toml"
    path.write_text(text)
    return load_section(Topology, path)


def test_the_way_back_is_the_way_there_but_for_what_it_says(tmp_path: Path) -> None:
    text = wan("long", "loss = 0.25\n[wan.backward]\nrate_bits_per_second = 1_000_000\nloss = 0.5")

    (link,) = load(tmp_path, text).wan

    assert (link.loss, link.backward.loss) == (0.25, 0.5)
    assert (link.rate_bits_per_second, link.backward.rate_bits_per_second) == (
        50_000_000,
        1_000_000,
    )
    assert link.backward.delay_micros == 5_000


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ("burst = { p = 0.1, r = 0.5 }", "loss = 0.5"),
        ("loss = 0.5", "burst = { p = 0.1, r = 0.5 }"),
    ],
)
def test_the_way_back_may_lose_packets_in_the_other_way(
    there: str, back: str, tmp_path: Path
) -> None:
    (link,) = load(tmp_path, wan("long", f"{there}\n[wan.backward]\n{back}")).wan

    assert (link.loss > 0) == (link.burst is None) == (there == "loss = 0.5")
    assert (link.backward.loss > 0) == (link.backward.burst is None) == (back == "loss = 0.5")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "wan: missing"),
        ("wan = []", "wan: found []"),
        ("mtu = 1000\n" + wan("x"), "mtu: found 1000; allowed: 1280…9000"),
        (wan("x", "lost = 0.1"), "wan.0.lost: unknown key; did you mean 'loss'?"),
        (wan("x", "loss = 1.5"), "wan.0.loss: found 1.5; allowed: a probability, 0…1"),
        (wan("x", "loss = '1'"), 'wan.0.loss: found "1"; allowed: a number'),
        (
            wan("x", "rate_bits_per_second = 5", link="delay_micros = 1\nbuffer_bytes = 2000\n"),
            "1000…",
        ),
        (wan("x", link="delay_micros = 1\nbuffer_bytes = 2000\n"), "rate_bits_per_second: missing"),
        (wan("an-interface-name"), "1…15 of a to z"),
        (wan("lo"), "but not 'lo'"),
        (wan("x", left="b"), "not b on both"),
        (wan("x", "loss = 0.1\nburst = {p = 0.1, r = 0.2}"), "only one of loss, burst"),
        (
            wan("x", "loss = 0.1\ntimed_bursts = {good_micros = 9, bad_micros = 1}"),
            "only one of loss, burst",
        ),
        (wan("x", "timed_bursts = {good_micros = 9, bad_micros = 0}"), "bad_micros"),
        (wan("x", "reorder = 0.1"), "both reorder and reorder_micros_max"),
        (wan("x", "red = {low_bytes = 2, high_bytes = 1}"), "low_bytes up to high_bytes"),
        (wan("x", "outages = [{start_seconds = 2.0, end_seconds = 1.0}]"), "less than end_seconds"),
        (
            wan("x", "outages = [{path = 1, start_seconds = 1, end_seconds = 2.0}]"),
            "paths 0…0, not of path 1",
        ),
        (
            wan(
                "x",
                "detours = [{path = 1, start_seconds = 1, end_seconds = 2.0, more_micros = 5}]",
            ),
            "detours of paths 0…0, not of path 1",
        ),
        (
            wan(
                "x",
                "detours = [{start_seconds = 1, end_seconds = 3.0, more_micros = 5}, "
                "{start_seconds = 2, end_seconds = 4.0, more_micros = 5}]",
            ),
            "detours of path 0 one after the other",
        ),
        (
            wan(
                "x",
                "detours = [{start_seconds = 1, end_seconds = 3.0, more_micros = 10_000_000}]",
                link=CLEAN.replace("50_000_000", "400_000_000_000"),
            ),
            "in transit; with this rate, delay and buffer it would be",
        ),
        (wan("x", "forward_to = '192.0.2.1:5'"), "a numeric loopback address:port"),
        (wan("x") + wan("x"), "names without duplicates"),
        (
            wan(
                "x", link=CLEAN.replace("50_000_000", "400_000_000_000").replace("5_000", "100_000")
            ),
            "in transit; with this rate, delay and buffer it would be 5016000000",
        ),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load(tmp_path, text)

    assert problem in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.reason.startswith("config.")


@pytest.mark.parametrize("name", ["", "UPPER", "with space", "lo", "sixteen-letters-"])
def test_a_lab_needs_a_name_that_can_be_one(name: str) -> None:
    with pytest.raises(UsageError, match="allowed: 1…15"):
        check_name(name)


def test_bursts_say_how_much_they_lose(tmp_path: Path) -> None:
    (link,) = load(tmp_path, wan("x", "burst = {p = 0.01, r = 0.04}")).wan

    assert link.burst is not None
    assert link.burst.loss == pytest.approx(0.2)


def test_packets_of_all_links_paths_and_ways_are_asked_for(tmp_path: Path) -> None:
    topology = load(tmp_path, wan("x", "paths = 3") + wan("y"))

    # 50 Mbit/s are 4166.7 packets of 1500 bytes: 3 + 1 of them, in both directions.
    assert topology.packets_per_second == 33_334


def test_addresses_are_each_given_once_and_hosts_know_their_peers(tmp_path: Path) -> None:
    topology = load(tmp_path, wan("x") + wan("y", right="c"))

    links = plan(topology)
    given = [address for link in links.values() for host in link for address in host.addresses]

    assert len(set(given)) == len(given) == 8
    assert [host.is_right for host in links["x"]] == [False, True]
    assert hosts_file(topology, "b").splitlines()[2:] == [
        "10.77.0.1 a.x a",
        "fd5e:a1a4:e::1 a.x a",
        "10.77.0.2 b.x b",
        "fd5e:a1a4:e::2 b.x b",
    ]
    assert "10.77.1.1 a.y" in hosts_file(topology, "a").splitlines()
