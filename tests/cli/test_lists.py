"""Every verb that lists: its forms, `--watch`, what it says when there is nothing; and names."""

import argparse
import asyncio
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from sealane.cli.ctl import command_line
from sealane.cli.output import FORMS, Output
from sealane.client import Client, Volume
from sealane.daemon.runtime.arguments import OneLineParser
from sealane.protocol.v1 import (
    broker_pb2,
    devices_pb2,
    offload_pb2,
    operator_pb2,
    sessions_pb2,
    subsystems_pb2,
    trust_pb2,
)

UUID = "3f2b1c00-0000-4000-8000-000000000001"


def answering(**answers: Any) -> SimpleNamespace:
    """Return a stub whose methods answer so, whatever is asked."""

    def method(answer: Any) -> Any:
        async def call(*_: Any, **__: Any) -> Any:
            return answer

        return call

    return SimpleNamespace(**{name: method(answer) for name, answer in answers.items()})


def volumes(*roles: str, found: bool) -> SimpleNamespace:
    volume = Volume(
        name=f"volumes/{UUID}",
        display_name="checkpoints",
        size_bytes=4096,
        target_node="t",
        state="available",
        mode="remote",
        freshness="tree",
        key_epoch=1,
        attachment=None,
    )
    descriptor = broker_pb2.VolumeDescriptor(volume_id=UUID, sector_count=1, key_epoch=1)
    registered = operator_pb2.ListRegisteredVolumesResponse(volumes=[descriptor] if found else [])
    return SimpleNamespace(
        volumes=answering(list=[volume] if found else []),
        operator=answering(ListRegisteredVolumes=registered),
        **vars(answering(status=SimpleNamespace(roles=roles))),
    )


def fabric_sessions(*, found: bool) -> SimpleNamespace:
    session = sessions_pb2.Session(
        name="sessions/1", display_name="s", state=sessions_pb2.Session.LISTENING
    )
    answer = sessions_pb2.ListSessionsResponse(sessions=[session] if found else [])
    return SimpleNamespace(sessions=answering(ListSessions=answer))


def devices(*, found: bool) -> SimpleNamespace:
    device = devices_pb2.Device(device_id=UUID, owner="t")
    answer = devices_pb2.ListDevicesResponse(devices=[device] if found else [])
    return SimpleNamespace(devices=answering(ListDevices=answer))


def nodes(*, found: bool) -> SimpleNamespace:
    member = trust_pb2.Member(
        node="t", role="target", call_address="192.0.2.7", addresses={"target": "192.0.2.7:4420"}
    )
    answer = trust_pb2.ListNodesResponse(nodes=[member] if found else [])
    return SimpleNamespace(membership=answering(ListNodes=answer))


def cards(*, found: bool) -> SimpleNamespace:
    card = offload_pb2.Accelerator(label="card")
    answer = offload_pb2.ListAcceleratorsResponse(accelerators=[card] if found else [])
    return SimpleNamespace(offload=answering(ListAccelerators=answer))


def subsystems(*, found: bool) -> SimpleNamespace:
    subsystem = subsystems_pb2.Subsystem(nqn="nqn.2026-11.example:data")
    answer = subsystems_pb2.ListSubsystemsResponse(subsystems=[subsystem] if found else [])
    return SimpleNamespace(subsystems=answering(ListSubsystems=answer))


def leases(*, found: bool) -> SimpleNamespace:
    lease = operator_pb2.LeaseEntry(broker_instance=1, start_epoch=2, lease_id=7, volume_id=UUID)
    answer = operator_pb2.ListLeasesResponse(leases=[lease] if found else [])
    return SimpleNamespace(operator=answering(ListLeases=answer))


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a verb lists: a client that has one of them or none, and how one is called."""

    client: Callable[..., SimpleNamespace]
    things: str
    name: str


def broker_volumes(*, found: bool) -> SimpleNamespace:
    return volumes("broker", found=found)


def gateway_volumes(*, found: bool) -> SimpleNamespace:
    return volumes("gateway", found=found)


LISTINGS = {
    "volume": Listing(client=gateway_volumes, things="volumes", name=f"volumes/{UUID}"),
    "volume at a broker": Listing(client=broker_volumes, things="volumes", name=f"volumes/{UUID}"),
    "session": Listing(client=fabric_sessions, things="sessions", name="sessions/1"),
    "device": Listing(client=devices, things="devices", name=UUID),
    "node": Listing(client=nodes, things="nodes", name="t"),
    "offload": Listing(client=cards, things="accelerator cards", name="card"),
    "subsystem": Listing(client=subsystems, things="subsystems", name="nqn.2026-11.example:data"),
    "lease": Listing(client=leases, things="leases", name="1/2/7"),
}
each_listing = pytest.mark.parametrize("noun", LISTINGS)


def verbs() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Yield every noun and verb of sealanectl that calls a daemon, with its parser."""
    for noun, parser in _choices(command_line()):
        # A noun's verbs are added when it is first used.
        cast("OneLineParser", parser).complete()
        for verb, of_verb in _choices(parser):
            cast("OneLineParser", of_verb).complete()
            if not of_verb.get_default("is_offline"):
                yield noun, verb, of_verb


def _choices(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def shown(noun: str, form: str, *, found: bool) -> str:
    """Return what `NOUN list` prints."""
    options = command_line().parse_args([noun.partition(" ")[0], "list"])
    file = io.StringIO()
    client = cast("Client", LISTINGS[noun].client(found=found))
    asyncio.run(options.run(client, options, Output(form, file)))
    return file.getvalue()


def test_the_table_has_every_verb_that_lists() -> None:
    listing = {noun for noun, verb, _ in verbs() if verb == "list"}
    assert {noun.partition(" ")[0] for noun in LISTINGS} == listing


@each_listing
@pytest.mark.parametrize("form", FORMS)
def test_one_thing_is_shown_in_each_form(noun: str, form: str) -> None:
    text, name = shown(noun, form, found=True), LISTINGS[noun].name
    if form in {"json", "yaml"}:
        (row,) = json.loads(text) if form == "json" else yaml.safe_load(text)
        assert isinstance(row, dict)
        return
    lines = text.splitlines()
    if form == "name":
        assert lines == [name]
    else:
        assert len(lines) == 2
        assert name in lines[1]


@each_listing
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_said_for_people_and_an_empty_list_for_programs(
    noun: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(noun, form, found=False)
    said = capsys.readouterr().err
    if form in {"json", "yaml"}:
        assert (text.strip(), said) == ("[]", "")
    elif form == "name":
        assert (text, said) == ("", "")
    else:
        assert (text, said) == ("", f"no {LISTINGS[noun].things}\n")


@each_listing
def test_a_list_can_be_watched(noun: str) -> None:
    options = command_line().parse_args([noun.partition(" ")[0], "list", "--watch", "3"])
    assert options.every == 3


def test_a_wide_list_of_nodes_says_where_they_are() -> None:
    assert "192.0.2.7" not in shown("node", "table", found=True)
    assert "192.0.2.7    target 192.0.2.7:4420" in shown("node", "wide", found=True)
    (row,) = json.loads(shown("node", "json", found=True))
    assert (row["called_from"], row["addresses"]) == ("192.0.2.7", {"target": "192.0.2.7:4420"})


IN_FULL = {
    # One name may begin another: `node revoke node-1` must not mean node-10.
    ("node", "node"),
    ("offload", "label"),
    # Only a policy lists them.
    ("key", "tenant"),
}
FILES = {"file", "path"}


def test_things_are_found_by_what_an_operator_calls_them_wherever_they_are_named() -> None:
    for noun, verb, parser in verbs():
        finds = parser.get_default("finds")
        for action in parser._get_positional_actions():
            if action.dest in FILES or (noun, action.dest) in IN_FULL:
                continue
            assert finds is not None, (noun, verb, action.dest)
            assert finds[0] == action.dest, (noun, verb)


@pytest.mark.parametrize("text", ["nqn.2026-11.example:data", "nqn.2026-11", "nqn."])
def test_a_subsystem_is_found_by_what_its_nqn_begins_with(text: str) -> None:
    options = command_line().parse_args(["subsystem", "get", text])
    _, find = options.finds
    client = subsystems(found=True)
    assert asyncio.run(find(client, text)) == "nqn.2026-11.example:data"
