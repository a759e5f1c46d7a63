//! Transfers with a target's controller, and with a peer that doesn't answer.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};

use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::pdu::Digests;

use super::*;
use crate::storage::stores::memory::MemoryStore;
use crate::storage::target::{AnaState, Controller, Namespace};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 1024;
const TRANSFER_MAX: usize = 128 * 1024;
const LONG: Duration = Duration::from_secs(60);
const DIGESTS: Digests = Digests { header: false, data: true };

/// A buffer shared with its owner, and the number of writes to it.
#[derive(Debug, Clone)]
struct Bytes {
    content: Arc<Mutex<Vec<u8>>>,
    copies: Arc<AtomicUsize>,
}

impl Bytes {
    fn new(content: Vec<u8>) -> Self {
        Self { content: Arc::new(Mutex::new(content)), copies: Arc::default() }
    }

    fn content(&self) -> Vec<u8> {
        self.content.lock().unwrap().clone()
    }

    fn boxed(&self) -> Box<dyn TransferBuffer> {
        Box::new(self.clone())
    }
}

impl TransferBuffer for Bytes {
    fn bytes(&self) -> usize {
        self.content.lock().unwrap().len()
    }

    fn copy_to(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.content.lock().unwrap()[offset..offset + into.len()]);
    }

    fn copy_from(&mut self, offset: usize, data: &[u8]) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.content.lock().unwrap()[offset..offset + data.len()].copy_from_slice(data);
    }
}

/// The queue, its controller if there is one, and the ends taken for other callers.
struct Host {
    queue: HostVolumeQueue,
    _controller: Option<Controller>,
    ended: Mutex<HashMap<u64, Result<(), TransferError>>>,
}

impl Host {
    fn new(near: UnixStream, controller: Option<Controller>, timeout: Duration) -> Self {
        let limits = HostLimits {
            queue_depth: 8,
            h2c_data_max: TRANSFER_MAX,
            transfer_max: TRANSFER_MAX,
            in_capsule_max: 8192,
            block_bytes: BLOCK,
            nsid: 1,
            digests: DIGESTS,
        };
        let queue = HostVolumeQueue::new(near.into(), limits, TRANSFER_MAX, timeout).unwrap();
        Self { queue, _controller: controller, ended: Mutex::default() }
    }

    fn served() -> Self {
        let store = MemoryStore::new(BLOCKS, false);
        let namespace = Arc::new(Namespace::new(Box::new(store)).unwrap());
        let controller = Controller::new(1, [1; 16]).unwrap();
        controller.set_namespaces(vec![(1, namespace, AnaState::Optimized)]);
        let (near, far) = UnixStream::pair().unwrap();
        let limits = ControllerLimits {
            queue_depth: 8,
            h2c_data_max: TRANSFER_MAX,
            in_capsule_max: 8192,
            transfer_max: TRANSFER_MAX,
            success_flag: true,
            digests: DIGESTS,
        };
        controller.start_queue(far.into(), 1, limits, None).unwrap();
        Self::new(near, Some(controller), LONG)
    }

    /// A queue whose peer never answers; the returned peer must be kept alive.
    fn silent(timeout: Duration) -> (Self, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        (Self::new(near, None, timeout), far)
    }

    fn finish(&self, ticket: u64) -> Result<(), TransferError> {
        loop {
            {
                let mut ended = self.ended.lock().unwrap();
                ended.extend(self.queue.take_done().into_iter().map(|d| (d.ticket, d.outcome)));
                if let Some(outcome) = ended.remove(&ticket) {
                    return outcome;
                }
            }
            // Another thread may take this one's end meanwhile.
            let left = Some(Duration::from_millis(10));
            wait([(self.queue.as_fd(), PollFlags::IN)], left).unwrap();
        }
    }

    fn run(&self, lba: u64, transfer: Transfer) -> Result<(), TransferError> {
        self.finish(self.queue.start(lba, transfer)?)
    }

    fn write(&self, lba: u64, data: Vec<u8>) -> Result<(), TransferError> {
        let data = Bytes::new(data).boxed();
        self.run(lba, Transfer::Write { data, is_forced: false })
    }

    fn read(&self, lba: u64, blocks: usize) -> Vec<u8> {
        let into = Bytes::new(vec![0; blocks * BLOCK]);
        self.run(lba, Transfer::Read(into.boxed())).unwrap();
        into.content()
    }
}

#[test]
fn many_threads_use_one_queue_at_once() {
    let host = Host::served();
    let host = &host;
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            scope.spawn(move || {
                for round in 0..20 {
                    // 1 to 40 blocks: some fit in one command, some exceed the limit in flight.
                    let blocks = 1 + (thread * 7 + round * 13) % 40;
                    let content = vec![(thread * 20 + round) as u8; blocks as usize * BLOCK];
                    host.write(thread * 128, content.clone()).unwrap();
                    assert_eq!(host.read(thread * 128, blocks as usize), content);
                }
            });
        }
    });
    assert!(host.queue.progress() > 8 * 20 * 2 * BLOCK as u64);
}

#[test]
fn a_transfer_larger_than_the_limit_in_flight_is_complete() {
    let host = Host::served();
    let content: Vec<u8> = (0..BLOCKS as usize * BLOCK).map(|at| (at / 5000) as u8).collect();
    host.write(0, content.clone()).unwrap();
    assert_eq!(host.read(0, BLOCKS as usize), content);
    host.run(0, Transfer::WriteZeroes { blocks: BLOCKS, deallocate: true }).unwrap();
    assert_eq!(host.read(7, 2), vec![0; 2 * BLOCK]);
    host.write(0, Vec::new()).unwrap();
}

#[test]
fn a_refused_command_ends_its_transfer_only() {
    let host = Host::served();
    let outcome = host.write(BLOCKS - 32, vec![1; 96 * BLOCK]);
    assert!(
        matches!(outcome, Err(TransferError::Status { lba, .. }) if lba == BLOCKS),
        "{outcome:?}"
    );
    let (expected, data) = (vec![9; BLOCK], vec![2; BLOCK]);
    let outcome = host.run(3, Transfer::CompareAndWrite { expected, data: data.clone() });
    let failure = Status::COMPARE_FAILURE.code();
    assert!(
        matches!(outcome, Err(TransferError::Status { status, .. }) if status.code() == failure),
        "{outcome:?}"
    );
    assert_eq!(host.read(3, 1), vec![0; BLOCK]);
    host.run(3, Transfer::CompareAndWrite { expected: vec![0; BLOCK], data: data.clone() })
        .unwrap();
    assert_eq!(host.read(3, 1), data);
    let half = Transfer::CompareAndWrite { expected: vec![0; 8], data: vec![0; 8] };
    assert!(matches!(host.run(0, half), Err(TransferError::Length)));
    assert!(matches!(host.write(0, vec![0; 100]), Err(TransferError::Misaligned(BLOCK))));
}

#[test]
fn a_cancelled_transfer_no_longer_touches_its_buffer() {
    let (host, mut peer) = Host::silent(LONG);
    let into = Bytes::new(vec![7; BLOCK]);
    let ticket = host.queue.start(0, Transfer::Read(into.boxed())).unwrap();
    let waiting: Vec<u64> = (0..7).map(|_| host.queue.start(0, Transfer::Flush).unwrap()).collect();
    host.queue.cancel(ticket);
    // None of its commands was submitted: the queue is full.
    host.queue.cancel(waiting[6]);
    assert!(matches!(host.finish(waiting[6]), Err(TransferError::Cancelled)));
    assert!(host.queue.take_done().is_empty());
    answer_read(&mut peer, 0xee);
    assert!(matches!(host.finish(ticket), Err(TransferError::Cancelled)));
    assert_eq!(into.content(), vec![7; BLOCK]);
    assert_eq!(into.copies.load(Ordering::Relaxed), 0);
}

/// Answers the first command, a read of one block, with data and the success flag.
fn answer_read(peer: &mut UnixStream, byte: u8) {
    use std::io::Write;

    use sealane_proto::nvme::pdu::{CommonHeader, DataHeader, FLAG_LAST, FLAG_SUCCESS, kind};
    use sealane_proto::nvme::transmit::{Data, TransmitQueue};
    use zerocopy::IntoBytes;

    let flags = FLAG_LAST | FLAG_SUCCESS;
    let header = DataHeader {
        common: CommonHeader::new(kind::C2H_DATA, flags, BLOCK, DIGESTS),
        cid: 0.into(),
        tag: 0.into(),
        offset: 0.into(),
        length: (BLOCK as u32).into(),
        reserved: [0; 4],
    };
    let mut transmit = TransmitQueue::default();
    transmit.put_pdu(header.as_bytes(), Data::Owned(vec![byte; BLOCK]));
    peer.write_all(&transmit.take()).unwrap();
}

#[test]
fn a_missing_answer_ends_the_queue() {
    let (host, _peer) = Host::silent(Duration::from_millis(20));
    let transfers: Vec<u64> =
        (0..20).map(|_| host.queue.start(0, Transfer::Flush).unwrap()).collect();
    for ticket in transfers {
        assert!(matches!(host.finish(ticket), Err(TransferError::TimedOut(_))));
    }
    assert!(matches!(host.queue.start(0, Transfer::Flush), Err(TransferError::TimedOut(_))));
}

#[test]
fn a_peer_that_leaves_ends_the_queue() {
    let (host, peer) = Host::silent(LONG);
    let ticket = host.queue.start(0, Transfer::Flush).unwrap();
    drop(peer);
    assert!(matches!(host.finish(ticket), Err(TransferError::Ended { .. })));
}

#[test]
fn closing_ends_every_transfer() {
    let (host, _peer) = Host::silent(LONG);
    let tickets: Vec<u64> =
        (0..20).map(|_| host.queue.start(0, Transfer::Flush).unwrap()).collect();
    host.queue.close();
    for ticket in tickets {
        assert!(matches!(host.finish(ticket), Err(TransferError::Ended { .. })));
    }
    assert!(matches!(host.queue.start(0, Transfer::Flush), Err(TransferError::Ended { .. })));
    host.queue.close();
}

#[test]
fn transfers_are_bounded() {
    let (host, _peer) = Host::silent(LONG);
    for _ in 0..TRANSFERS_MAX {
        host.queue.start(0, Transfer::Flush).unwrap();
    }
    let outcome = host.queue.start(0, Transfer::Flush);
    assert!(matches!(outcome, Err(TransferError::Busy(TRANSFERS_MAX))), "{outcome:?}");
}
