"""What an operator may call a thing, and the forms in which things are shown."""

import datetime as dt
import io
import json
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from sealane.cli.names import SHOWN_MAX, Thing, find_session, find_volume, meant
from sealane.cli.output import FORMS, Output
from sealane.client import Client
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import sessions_pb2

ONE = "volumes/3f2b1c00-0000-4000-8000-000000000001"
TWO = "volumes/3f2b1d00-0000-4000-8000-000000000002"
KNOWN = (Thing(ONE, "checkpoints"), Thing(TWO, "logs"), Thing("volumes/aaaa", "twin"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ONE, ONE),
        (ONE.removeprefix("volumes/"), ONE),
        ("3f2b1c", ONE),
        ("3f2b1d00-", TWO),
        ("checkpoints", ONE),
        ("aaaa", "volumes/aaaa"),
    ],
)
def test_a_thing_is_found_by_what_means_it_alone(text: str, name: str) -> None:
    assert meant(text, KNOWN, noun="volume") == name


@pytest.mark.parametrize("text", ["", "3f2", "checkpoint", "volumes/3f2b1c", "CHECKPOINTS"])
def test_what_means_nothing_is_exit_code_4(text: str) -> None:
    with pytest.raises(
        UnavailableError, match=r"no volume is called .* \[name\.not_found\]"
    ) as caught:
        meant(text, KNOWN, noun="volume")
    assert caught.value.exit_code == 4


def test_what_means_several_things_is_refused_with_their_names() -> None:
    with pytest.raises(UsageError) as caught:
        meant("3f2b", KNOWN, noun="volume")
    assert str(caught.value) == (
        f"'3f2b' may mean {ONE} (checkpoints), {TWO} (logs) [name.ambiguous]"
    )
    many = [Thing(f"volumes/{n}", "same") for n in range(SHOWN_MAX + 3)]
    with pytest.raises(UsageError, match="and 3 more"):
        meant("same", many, noun="volume")


def test_a_label_redirects_no_command() -> None:
    # Another's volume is labelled as the beginning of this one's id.
    things = (*KNOWN, Thing("volumes/bbbb", "3f2b1c00"))
    with pytest.raises(UsageError, match=r"name\.ambiguous"):
        meant("3f2b1c00", things, noun="volume")
    whole = ONE.removeprefix("volumes/")
    assert meant(whole, (*KNOWN, Thing("volumes/bbbb", whole)), noun="volume") == ONE


async def test_a_whole_name_is_not_looked_up() -> None:
    class NoClient:
        pass

    assert await find_volume(NoClient(), "volumes/anything") == "volumes/anything"  # type: ignore[arg-type]
    assert await find_volume(NoClient(), ONE.removeprefix("volumes/")) == ONE  # type: ignore[arg-type]


async def test_a_closed_session_leaves_its_name_to_the_next() -> None:
    def session(number: int, state: sessions_pb2.Session.State.ValueType) -> sessions_pb2.Session:
        return sessions_pb2.Session(name=f"sessions/{number}", display_name="s", state=state)

    class Listing:
        async def ListSessions(  # noqa: N802 - the name in gRPC
            self, _: sessions_pb2.ListSessionsRequest, **_options: float
        ) -> sessions_pb2.ListSessionsResponse:
            return sessions_pb2.ListSessionsResponse(sessions=known)

    client = cast("Client", SimpleNamespace(sessions=Listing()))
    closed, opened = sessions_pb2.Session.CLOSED, sessions_pb2.Session.ESTABLISHED
    known = [session(1, closed), session(2, opened)]
    assert await find_session(client, "s") == "sessions/2"
    known = [session(1, closed)]
    assert await find_session(client, "s") == "sessions/1"


def test_rounds_of_a_watch_are_documents_of_their_own() -> None:
    text = io.StringIO()
    output = Output("yaml", text)
    output.show_one({"name": 1})
    output.begin_again()
    output.show_one({"name": 2})
    assert [*yaml.safe_load_all(text.getvalue())] == [{"name": 1}, {"name": 2}]


ROWS = [
    {"name": ONE, "size": 4096, "made": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)},
    {"name": TWO, "size": 8192, "made": None},
]
TABLE = [{"name": row["name"], "size": f"{row['size']} B"} for row in ROWS]
WIDE = [{**row, "host": "h"} for row in TABLE]


def shown(form: str, *, one: bool = False) -> str:
    text = io.StringIO()
    output = Output(form, text)
    if one:
        output.show_one(ROWS[0], TABLE[0])
    else:
        output.show(ROWS, TABLE, wide=WIDE, things="volumes")
    return text.getvalue()


def test_each_form_shows_what_it_is_for() -> None:
    assert shown("name") == f"{ONE}\n{TWO}\n"
    assert shown("name", one=True) == f"{ONE}\n"
    assert shown("table").splitlines()[0].split() == ["name", "size"]
    assert shown("wide").splitlines()[0].split() == ["name", "size", "host"]
    data = json.loads(shown("json"))
    assert data == yaml.safe_load(shown("yaml"))
    assert data[0]["made"] == "2026-01-02T03:04:05+00:00"
    assert json.loads(shown("json", one=True)) == yaml.safe_load(shown("yaml", one=True))


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_list_says_so_where_a_person_reads(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Output(form).show([], things="volumes")
    said = capsys.readouterr()
    assert said.out == {"json": "[]\n", "yaml": "[]\n"}.get(form, "")
    assert said.err == ("no volumes\n" if form in {"table", "wide"} else "")
