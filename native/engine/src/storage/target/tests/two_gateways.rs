//! Two gateways write one block while the target is killed: their writes keep one order.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sealane_proto::aead::Secret;
use sealane_proto::key_ring::KeyRing;
use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::HostQueue;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{CounterRange, DATA_BYTES, VolumeIdentity};
use sealane_proto::secure_queue::{QueueContext, SecureQueue};

use super::hosts::{Host, controller, host_limits, limits};
use crate::storage::gateway::{
    BackQueue, GatewaySettings, GatewayVolume, Incarnation, QueueName, VolumeFormat,
};
use crate::storage::store::BlockStore;
use crate::storage::stores::fresh_store::Trust;
use crate::storage::stores::in_place_store::{InPlaceStore, raw_blocks};
use crate::storage::stores::inline_file::InlineFileStore;
use crate::storage::stores::scratch::Scratch;
use crate::storage::stores::sealed_file::SealedFileStore;
use crate::storage::target::{Controller, Namespace};

const BLOCKS: u64 = 64;
/// The block that both use.
const BLOCK: u64 = 3;

/// Layout of the blocks in a file.
#[derive(Debug, Clone, Copy)]
enum Kind {
    File,
    Inline,
}

const KINDS: [Kind; 2] = [Kind::File, Kind::Inline];

impl Kind {
    fn open(self, path: &Path, is_new: bool) -> Box<dyn BlockStore> {
        let trust = &Trust::default();
        let store: Box<dyn BlockStore> = match (self, is_new) {
            (Self::File, true) => {
                Box::new(SealedFileStore::create(path, BLOCKS, trust).expect("store"))
            }
            (Self::File, false) => Box::new(SealedFileStore::open(path, trust).expect("store")),
            (Self::Inline, true) => {
                let raw = InlineFileStore::create(path, raw_blocks(BLOCKS)).expect("raw");
                Box::new(InPlaceStore::create(Box::new(raw), BLOCKS, trust).expect("store"))
            }
            (Self::Inline, false) => {
                let raw = InlineFileStore::open(path, raw_blocks(BLOCKS)).expect("raw");
                Box::new(InPlaceStore::open(Box::new(raw), trust).expect("store"))
            }
        };
        store
    }
}

/// A target process with a namespace on a file.
struct Target {
    kind: Kind,
    namespace: Arc<Namespace>,
    incarnation: u64,
    scratch: Scratch,
}

impl Target {
    fn new(kind: Kind) -> Self {
        let scratch = Scratch::new();
        let store = kind.open(&scratch.file(), true);
        let namespace = Arc::new(Namespace::new(store).expect("namespace"));
        Self { kind, namespace, incarnation: 1, scratch }
    }

    /// Kills the process; the next one opens the file's contents at that time.
    fn killed(self) -> Self {
        let scratch = Scratch::new();
        std::fs::copy(self.scratch.file(), scratch.file()).expect("copied");
        let store = self.kind.open(&scratch.file(), false);
        let namespace = Arc::new(Namespace::new(store).expect("namespace"));
        Self { namespace, scratch, incarnation: self.incarnation + 1, ..self }
    }
}

/// A gateway and its host.
struct Gateway {
    number: u8,
    volume: GatewayVolume,
    host: Host,
    epoch: u64,
    controller: Option<Controller>,
}

const NAME: QueueName = QueueName { association: 1, queue_id: 1 };

impl Gateway {
    fn new(number: u8) -> Self {
        let identity = VolumeIdentity { volume_id: [1; 16], generation: 1 };
        let keys = KeyRing::new(identity, 1, 1, &Secret::take(&mut [3; 32])).expect("keys");
        let format =
            VolumeFormat { block_count: BLOCKS, is_fully_sealed: false, is_read_only: false };
        let settings = GatewaySettings {
            command_timeout: Duration::from_secs(30),
            hold: Duration::from_secs(60),
            journal_bytes_max: 1 << 22,
            commands_per_key_max: 1 << 48,
        };
        let volume = GatewayVolume::new(keys, format, settings, None).expect("volume");
        volume.add_counters(CounterRange::new(number.into(), 1, 1, 1 << 40).expect("counters"));
        let (near, far) = UnixStream::pair().expect("sockets");
        let front = ControllerLimits { transfer_max: 131_072, ..limits(32) };
        volume.start_queue(far.into(), NAME, front).expect("queue");
        let host = Host::over(near, HostQueue::new(host_limits(false), None));
        Self { number, volume, host, epoch: 0, controller: None }
    }

    fn connect(&mut self, target: &Target) {
        self.epoch += 1;
        let keys = || {
            let context = QueueContext {
                volume_id: [1; 16],
                host_nqn: format!("nqn.2026-11.dev.sealane:gateway:{}", self.number),
                queue_id: 1,
                association_epoch: self.epoch,
                incarnation: target.incarnation,
            };
            SecureQueue::new(&Secret::take(&mut [8; 32]), &context)
        };
        let (near, far) = UnixStream::pair().expect("sockets");
        let controller = controller(self.number, &target.namespace);
        controller.start_queue(far.into(), 1, limits(32), Some(keys())).expect("queue");
        let incarnation = Incarnation {
            number: target.incarnation,
            confirmed: self.volume.milestone(),
            milestone: target.namespace.milestone(),
        };
        let (limits, epoch) = (host_limits(true), self.epoch);
        let back = BackQueue { limits, secure: keys(), epoch, incarnation };
        self.volume.replace_back(NAME, near.into(), back).expect("connected");
        self.controller = Some(controller);
    }

    fn write(&mut self, byte: u8, is_forced: bool) {
        let data = vec![byte; DATA_BYTES];
        let write = HostCommand::Write { lba: BLOCK, data, is_forced };
        assert_eq!(self.host.status(write), Status::SUCCESS);
    }

    fn flush(&mut self) {
        assert_eq!(self.host.status(HostCommand::Flush), Status::SUCCESS);
    }

    fn read(&mut self) -> u8 {
        self.host.read(BLOCK, 1)[0]
    }
}

fn world(kind: Kind) -> (Target, Gateway, Gateway) {
    let target = Target::new(kind);
    let [mut a, mut b] = [Gateway::new(1), Gateway::new(2)];
    a.connect(&target);
    b.connect(&target);
    (target, a, b)
}

#[test]
fn a_late_journal_does_not_undo_what_another_gateway_made_durable_before_the_restart() {
    for kind in KINDS {
        for is_forced in [false, true] {
            let (target, mut a, mut b) = world(kind);
            a.write(1, false);
            b.write(2, is_forced);
            if !is_forced {
                b.flush();
            }
            let target = target.killed();
            b.connect(&target);
            assert_eq!(b.read(), 2, "{kind:?}");
            a.connect(&target);
            assert_eq!((a.read(), b.read()), (2, 2), "{kind:?}");
        }
    }
}

#[test]
fn the_write_acknowledged_last_stands_whichever_gateway_reconnects_first() {
    for kind in KINDS {
        for is_late in [false, true] {
            let (target, mut a, mut b) = world(kind);
            b.write(7, false);
            a.write(8, false);
            b.write(9, false);
            let target = target.killed();
            for gateway in if is_late { [&mut b, &mut a] } else { [&mut a, &mut b] } {
                gateway.connect(&target);
                gateway.read();
            }
            assert_eq!((a.read(), b.read()), (9, 9), "{kind:?}");
        }
    }
}

#[test]
fn a_deallocation_has_its_place_among_writes() {
    for kind in KINDS {
        let (target, mut a, mut b) = world(kind);
        a.write(1, false);
        let ranges = [BLOCK, 9].map(|lba| LbaRange { lba, blocks: 1 });
        assert!(b.host.status(HostCommand::Deallocate(ranges.to_vec())).is_success());
        a.write(2, false);
        let target = target.killed();
        a.connect(&target);
        assert_eq!(a.read(), 2);
        b.connect(&target);
        assert_eq!((a.read(), b.read()), (2, 2), "{kind:?}");
    }
}

#[test]
fn a_journal_late_by_two_restarts_fails_its_gateway_if_the_order_is_unknown() {
    // Only with a file is the write lost: a write in place is in the log when it is answered.
    let (target, mut a, mut b) = world(Kind::File);
    a.write(1, false);
    let target = target.killed();
    b.connect(&target);
    assert_eq!(b.read(), 0);
    b.write(2, true);
    let target = target.killed();
    b.connect(&target);
    a.connect(&target);
    let read = HostCommand::Read { lba: BLOCK, blocks: 1 };
    assert_eq!(a.host.status(read), Status::INTERNAL_ERROR.final_());
    assert_eq!(b.read(), 2);
}

#[test]
fn a_single_gateway_keeps_all_acknowledged_writes_over_any_number_of_restarts() {
    for kind in KINDS {
        let mut target = Target::new(kind);
        let mut gateway = Gateway::new(1);
        gateway.connect(&target);
        for byte in 1..6 {
            gateway.write(byte, byte == 3);
            target = target.killed();
            if byte % 2 == 0 {
                // An incarnation to which the gateway doesn't connect.
                target = target.killed();
            }
            gateway.connect(&target);
            assert_eq!(gateway.read(), byte, "{kind:?}");
        }
    }
}
