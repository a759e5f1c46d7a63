"""The admin queue of a controller: every command, feature, log page and event."""

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admin_entries import (
    DISCOVERY,
    ENABLE,
    FIRST,
    HOST_ID,
    PLAIN,
    THIRD,
    VOLUME,
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
from sealane.protocol.nvme.authentication import AuthenticationError, Explanation
from sealane.protocol.nvme.constants import (
    Feature,
    LogPage,
    Status,
)
from sealane.protocol.nvme.properties import Transition
from sealane.protocol.nvme.subsystem import (
    Subsystem,
)


def test_controller_becomes_ready_when_enabled_and_stops_when_shut_down() -> None:
    controller = AdminController(VOLUME, controller_id=1, keep_alive_ms=0)
    assert status(controller.handle(entry(0x06, 1))) == Status.SEQUENCE_ERROR
    controller.handle(set_property(0x14, ENABLE))
    assert result(controller.handle(get_property(0x1C, 0))) == 1
    controller.handle(set_property(0x14, ENABLE | 0x4000))
    assert controller.take_transition() is Transition.SHUT_DOWN
    assert result(controller.handle(get_property(0x1C, 0))) == 9
    assert not controller.is_ready
    assert status(controller.handle(entry(0x06, 1))) == Status.SEQUENCE_ERROR


@pytest.mark.parametrize(
    "value",
    [0x0000_0001, 0x0045_0001, 0x0047_0001, ENABLE | 0x80, ENABLE | 0x800, ENABLE | 0x10],
)
def test_a_configuration_that_cannot_be_is_a_fatal_status(value: int) -> None:
    controller = AdminController(VOLUME, controller_id=1, keep_alive_ms=0)
    controller.handle(set_property(0x14, value))
    assert result(controller.handle(get_property(0x1C, 0))) == 2
    assert not controller.is_ready
    controller.handle(set_property(0x14, 0))
    controller.handle(set_property(0x14, ENABLE | 0x60))
    assert controller.is_ready


def test_reset_forgets_what_the_host_set(plain: AdminController) -> None:
    plain.handle(entry(0x09, Feature.NUMBER_OF_QUEUES, 0, length=0))
    plain.handle(entry(0x09, Feature.ASYNC_EVENT_CONFIGURATION, 0x100, length=0))
    plain.handle(entry(0x09, Feature.KEEP_ALIVE_TIMER, 9000, length=0))
    assert plain.handle(entry(0x0C, cid=9)) is None
    plain.handle(set_property(0x14, ENABLE & ~1))
    assert plain.take_transition() is Transition.RESET
    assert plain.take_transition() is Transition.NONE
    assert result(plain.handle(get_property(0x1C, 0))) == 0
    plain.handle(set_property(0x14, ENABLE))
    assert plain.queue_count == constants.QUEUE_COUNT_MAX
    assert plain.keep_alive_ms == 2000
    plain.update(replace(PLAIN, namespaces=(FIRST,)))
    assert plain.next_answer() is None
    assert status(plain.handle(entry(0x18, cid=9, length=0))) == 0


def test_properties(admin: AdminController) -> None:
    assert result(admin.handle(get_property(0x08, 0))) == 0x20000
    assert result(admin.handle(get_property(0x00, 1))) & 0xFFFF == constants.QUEUE_DEPTH_MAX - 1
    assert result(admin.handle(get_property(0x14, 0))) == ENABLE
    for refused in (get_property(0x00, 0), get_property(0x99, 0), set_property(0x1C, 1)):
        assert status(admin.handle(refused)) == Status.INVALID_FIELD


# Commands in general


def test_what_is_not_offered_is_said_so(admin: AdminController) -> None:
    for opcode in (0x00, 0x0D, 0x10, 0x80, 0x84):
        answer = admin.handle(entry(opcode))
        assert status(answer) == Status.INVALID_OPCODE
        assert answer is not None
        assert struct.unpack_from("<H", answer.completion, 14)[0] >> 1 & constants.DO_NOT_RETRY
    assert status(admin.handle(entry(0x18, length=0))) == 0


@pytest.mark.parametrize("flags", [0x00, 0x80, 0xC0, 0x41, 0x42])
def test_prps_and_fused_commands_are_refused(admin: AdminController, flags: int) -> None:
    assert status(admin.handle(entry(0x18, flags=flags))) == Status.INVALID_FIELD


def test_the_queue_head_turns_at_the_queue_size() -> None:
    controller = enabled(VOLUME, queue_size=3)
    heads = []
    for _ in range(4):
        answer = controller.handle(entry(0x18, length=0))
        assert answer is not None
        heads.append(struct.unpack_from("<H", answer.completion, 8)[0])
    assert heads == [0, 1, 2, 0]
    silent = enabled(VOLUME, flow_control=False).handle(entry(0x18, length=0))
    assert silent is not None
    assert struct.unpack_from("<H", silent.completion, 8)[0] == 0xFFFF


@given(raw=st.binary(min_size=64, max_size=64), shown=st.sampled_from([VOLUME, PLAIN, DISCOVERY]))
def test_any_admin_entry_gets_an_answer_or_is_parked(raw: bytes, shown: Subsystem) -> None:
    controller = enabled(shown)
    answer = controller.handle(raw)
    assert answer is None or len(answer.completion) == constants.COMPLETION_BYTES


@given(
    opcode=st.sampled_from([0x02, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18]),
    words=st.lists(st.integers(0, 0xFFFF_FFFF) | st.integers(0, 0x90), max_size=6),
    nsid=st.integers(0, 4) | st.just(0xFFFF_FFFF),
)
def test_any_known_command_gets_an_answer_no_longer_than_asked(
    opcode: int, words: list[int], nsid: int
) -> None:
    answer = enabled(PLAIN).handle(entry(opcode, *words, nsid=nsid, length=4096))
    assert answer is None or len(answer.data) <= 4096


# Identify


def test_controller_says_what_is_offered(plain: AdminController, admin: AdminController) -> None:
    shown = data(plain.handle(entry(0x06, 1)))
    assert shown[111] == 1
    assert shown[76] == 0x0B  # ports, controllers, ANA
    assert shown[77] == 5  # 32 pages
    events, attributes = struct.unpack_from("<II", shown, 92)
    assert events == 1 << 8 | 1 << 11
    assert attributes & 0x41 == 0x41
    assert (shown[258], shown[259], shown[262]) == (3, 3, 63)
    count, optional, fused = struct.unpack_from("<IHH", shown, 516)
    assert (count, optional, fused) == (16, 0b1011_1101, 1)
    assert struct.unpack_from("<H", shown, 532)[0] == 7
    assert struct.unpack_from("<IIII", shown, 1792)[:2] == ((64 + 8192) // 16, 1)
    assert int.from_bytes(shown[280:296], "little") == 4000 * 4096
    single = data(admin.handle(entry(0x06, 1)))
    assert single[76] == single[343] == 0
    assert struct.unpack_from("<IHH", single, 516) == (1, 1 << 4, 0)


def test_namespaces_are_identified_each(plain: AdminController) -> None:
    shown = data(plain.handle(entry(0x06, 0, nsid=3)))
    assert struct.unpack_from("<QQQ", shown) == (3000, 3000, 3000)
    assert (shown[30], shown[31], shown[33]) == (1, 0xFE, 0x09)
    assert struct.unpack_from("<I", shown, 92)[0] == 3
    assert shown[104:120] == THIRD.namespace_uuid.bytes
    assert struct.unpack_from("<HBB", shown, 128) == (0, 12, 0)
    assert data(plain.handle(entry(0x06, 0, nsid=1)))[120:128] == FIRST.eui64
    for structure in (0x00, 0x05, 0x08):
        assert not any(data(plain.handle(entry(0x06, structure, nsid=2))))  # inactive
        for nsid in (0, 17, 0xFFFF_FFFF):
            refused = plain.handle(entry(0x06, structure, nsid=nsid))
            assert status(refused) == Status.INVALID_NAMESPACE
    assert data(plain.handle(entry(0x06, 8, nsid=3)))[14] == 1


def test_secure_namespaces_carry_metadata(admin: AdminController) -> None:
    shown = data(admin.handle(entry(0x06, 0, nsid=1)))
    assert (shown[26], shown[27], shown[30], shown[31]) == (0x10, 1, 0, 0)
    assert struct.unpack_from("<HB", shown, 128) == (64, 12)


@pytest.mark.parametrize("structure", [0x02, 0x07])
def test_active_namespaces_follow_an_id(plain: AdminController, structure: int) -> None:
    listed = data(plain.handle(entry(0x06, structure)))
    assert struct.unpack_from("<III", listed) == (1, 3, 0)
    assert struct.unpack_from("<II", data(plain.handle(entry(0x06, structure, nsid=1)))) == (3, 0)
    refused = plain.handle(entry(0x06, structure, nsid=0xFFFF_FFFE))
    assert status(refused) == Status.INVALID_NAMESPACE


def test_descriptors_have_every_name(plain: AdminController) -> None:
    described = data(plain.handle(entry(0x06, 3, nsid=1)))
    name = FIRST.namespace_uuid.bytes
    assert described.startswith(
        bytes([1, 8, 0, 0])
        + FIRST.eui64
        + bytes([2, 16, 0, 0])
        + name
        + bytes([3, 16, 0, 0])
        + name
        + bytes([4, 1, 0, 0, 0])
    )
    assert data(plain.handle(entry(0x06, 3, nsid=3)))[0] == 2  # no EUI64
    assert status(plain.handle(entry(0x06, 3, nsid=2))) == Status.INVALID_NAMESPACE


def test_command_sets(plain: AdminController) -> None:
    assert data(plain.handle(entry(0x06, 0x1C | 0xFFFF << 16)))[:9] == b"\x01" + bytes(8)
    assert data(plain.handle(entry(0x06, 0x06)))[:2] == bytes([16, 16])
    assert status(plain.handle(entry(0x06, 0x1C | 5 << 16))) == Status.INVALID_FIELD
    assert status(plain.handle(entry(0x06, 0x06, 2 << 24))) == Status.INVALID_FIELD
    assert status(plain.handle(entry(0x06, 0x55))) == Status.INVALID_FIELD


def test_answers_that_do_not_fit_are_refused(plain: AdminController) -> None:
    assert status(plain.handle(entry(0x06, 1, length=4095))) == Status.SGL_LENGTH_INVALID
    assert status(plain.handle(entry(0x06, 1, sgl=0x01))) == Status.SGL_TYPE_INVALID


# Features


def test_the_number_of_queues_is_negotiated_before_there_are_any(plain: AdminController) -> None:
    assert result(plain.handle(set_feature(0x07, 3 | 1 << 16))) == 1 | 1 << 16
    assert plain.queue_count == 2
    assert result(plain.handle(entry(0x0A, 0x07))) == 1 | 1 << 16
    assert status(plain.handle(set_feature(0x07, 0xFFFF))) == Status.INVALID_FIELD
    assert status(plain.handle(set_feature(0x07, 0xFFFF << 16))) == Status.INVALID_FIELD
    plain.set_io_queues(connected=True)
    assert status(plain.handle(set_feature(0x07, 0))) == Status.SEQUENCE_ERROR


def test_the_keep_alive_time_out_is_rounded_up(plain: AdminController) -> None:
    assert result(plain.handle(entry(0x0A, 0x0F))) == 2000
    assert result(plain.handle(set_feature(0x0F, 2001))) == 0
    assert plain.keep_alive_ms == result(plain.handle(entry(0x0A, 0x0F))) == 3000


@pytest.mark.parametrize(
    ("feature", "value", "refused"),
    [
        (Feature.ARBITRATION, 7, None),
        (Feature.POWER_MANAGEMENT, 0, 1),
        (Feature.ERROR_RECOVERY, 0xFFFF, 0x1_0000),
        (Feature.WRITE_ATOMICITY, 1, 2),
        (Feature.ASYNC_EVENT_CONFIGURATION, 0x900, None),
        (Feature.COMMAND_SET_PROFILE, 0, 1),
    ],
)
def test_features_are_set_and_got(
    plain: AdminController, feature: int, value: int, refused: int | None
) -> None:
    default = result(plain.handle(entry(0x0A, feature)))
    assert result(plain.handle(set_feature(feature, value))) == 0
    if refused is not None:
        assert status(plain.handle(set_feature(feature, refused))) == Status.INVALID_FIELD
    assert result(plain.handle(entry(0x0A, feature))) == value
    for selector in (1, 2):
        assert result(plain.handle(entry(0x0A, feature | selector << 8))) == default
    assert result(plain.handle(entry(0x0A, feature | 3 << 8))) & 4
    assert status(plain.handle(entry(0x0A, feature | 4 << 8))) == Status.INVALID_FIELD
    saved = set_feature(feature | 1 << 31, value)
    assert status(plain.handle(saved)) == Status.FEATURE_NOT_SAVEABLE
    of_namespace = set_feature(feature, value, nsid=1)
    assert status(plain.handle(of_namespace)) == Status.FEATURE_NOT_NAMESPACE_SPECIFIC


def test_temperature_thresholds_are_kept_apart(plain: AdminController) -> None:
    over, under = 0, 0x10_0000
    assert result(plain.handle(entry(0x0A, 0x04, over))) == 0xFFFF
    assert result(plain.handle(entry(0x0A, 0x04, under))) == 0
    plain.handle(set_feature(0x04, under | 300))
    assert result(plain.handle(entry(0x0A, 0x04, under))) == 300
    assert result(plain.handle(entry(0x0A, 0x04, over))) == 0xFFFF


def test_what_cannot_be_changed_can_be_set_to_what_it_is(plain: AdminController) -> None:
    assert status(plain.handle(set_feature(0x06, 1))) == 0
    assert result(plain.handle(entry(0x0A, 0x06))) == 1


@pytest.mark.parametrize("feature", [0x06, 0x81])
def test_what_cannot_be_changed_is_said_so(plain: AdminController, feature: int) -> None:
    assert status(plain.handle(set_feature(feature))) == Status.FEATURE_NOT_CHANGEABLE
    assert result(plain.handle(entry(0x0A, feature | 3 << 8))) == 0


def test_unknown_features_are_refused(plain: AdminController, admin: AdminController) -> None:
    for feature in (0x00, 0x03, 0x08, 0x84, 0xFF):
        assert status(plain.handle(set_feature(feature))) == Status.INVALID_FIELD
        assert status(plain.handle(entry(0x0A, feature))) == Status.INVALID_FIELD
    assert status(admin.handle(entry(0x0A, 0x82, nsid=1))) == Status.INVALID_FIELD


def test_host_identifier_is_the_one_of_connect(plain: AdminController) -> None:
    assert data(plain.handle(entry(0x0A, 0x81, 1))) == HOST_ID
    assert status(plain.handle(entry(0x0A, 0x81, 0))) == Status.INVALID_FIELD


def test_host_behaviour_takes_its_data_from_the_capsule(plain: AdminController) -> None:
    behaviour = bytes([1]) + bytes(511)
    sent = entry(0x09, 0x16, length=512, sgl=0x01)
    assert status(plain.handle(sent, behaviour)) == 0
    assert data(plain.handle(entry(0x0A, 0x16))) == behaviour
    assert data(plain.handle(entry(0x0A, 0x16 | 1 << 8))) == bytes(512)
    assert status(plain.handle(sent, behaviour[1:])) == Status.SGL_LENGTH_INVALID
    elsewhere = entry(0x09, 0x16, length=512)
    assert status(plain.handle(elsewhere, behaviour)) == Status.SGL_TYPE_INVALID


# Log pages


def test_discovery_controllers_offer_their_log_and_little_else() -> None:
    controller = enabled(DISCOVERY)
    shown = data(controller.handle(entry(0x06, 1)))
    assert (shown[111], shown[1806]) == (2, 1)
    assert struct.unpack_from("<I", shown, 92)[0] == 1 << 31
    assert struct.unpack_from("<I", shown, 516)[0] == 0
    assert status(controller.handle(entry(0x06, 2))) == Status.INVALID_FIELD
    assert status(controller.handle(entry(0x08, 1))) == Status.INVALID_OPCODE
    for page in (LogPage.HEALTH, LogPage.ANA, LogPage.CHANGED_NAMESPACES):
        assert status(controller.handle(get_log(page, 64))) == Status.INVALID_LOG_PAGE
    assert status(controller.handle(set_feature(0x07, 0))) == Status.INVALID_FIELD
    assert status(controller.handle(set_feature(0x0F, 30_000))) == 0


def test_a_changed_discovery_log_is_reported() -> None:
    controller = enabled(DISCOVERY)
    controller.set_discovery_log(b"one" * 400)
    listening(controller, 80, configuration=1 << 31)
    controller.set_discovery_log(b"one" * 400)
    assert controller.next_answer() is None
    controller.set_discovery_log(b"two" * 400)
    assert result(controller.next_answer()) == 0x70_F0_02
    assert data(controller.handle(get_log(0x70, 8)))[:6] == b"twotwo"


# In-band authentication


class Challenge:
    """A state machine that succeeds after one message."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.is_authenticated = False
        self.has_failed = False
        self.has_message = True

    def send(self, data: bytes) -> None:
        self.heard.append(data)
        self.is_authenticated = data == b"secret"
        self.has_failed = not self.is_authenticated
        if self.has_failed:
            raise AuthenticationError(Explanation.FAILED, "wrong")

    def receive(self, length: int) -> bytes:
        self.has_message = False
        return b"challenge"[:length]


def authentication(kind: int, length: int, **more: int) -> bytes:
    made = bytearray(entry(0x7F, nsid=kind, length=length, **more))
    made[41:44] = b"\x01\x01\xe9"
    struct.pack_into("<I", made, 44, length)
    return bytes(made)


@pytest.mark.parametrize(
    "make",
    [lambda: entry(0x06, 1), lambda: get_property(0, 1), lambda: set_property(0x14, ENABLE)],
)
def test_nothing_is_executed_before_authentication(make: Callable[[], bytes]) -> None:
    controller = AdminController(
        VOLUME, controller_id=1, keep_alive_ms=0, authentication=Challenge()
    )
    assert status(controller.handle(make())) == Status.AUTHENTICATION_REQUIRED
    assert not controller.is_authenticated
    assert data(controller.handle(authentication(6, 4096))) == b"challenge"
    sent = authentication(5, 6, sgl=0x01)
    assert status(controller.handle(sent, b"secret")) == 0
    assert controller.is_authenticated
    assert status(controller.handle(set_property(0x14, ENABLE))) == 0
    assert status(controller.handle(make())) == 0


def test_malformed_authentication_commands_are_refused() -> None:
    machine = Challenge()
    controller = AdminController(VOLUME, controller_id=1, keep_alive_ms=0, authentication=machine)
    for change in (41, 42, 43):
        made = bytearray(authentication(5, 6, sgl=0x01))
        made[change] ^= 0xFF
        assert status(controller.handle(bytes(made), b"secret")) == Status.INVALID_FIELD
    for length in (0, 4097):
        assert status(controller.handle(authentication(6, length))) == Status.INVALID_FIELD
    short = authentication(5, 7, sgl=0x01)
    assert status(controller.handle(short, b"secret")) == Status.SGL_LENGTH_INVALID
    assert machine.heard == []
    assert status(controller.handle(authentication(5, 6, sgl=0x01), b"guess!")) == 0
    assert not controller.is_ending  # the host may fetch the failure
    assert data(controller.handle(authentication(6, 64))) == b"challenge"
    assert controller.is_ending


def test_authentication_is_not_offered_where_it_is_not_needed(admin: AdminController) -> None:
    assert status(admin.handle(authentication(6, 64))) == Status.INVALID_OPCODE
