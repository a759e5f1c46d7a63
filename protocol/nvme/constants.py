"""Numbers of NVMe Base 2.0, NVMe over Fabrics and NVMe/TCP that the control plane uses."""

from enum import IntEnum, IntFlag

SUBMISSION_BYTES = 64
COMPLETION_BYTES = 16
CONNECT_DATA_BYTES = 1024
IDENTIFY_BYTES = 4096

VERSION_2_0 = 0x0002_0000
DYNAMIC_CONTROLLER = 0xFFFF
NAMESPACE_ID = 1
BROADCAST_NSID = 0xFFFF_FFFF
NO_FLOW_CONTROL_HEAD = 0xFFFF
DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
DATA_UNIT_SECTORS = 1000  # a data unit of the SMART log is 1000 sectors of 512 bytes

# Limits of this implementation, each with its reason.
QUEUE_DEPTH_MAX = 128  # what hosts request by default; limits a queue's memory
QUEUE_COUNT_MAX = 16  # I/O queues of one controller, each with a thread
IN_CAPSULE_BYTES = 8192  # saves the R2T of a one-sector write, sealed (4160) or plain
FRONT_TRANSFER_BYTES = 131_072  # MDTS of a plain namespace
SECURE_TRANSFER_BYTES = 262_144  # MDTS of a secure one: 32 sealed sectors are 133,120 bytes
H2C_DATA_BYTES = 262_144  # one H2CData PDU may carry a whole transfer
KEEP_ALIVE_GRANULARITY_MS = 1000
EVENT_REQUESTS_MAX = 4
ABORTS_MAX = 4
ADMIN_CAPSULE_BYTES = 8192  # in-capsule data that NVMe/TCP requires for admin and fabrics
ERROR_ENTRIES_MAX = 64  # error log; ELPE is one less
NAMESPACES_MAX = 1024  # namespaces of one subsystem: as many as a changed-namespaces log can list
NOTIFICATIONS_MAX = 64  # reservation notifications kept for a host that doesn't read them


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
    """Admin commands with an answer other than Invalid Opcode."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT_REQUEST = 0x0C
    KEEP_ALIVE = 0x18
    FABRICS = 0x7F


class IoOpcode(IntEnum):
    """I/O commands of the NVM command set, to announce which are supported."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    COMPARE = 0x05
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09
    VERIFY = 0x0C
    RESERVATION_REGISTER = 0x0D
    RESERVATION_REPORT = 0x0E
    RESERVATION_ACQUIRE = 0x11
    RESERVATION_RELEASE = 0x15


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


class ControllerStatus(IntFlag):
    """Bits of the controller status property."""

    READY = 0x01
    FATAL = 0x02
    SHUTDOWN_COMPLETE = 0x08


class IdentifyStructure(IntEnum):
    """Identify's CNS values."""

    NAMESPACE = 0x00
    CONTROLLER = 0x01
    ACTIVE_NAMESPACES = 0x02
    DESCRIPTORS = 0x03
    COMMAND_SET_NAMESPACE = 0x05
    COMMAND_SET_CONTROLLER = 0x06
    COMMAND_SET_ACTIVE_NAMESPACES = 0x07
    INDEPENDENT_NAMESPACE = 0x08
    COMMAND_SETS = 0x1C


class Feature(IntEnum):
    """Features that can be set or got."""

    ARBITRATION = 0x01
    POWER_MANAGEMENT = 0x02
    TEMPERATURE_THRESHOLD = 0x04
    ERROR_RECOVERY = 0x05
    VOLATILE_WRITE_CACHE = 0x06
    NUMBER_OF_QUEUES = 0x07
    WRITE_ATOMICITY = 0x0A
    ASYNC_EVENT_CONFIGURATION = 0x0B
    KEEP_ALIVE_TIMER = 0x0F
    HOST_BEHAVIOR = 0x16
    COMMAND_SET_PROFILE = 0x19
    HOST_IDENTIFIER = 0x81
    RESERVATION_NOTIFICATION_MASK = 0x82
    RESERVATION_PERSISTENCE = 0x83


class LogPage(IntEnum):
    """Log pages by identifier."""

    SUPPORTED = 0x00
    ERROR = 0x01
    HEALTH = 0x02
    FIRMWARE_SLOT = 0x03
    CHANGED_NAMESPACES = 0x04
    COMMAND_EFFECTS = 0x05
    ANA = 0x0C
    FEATURE_EFFECTS = 0x12
    DISCOVERY = 0x70
    RESERVATION_NOTIFICATION = 0x80


class AnaState(IntEnum):
    """Asymmetric namespace access states."""

    OPTIMIZED = 0x01
    NON_OPTIMIZED = 0x02
    INACCESSIBLE = 0x03
    PERSISTENT_LOSS = 0x04
    CHANGE = 0x0F


class Status(IntEnum):
    """Status code types and codes that the control plane sends."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    INTERNAL_ERROR = 0x006
    ABORTED = 0x007
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    SGL_LENGTH_INVALID = 0x00F
    SGL_TYPE_INVALID = 0x011
    TRANSIENT_TRANSPORT_ERROR = 0x022
    INVALID_QUEUE = 0x101
    EVENT_REQUESTS_EXCEEDED = 0x105
    INVALID_LOG_PAGE = 0x109
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F
    CONNECT_FORMAT = 0x180
    CONNECT_BUSY = 0x181
    CONNECT_PARAMETERS = 0x182
    CONNECT_HOST = 0x184
    AUTHENTICATION_REQUIRED = 0x191


DO_NOT_RETRY = 0x4000
