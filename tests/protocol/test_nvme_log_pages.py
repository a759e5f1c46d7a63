"""Log pages and asynchronous events of an admin controller (NVMe Base 2.0 §5.2, §5.16)."""

import struct
import uuid
from dataclasses import replace

import pytest

from admin_entries import (
    ENABLE,
    FIRST,
    PLAIN,
    THIRD,
    data,
    enabled,
    entry,
    get_log,
    get_property,
    listening,
    result,
    set_feature,
    set_property,
    status,
)
from sealane.protocol.nvme import constants
from sealane.protocol.nvme.admin import AdminController
from sealane.protocol.nvme.constants import (
    AnaState,
    LogPage,
    Status,
)
from sealane.protocol.nvme.logs import Notification
from sealane.protocol.nvme.subsystem import (
    CommandFailure,
    Health,
    Namespace,
)

PAGES = {
    LogPage.SUPPORTED: 1024,
    LogPage.ERROR: 4096,
    LogPage.HEALTH: 512,
    LogPage.FIRMWARE_SLOT: 512,
    LogPage.CHANGED_NAMESPACES: 4096,
    LogPage.COMMAND_EFFECTS: 4096,
    LogPage.ANA: 16 + 16 * 36,
    LogPage.FEATURE_EFFECTS: 1024,
    LogPage.RESERVATION_NOTIFICATION: 64,
}


@pytest.mark.parametrize(("page", "size"), PAGES.items())
def test_log_pages_are_read_in_parts(plain: AdminController, page: int, size: int) -> None:
    whole = data(plain.handle(get_log(page, size, retain=True)))
    half = size // 8 * 4
    tail = data(plain.handle(get_log(page, size - half, offset=half, retain=True)))
    if page != LogPage.ERROR:
        assert whole[half:] == tail
    beyond = data(plain.handle(get_log(page, 8, offset=size, retain=True)))
    assert beyond == bytes(8)
    for refused in (
        get_log(page, 8, offset=2),
        get_log(page, 8, offset=size + 4),
        get_log(page, 8, offset=1 << 40),
        get_log(page, 8, last=1 << 23),
        get_log(page, 8, last=2 << 24),
        get_log(page, PLAIN.transfer_max + 4),
    ):
        assert status(plain.handle(refused)) == Status.INVALID_FIELD
    supported = data(plain.handle(get_log(0, 1024)))
    assert supported[page * 4] == 1


@pytest.mark.parametrize("page", PAGES)
def test_fields_that_mean_nothing_to_a_page_are_left_alone(
    plain: AdminController, page: int
) -> None:
    # The groups of the ANA log can be requested alone.
    specific = 0 if page == LogPage.ANA else 0x7F
    asked = get_log(page, 8, specific=specific, identifier=0xFFFF, last=0x7F, retain=True)
    assert data(plain.handle(asked)) == data(plain.handle(get_log(page, 8, retain=True)))


def test_unknown_log_pages_are_refused(plain: AdminController, admin: AdminController) -> None:
    for page in (0x06, 0x70, 0xC0):
        assert status(plain.handle(get_log(page, 64))) == Status.INVALID_LOG_PAGE
    for page in (LogPage.ANA, LogPage.RESERVATION_NOTIFICATION):
        assert status(admin.handle(get_log(page, 64))) == Status.INVALID_LOG_PAGE


class Figures:
    """Resources of a data path with some activity."""

    def __init__(self) -> None:
        self.failed = [CommandFailure(queue_id=1, command_id=8, status=0x80, lba=99, count=1)]
        self.aborted: list[tuple[int, int]] = []

    def health(self, nsid: int | None) -> Health:
        whole = Health(sectors_read=1001, sectors_written=2000, host_reads=7, busy_ms=120_000)
        return whole if nsid is None else Health(host_writes=nsid, power_on_ms=7_200_000)

    def failures(self) -> list[CommandFailure]:
        return list(self.failed)

    def abort(self, *, queue_id: int, command_id: int) -> bool:
        self.aborted.append((queue_id, command_id))
        return command_id == 5


def figure(page: bytes, place: int) -> int:
    return int.from_bytes(page[32 + 16 * place : 48 + 16 * place], "little")


def test_health_has_true_figures() -> None:
    controller = enabled(PLAIN, resources=Figures())
    page = data(controller.handle(get_log(0x02, 512, nsid=0xFFFF_FFFF)))
    assert [figure(page, place) for place in (0, 1, 2, 4)] == [2, 2, 7, 2]
    assert figure(page, 9) == 1  # error log entries
    one = data(controller.handle(get_log(0x02, 512, nsid=3)))
    assert (figure(one, 3), figure(one, 6)) == (3, 2)
    assert status(controller.handle(get_log(0x02, 512, nsid=2))) == Status.INVALID_NAMESPACE


def test_error_log_has_admin_and_io_failures_newest_first() -> None:
    figures = Figures()
    controller = enabled(PLAIN, resources=figures)
    controller.handle(entry(0x06, 0x55, cid=21, nsid=2))
    for _ in range(2):  # reading doesn't change the log
        page = data(controller.handle(get_log(0x01, 128)))
        newest, oldest = (struct.unpack_from("<QHHHHQI", page, at) for at in (0, 64))
        assert newest == (2, 1, 8, 0x100, 0xFFFF, 99, 0)
        assert oldest == (1, 0, 21, Status.INVALID_FIELD << 1, 0xFFFF, 0, 2)
    figures.failed.insert(0, CommandFailure(queue_id=1, command_id=9, status=0x80, count=2))
    page = data(controller.handle(get_log(0x01, 64)))
    assert struct.unpack_from("<QHH", page) == (3, 1, 9)


def test_failures_after_a_reset_are_logged_though_counted_anew() -> None:
    figures = Figures()
    controller = enabled(PLAIN, resources=figures)
    controller.handle(set_property(0x14, 0))
    figures.failed = [CommandFailure(queue_id=1, command_id=30, status=0x80, count=1)]
    controller.handle(set_property(0x14, ENABLE))
    page = data(controller.handle(get_log(0x01, 128)))
    assert [struct.unpack_from("<QHH", page, at) for at in (0, 64)] == [(2, 1, 30), (1, 1, 8)]


def test_error_log_is_bounded(plain: AdminController) -> None:
    for _ in range(70):
        plain.handle(entry(0xC5))
    page = data(plain.handle(get_log(0x01, 4096)))
    counts = [struct.unpack_from("<Q", page, at)[0] for at in range(0, 4096, 64)]
    assert counts == list(range(70, 6, -1))


def test_abort_reaches_the_queue_that_has_the_command() -> None:
    figures = Figures()
    controller = enabled(PLAIN, resources=figures)
    assert result(controller.handle(entry(0x08, 1 | 5 << 16, length=0))) == 0
    assert result(controller.handle(entry(0x08, 1 | 6 << 16, length=0))) == 1
    assert figures.aborted == [(1, 5), (1, 6)]


def test_aborting_an_event_request_completes_it(plain: AdminController) -> None:
    assert plain.handle(entry(0x0C, cid=40)) is None
    assert result(plain.handle(entry(0x08, 0 | 40 << 16, length=0))) == 0
    completed = plain.next_answer()
    assert status(completed) == Status.ABORTED
    assert completed is not None
    assert completed.command_id == 40
    assert plain.next_answer() is None
    assert result(plain.handle(entry(0x08, 0 | 40 << 16, length=0))) == 1


def test_command_effects_are_those_offered(plain: AdminController, admin: AdminController) -> None:
    every = data(plain.handle(get_log(0x05, 4096)))
    few = data(admin.handle(get_log(0x05, 4096)))
    offered = [code for code in range(256) if few[1024 + 4 * code]]
    assert offered == [0x00, 0x01, 0x02]
    assert (every[1024 + 4], every[1024 + 8], every[1024 + 4 * 0x05]) == (3, 1, 1)
    assert [code for code in range(256) if every[4 * code]] == [2, 6, 8, 9, 10, 12, 24]
    assert every[1024 + 4 * 0x81] == 0


def test_ana_log_has_a_group_per_namespace(plain: AdminController) -> None:
    lost = replace(THIRD, ana_state=AnaState.INACCESSIBLE)
    plain.update(replace(PLAIN, namespaces=(FIRST, lost)))
    page = data(plain.handle(get_log(0x0C, 88)))
    assert struct.unpack_from("<QH", page) == (1, 2)
    assert struct.unpack_from("<IIQB", page, 16) == (1, 1, 1, AnaState.OPTIMIZED)
    assert struct.unpack_from("<IIQB", page, 52) == (3, 1, 1, AnaState.INACCESSIBLE)
    assert struct.unpack_from("<I", page, 84)[0] == 3
    groups = data(plain.handle(get_log(0x0C, 80, specific=1)))
    assert struct.unpack_from("<IIQB", groups, 48) == (3, 0, 1, AnaState.INACCESSIBLE)


# Events


def test_event_requests_are_parked_up_to_their_limit(admin: AdminController) -> None:
    for cid in range(constants.EVENT_REQUESTS_MAX):
        assert admin.handle(entry(0x0C, cid=cid, length=0)) is None
    refused = admin.handle(entry(0x0C, cid=99, length=0))
    assert status(refused) == Status.EVENT_REQUESTS_EXCEEDED


def test_a_changed_namespace_is_reported_until_its_log_is_read(plain: AdminController) -> None:
    listening(plain, 50, 51)
    grown = replace(THIRD, block_count=4000)
    plain.update(replace(PLAIN, namespaces=(FIRST, grown)))
    reported = plain.next_answer()
    assert reported is not None
    assert (reported.command_id, result(reported)) == (50, 0x04_00_02)
    plain.update(replace(PLAIN, namespaces=(grown,)))
    assert plain.next_answer() is None  # masked
    retained = data(plain.handle(get_log(0x04, 4096, retain=True)))
    assert struct.unpack_from("<III", retained) == (1, 3, 0)
    assert plain.next_answer() is None
    data(plain.handle(get_log(0x04, 4096)))
    assert plain.next_answer() is None  # the read returned what was pending
    assert not any(data(plain.handle(get_log(0x04, 4096))))
    plain.update(PLAIN)
    again = plain.next_answer()
    assert again is not None
    assert again.command_id == 51


def test_hosts_that_ask_for_every_event_hear_of_what_there_is(plain: AdminController) -> None:
    # Critical warnings, firmware activation and telemetry with namespaces and ANA, as in SPDK.
    assert status(plain.handle(set_feature(0x0B, 0xFFFF_FFFF))) == 0
    assert result(plain.handle(entry(0x0A, 0x0B))) == 0x900
    plain.handle(entry(0x0C, cid=50, length=0))
    plain.update(replace(PLAIN, namespaces=(replace(FIRST, ana_state=AnaState.CHANGE), THIRD)))
    assert result(plain.next_answer()) == 0x0C_03_02


def test_an_id_that_is_used_again_gives_its_event_request_up(plain: AdminController) -> None:
    # At its shutdown, SPDK drops its requests and reuses their ids to read the configuration.
    listening(plain, 50, 51)
    read = bytearray(get_property(0x14, 0))
    struct.pack_into("<H", read, 2, 50)
    assert result(plain.handle(bytes(read))) == ENABLE
    plain.update(replace(PLAIN, namespaces=(FIRST,)))
    answers = [plain.next_answer(), plain.next_answer()]
    assert [each and each.command_id for each in answers] == [51, None]


def test_a_change_between_two_parts_of_a_page_is_heard_of(plain: AdminController) -> None:
    listening(plain, 50, 51)
    plain.update(replace(PLAIN, namespaces=(FIRST,)))
    assert plain.next_answer() is not None
    data(plain.handle(get_log(0x04, 2048, retain=True)))
    plain.update(PLAIN)
    data(plain.handle(get_log(0x04, 2048, offset=2048)))
    assert plain.next_answer() is not None


def test_access_changes_are_reported_beside_others(plain: AdminController) -> None:
    listening(plain, 50, 51)
    plain.update(replace(PLAIN, namespaces=(FIRST,)))
    plain.update(replace(PLAIN, namespaces=(replace(FIRST, ana_state=AnaState.CHANGE),)))
    results = [result(plain.next_answer()) for _ in range(2)]
    assert results == [0x04_00_02, 0x0C_03_02]


def test_events_wait_for_a_request_and_obey_the_configuration(plain: AdminController) -> None:
    plain.update(replace(PLAIN, namespaces=(FIRST,)))  # not configured: not even kept
    listening(plain, configuration=0x100)
    plain.update(replace(PLAIN, namespaces=()))
    assert plain.next_answer() is None
    plain.handle(entry(0x0C, cid=60, length=0))
    assert result(plain.next_answer()) == 0x04_00_02
    plain.handle(entry(0x0C, cid=61, length=0))
    assert plain.next_answer() is None


def test_too_many_changed_namespaces_are_all_of_them() -> None:
    shown = replace(PLAIN, nsid_max=2000)
    controller = enabled(shown)
    many = tuple(
        Namespace(nsid=nsid, namespace_uuid=uuid.UUID(int=nsid), block_count=1)
        for nsid in range(1, 1100)
    )
    controller.update(replace(shown, namespaces=many))
    page = data(controller.handle(get_log(0x04, 4096)))
    assert struct.unpack_from("<II", page) == (0xFFFF_FFFF, 0)


def test_reservation_notifications_are_read_one_by_one(plain: AdminController) -> None:
    plain.handle(entry(0x0C, cid=70, length=0))
    plain.handle(entry(0x0C, cid=71, length=0))
    assert status(plain.handle(set_feature(0x82, 1 << 2, nsid=3))) == 0
    plain.notify_reservation(3, Notification.RESERVATION_RELEASED)  # masked
    plain.notify_reservation(3, Notification.RESERVATION_PREEMPTED)
    plain.notify_reservation(1, Notification.RESERVATION_RELEASED)
    assert result(plain.next_answer()) == 0x80_00_06
    first = data(plain.handle(get_log(0x80, 64)))
    assert struct.unpack_from("<QBBHI", first) == (1, 3, 1, 0, 3)
    assert result(plain.next_answer()) == 0x80_00_06
    second = data(plain.handle(get_log(0x80, 64)))
    assert struct.unpack_from("<QBBHI", second) == (2, 2, 0, 0, 1)
    assert not any(data(plain.handle(get_log(0x80, 64))))
    assert status(plain.handle(set_feature(0x82, 1, nsid=3))) == Status.INVALID_FIELD
    assert status(plain.handle(set_feature(0x82, 2, nsid=2))) == Status.INVALID_NAMESPACE
    assert result(plain.handle(set_feature(0x82, 6, nsid=0xFFFF_FFFF))) == 0
    assert result(plain.handle(entry(0x0A, 0x82, nsid=1))) == 6


def test_reservation_notifications_are_bounded(plain: AdminController) -> None:
    for _ in range(constants.NOTIFICATIONS_MAX + 5):
        plain.notify_reservation(1, Notification.RESERVATION_RELEASED)
    first = data(plain.handle(get_log(0x80, 64)))
    assert struct.unpack_from("<QBB", first) == (6, 2, constants.NOTIFICATIONS_MAX - 1)


# Discovery controllers
