//! Reservations between hosts, over the wire.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;

use sealane_proto::nvme::command::{
    FLAGS_SGL, READ, RESERVATION_ACQUIRE, RESERVATION_REGISTER, RESERVATION_RELEASE,
    RESERVATION_REPORT, SGL_IN_CAPSULE, SGL_TRANSPORT, Sgl, SubmissionEntry, WRITE,
};
use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::pdu::{CapsuleCmd, CommonHeader, Digests, Header, PduLimits, kind};
use sealane_proto::nvme::reader::{PduReader, Piece};
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::DATA_BYTES;
use zerocopy::IntoBytes;

use super::hosts::{Host, controller, limits, plain};
use super::store::ShuffledStore;
use crate::storage::target::{Controller, Namespace};

/// A host that sends raw submission entries, one at a time.
struct Raw {
    stream: UnixStream,
    reader: PduReader,
}

impl Raw {
    fn connect(controller: &Controller) -> Self {
        let (stream, far) = UnixStream::pair().unwrap();
        let digests = Digests { header: false, data: false };
        let limits = ControllerLimits { digests, ..limits(32) };
        controller.start_queue(far.into(), 9, limits, None).unwrap();
        let limits = PduLimits { capsule_data_max: 0, data_max: 1 << 20, digests };
        Self { stream, reader: PduReader::new(limits) }
    }

    fn send(&mut self, opcode: u8, cdw10_11: u64, data: &[u8], reads: usize) {
        let kind_of_sgl = if data.is_empty() { SGL_TRANSPORT } else { SGL_IN_CAPSULE };
        let length = (data.len() + reads) as u32;
        let entry = SubmissionEntry {
            opcode,
            flags: FLAGS_SGL,
            nsid: 1.into(),
            sgl: Sgl { length: length.into(), kind: kind_of_sgl, ..Sgl::default() },
            start_lba: cdw10_11.into(),
            ..SubmissionEntry::default()
        };
        let digests = Digests { header: false, data: false };
        let common = CommonHeader::new(kind::CAPSULE_CMD, 0, data.len(), digests);
        let capsule = CapsuleCmd { common, entry };
        self.stream.write_all(&[capsule.as_bytes(), data].concat()).unwrap();
    }

    /// Status and data of the command sent.
    fn answer(&mut self) -> (Status, Vec<u8>) {
        let mut data = Vec::new();
        loop {
            let mut byte = [0];
            self.stream.read_exact(&mut byte).unwrap();
            let mut input = &byte[..];
            while let Some(piece) = self.reader.next(&mut input).unwrap() {
                match piece {
                    Piece::Header(Header::CapsuleResp(response), _) => {
                        return (Status::from_field(response.entry.status.get()), data);
                    }
                    Piece::Data(bytes) => data.extend_from_slice(bytes),
                    Piece::Header(..) | Piece::End(_) => {}
                }
            }
        }
    }

    fn run(&mut self, opcode: u8, cdw10_11: u64, data: &[u8]) -> Status {
        self.send(opcode, cdw10_11, data, 0);
        self.answer().0
    }

    fn register(&mut self, key: u64) -> Status {
        self.run(RESERVATION_REGISTER, 0, &[0u64.to_le_bytes(), key.to_le_bytes()].concat())
    }

    fn acquire(&mut self, action: u64, kind: u64, keys: (u64, u64)) -> Status {
        let keys = [keys.0.to_le_bytes(), keys.1.to_le_bytes()].concat();
        self.run(RESERVATION_ACQUIRE, action | kind << 8, &keys)
    }

    fn read(&mut self) -> Status {
        self.send(READ, 0, &[], DATA_BYTES);
        self.answer().0
    }

    fn write(&mut self) -> Status {
        self.run(WRITE, 0, &plain(7, 1))
    }
}

fn world() -> (ShuffledStore, Arc<Namespace>) {
    let store = ShuffledStore::new(16, false, 31);
    let namespace = Namespace::new(Box::new(store.clone())).unwrap();
    (store, Arc::new(namespace))
}

#[test]
fn a_reservation_keeps_other_hosts_out_until_it_is_released() {
    let (_, namespace) = world();
    let (first, second) = (controller(1, &namespace), controller(2, &namespace));
    let (mut holder, mut other) = (Raw::connect(&first), Raw::connect(&second));
    assert_eq!(holder.acquire(0, 1, (10, 0)), Status::RESERVATION_CONFLICT.final_());
    assert_eq!(holder.register(10), Status::SUCCESS);
    assert_eq!(holder.acquire(0, 1, (10, 0)), Status::SUCCESS);
    assert_eq!((holder.write(), holder.read()), (Status::SUCCESS, Status::SUCCESS));
    assert_eq!(other.write(), Status::RESERVATION_CONFLICT.final_());
    assert_eq!(other.read(), Status::SUCCESS, "write exclusive");
    let conflicts =
        namespace.statistics().into_iter().find(|(name, _)| *name == "reservation_conflicts");
    assert_eq!(conflicts, Some(("reservation_conflicts", 1)));

    holder.send(RESERVATION_REPORT, 31 | 1 << 32, &[], 128);
    let (status, report) = holder.answer();
    assert_eq!((status, report.len()), (Status::SUCCESS, 128));
    assert_eq!((report[4], report[5], report[66]), (1, 1, 1));
    assert_eq!(report[80..96], [1; 16]);
    holder.send(RESERVATION_REPORT, 31, &[], 128);
    assert_eq!(holder.answer().0, Status::HOST_IDENTIFIER_INCONSISTENT.final_());

    let release = holder.run(RESERVATION_RELEASE, 1 << 8, &10u64.to_le_bytes());
    assert_eq!(release, Status::SUCCESS);
    assert_eq!(other.write(), Status::SUCCESS);
}

#[test]
fn a_preempted_host_is_notified_and_has_nothing_left_in_flight() {
    let (store, namespace) = world();
    let (first, second) = (controller(1, &namespace), controller(2, &namespace));
    let mut loser = Raw::connect(&first);
    let mut loser_io = Host::connect(&first, 1, false);
    let mut winner = Raw::connect(&second);
    assert_eq!((loser.register(10), winner.register(20)), (Status::SUCCESS, Status::SUCCESS));
    assert_eq!(loser.acquire(0, 2, (10, 0)), Status::SUCCESS);
    assert_eq!(winner.read(), Status::RESERVATION_CONFLICT.final_());
    store.hold(true);
    let write = |lba| HostCommand::Write { lba, data: plain(1, 1), is_forced: false };
    let before = store.submitted();
    let in_flight = loser_io.submit(write(0));
    while store.submitted() == before {
        thread::yield_now();
    }
    winner.send(
        RESERVATION_ACQUIRE,
        2 | 2 << 8,
        &[20u64.to_le_bytes(), 10u64.to_le_bytes()].concat(),
        0,
    );
    // The preemption waits for the write in progress; the next write waits for the preemption.
    while namespace.statistics().iter().any(|(name, count)| *name == "contended" && *count == 0) {
        thread::yield_now();
    }
    let too_late = loser_io.submit(write(0));
    store.hold(false);
    assert_eq!(winner.answer().0, Status::SUCCESS);
    assert_eq!(loser_io.finish(in_flight).0, Status::SUCCESS);
    assert_eq!(loser_io.finish(too_late).0, Status::RESERVATION_CONFLICT.final_());
    assert_eq!(winner.write(), Status::SUCCESS);
    let told: Vec<_> = namespace.events().take();
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].reason, "reservation.registration_preempted");
    assert_eq!(told[0].detail, "01".repeat(16));
}
