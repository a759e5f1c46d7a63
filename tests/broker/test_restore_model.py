"""A model of lost stores: whatever is restored when, no counter is granted twice under one key.

Several brokers share a store and grant leases to gateways. At any point a snapshot is taken, and
at any later point the store is lost and restored from any snapshot ever taken, by an operator who
uses instance numbers that the snapshot doesn't have, but that brokers may have used since.
"""

import random
import uuid
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from broker.memory_store import MemoryStore
from brokers import Count, start_broker
from sealane.crypto.lease import Lease
from sealane.daemon.broker import restored
from sealane.daemon.broker.records import Tables
from sealane.daemon.broker.registry import AUTHORITY_KEY, Registry, with_state
from sealane.daemon.broker.service import BrokerService
from sealane.daemon.clock_now import NOW
from sealane.errors import UsageError
