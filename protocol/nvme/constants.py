"""Numbers of NVMe Base 2.0, NVMe over Fabrics and NVMe/TCP that the control side uses."""

from enum import IntEnum

SUBMISSION_BYTES = 64
COMPLETION_BYTES = 16
CONNECT_DATA_BYTES = 1024
IDENTIFY_BYTES = 4096

VERSION_2_0 = 0x0002_0000
DYNAMIC_CONTROLLER = 0xFFFF
NAMESPACE_ID = 1

# Our implementation's limits, each with its reason.
QUEUE_DEPTH_MAX = 128  # what hosts ask for by default; bounds a queue's memory
QUEUE_COUNT_MAX = 16  # I/O queues of one controller, each a thread
IN_CAPSULE_BYTES = 8192  # saves the R2T of a one-sector write, sealed (4160) or plain
FRONT_TRANSFER_BYTES = 131_072  # MDTS of a plain namespace
SECURE_TRANSFER_BYTES = 262_144  # MDTS of a secure one: 32 sealed sectors are 133,120 bytes
H2C_DATA_BYTES = 262_144  # one H2CData PDU may carry a whole transfer
KEEP_ALIVE_GRANULARITY_MS = 1000
EVENT_REQUESTS_MAX = 4
ABORTS_MAX = 4


class PduKind(IntEnum):
    """PDU types."""

    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM = 0x02
    C2H_TERM = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


class AdminOpcode(IntEnum):
    """Admin commands that are answered with more than Invalid Opcode."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT_REQUEST = 0x0C
    KEEP_ALIVE = 0x18
    FABRICS = 0x7F


class FabricsType(IntEnum):
    """Fabrics commands, by the byte that other commands use for the namespace id."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04


class Property(IntEnum):
    """Controller properties by offset."""

    CAPABILITIES = 0x00
    VERSION = 0x08
    CONFIGURATION = 0x14
    STATUS = 0x1C


class Feature(IntEnum):
    """Features that can be set or got."""

    ASYNC_EVENT_CONFIGURATION = 0x0B
    NUMBER_OF_QUEUES = 0x07
    KEEP_ALIVE_TIMER = 0x0F


class Status(IntEnum):
    """Status code type and code of the statuses the control side sends."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    INTERNAL_ERROR = 0x006
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    EVENT_REQUESTS_EXCEEDED = 0x105
    INVALID_LOG_PAGE = 0x109
    FEATURE_NOT_CHANGEABLE = 0x10E
    CONNECT_FORMAT = 0x180
    CONNECT_BUSY = 0x181
    CONNECT_PARAMETERS = 0x182
    CONNECT_HOST = 0x184


DO_NOT_RETRY = 0x4000
