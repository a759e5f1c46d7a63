//! Host, gateway queues and target in one thread, without sockets. Connections break at any byte
//! and the target loses unflushed changes, yet every read must return the latest write.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::aead::Secret;
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::{OPENINGS_BYTES, Openings};
use sealane_proto::key_ring::KeyRing;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::{
    Command, ControllerEvent, ControllerLimits, ControllerQueue, Operation,
};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue};
use sealane_proto::nvme::operation::{Access, CommandSet, LbaRange, NamespaceFormat};
use sealane_proto::nvme::outcomes::{self, Ended};
use sealane_proto::nvme::pdu::Digests;
use sealane_proto::nvme::reader::StreamSink;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{
    BLOCK_BYTES, Block, CounterRange, DATA_BYTES, IV_BYTES, VolumeIdentity, block_iv,
    set_unwritten, take_expected_iv,
};
use sealane_proto::secure_queue::{QueueContext, SecureQueue};

use super::journal::JOURNAL_BYTES_MIN;
use super::link::Phase;
use super::*;

const BLOCKS: u64 = 64;
pub(super) const SECOND: u64 = 1_000_000_000;

const FRONT: ControllerLimits = ControllerLimits {
    queue_depth: 32,
    h2c_data_max: 131_072,
    in_capsule_max: 8192,
    transfer_max: 131_072,
    success_flag: true,
    digests: Digests { header: false, data: false },
};
const HOST: HostLimits = HostLimits {
    queue_depth: 32,
    h2c_data_max: 131_072,
    transfer_max: 131_072,
    in_capsule_max: 8192,
    block_bytes: DATA_BYTES,
    nsid: 1,
    digests: Digests { header: false, data: false },
};
const BACK_CONTROLLER: ControllerLimits =
    ControllerLimits { transfer_max: 4 * BLOCK_BYTES, success_flag: false, ..FRONT };
const BACK: HostLimits =
    HostLimits { transfer_max: 4 * BLOCK_BYTES, block_bytes: BLOCK_BYTES, ..HOST };

pub(super) fn settings() -> GatewaySettings {
    GatewaySettings {
        command_timeout: Duration::from_secs(30),
        hold: Duration::from_secs(60),
        journal_bytes_max: JOURNAL_BYTES_MIN,
        commands_per_key_max: 1 << 48,
    }
}

fn shared(settings: GatewaySettings) -> Arc<Shared> {
    shared_of(settings, false)
}

fn shared_of(settings: GatewaySettings, is_fully_sealed: bool) -> Arc<Shared> {
    let format = VolumeFormat { block_count: BLOCKS, is_fully_sealed, is_read_only: false };
    let identity = VolumeIdentity { volume_id: [1; 16], generation: 1 };
    let keys = KeyRing::new(identity, 1, 1, &Secret::take(&mut [3; 32])).unwrap();
    let volume = GatewayVolume::new(keys, format, settings, None).unwrap();
    volume.add_counters(CounterRange::new(1, 1, 1, 1 << 40).unwrap());
    Arc::clone(&volume.shared)
}

fn namespace(block_bytes: usize, commands: CommandSet) -> NamespaceFormat {
    NamespaceFormat { nsid: 1, block_bytes, block_count: BLOCKS, commands, access: Access::Full }
}

fn secure(queue_id: u16, epoch: u64, incarnation: u64) -> SecureQueue {
    let context = QueueContext {
        volume_id: [1; 16],
        host_nqn: "nqn.2026-11.dev.sealane:gateway:g".into(),
        queue_id,
        association_epoch: epoch,
        incarnation,
    };
    SecureQueue::new(&Secret::take(&mut [9; 32]), &context)
}

fn milestone(incarnation: u64, log_flushed: u64) -> Milestone {
    Milestone { opening: [incarnation as u8; 16], checkpoint: incarnation, log_flushed }
}

/// The target's sectors: the current ones, and those that survive a restart.
#[derive(Default)]
pub(super) struct Disk {
    current: HashMap<u64, Box<Block>>,
    durable: HashMap<u64, Box<Block>>,
    incarnation: u64,
    flushes: u64,
    pub(super) writes: Vec<(u64, [u8; IV_BYTES])>,
    /// How the changes of each queue ended, by queue name; cleared by a restart.
    ended: HashMap<u64, Vec<Ended>>,
    /// Whether flushes fail.
    fails_flush: bool,
    /// Number of changes marked as sent again after a restart.
    sent_again: u64,
    /// Number of answered questions about outcomes.
    asked: u64,
    /// The store's openings, if it keeps marks.
    openings: Option<Openings>,
    mark: u64,
}

impl Disk {
    fn restart(&mut self) {
        self.current = self.durable.clone();
        self.incarnation += 1;
        self.ended.clear();
    }

    fn store(&mut self, lba: u64, data: &[u8]) {
        for (lba, block) in (lba..).zip(data.as_chunks::<BLOCK_BYTES>().0) {
            self.writes.push((lba, block_iv(block)));
            self.current.insert(lba, Box::new(*block));
        }
    }

    fn current_iv(&self, lba: u64) -> [u8; IV_BYTES] {
        self.current.get(&lba).map_or([0; IV_BYTES], |block| block_iv(block))
    }

    fn execute(&mut self, name: u64, queue: &mut ControllerQueue, command: Command) {
        let Command { slot, operation, lba, blocks, is_forced, is_sent_again, number, .. } =
            command;
        self.sent_again += u64::from(is_sent_again);
        let mut status = Status::SUCCESS;
        let is_change = matches!(
            operation,
            Operation::Write(_) | Operation::WriteIf(_) | Operation::Deallocate(_)
        );
        match operation {
            Operation::Read => {
                let mut data = vec![0; blocks as usize * BLOCK_BYTES];
                for (lba, place) in (lba..).zip(data.as_chunks_mut::<BLOCK_BYTES>().0) {
                    match self.current.get(&lba) {
                        Some(block) => *place = **block,
                        None => set_unwritten(place),
                    }
                }
                queue.complete_read(slot, data);
                return;
            }
            Operation::Write(data) => self.store(lba, &data),
            Operation::WriteIf(mut data) => {
                let blocks = data.as_chunks_mut::<BLOCK_BYTES>().0;
                let expected: Vec<_> = blocks.iter_mut().map(take_expected_iv).collect();
                let fits = (lba..).zip(expected).all(|(lba, iv)| self.current_iv(lba) == iv);
                if fits {
                    self.store(lba, &data);
                } else {
                    status = Status::COMPARE_FAILURE;
                }
            }
            Operation::Outcomes { queue: of, .. } => {
                self.asked += 1;
                let mut block = vec![0; BLOCK_BYTES];
                let changes = self.ended.get(&of).map_or(&[][..], Vec::as_slice);
                outcomes::encode(Some(changes), block.first_chunk_mut().unwrap());
                return queue.complete_read(slot, block);
            }
            Operation::FlushMilestone if self.fails_flush => {
                return queue.complete(slot, Status::WRITE_FAULT, Vec::new());
            }
            Operation::FlushMilestone => {
                self.flushes += 1;
                self.durable = self.current.clone();
                let mut block = vec![0; BLOCK_BYTES];
                let told = milestone(self.incarnation, self.flushes).encode();
                block[..told.len()].copy_from_slice(&told);
                return queue.complete_read(slot, block);
            }
            Operation::Deallocate(ranges) => {
                for LbaRange { lba, blocks } in ranges {
                    (lba..lba + u64::from(blocks)).for_each(|lba| drop(self.current.remove(&lba)));
                }
            }
            Operation::Openings => {
                let mut block = vec![0; BLOCK_BYTES];
                if let Some(openings) = &self.openings {
                    block[..OPENINGS_BYTES].copy_from_slice(&openings.encode());
                }
                return queue.complete_read(slot, block);
            }
            other => panic!("the gateway doesn't send {other:?}"),
        }
        if is_forced && status.is_success() {
            // The minimum that a drive must make durable: the blocks of this command.
            for lba in lba..lba + u64::from(blocks) {
                self.durable.insert(lba, self.current[&lba].clone());
            }
        }
        if is_change && status.is_success() {
            self.ended.entry(name).or_default().push(Ended {
                number,
                status,
                ranges: 0,
                mark: self.mark,
            });
        }
        queue.complete_change(slot, status, self.mark, Vec::new());
    }
}

/// One front-end queue with its host and, while connected, its queue at the target.
pub(super) struct Lane {
    pub(super) host: HostQueue,
    pub(super) gateway: GatewayQueue<ControllerQueue>,
    pub(super) target: Option<ControllerQueue>,
    pub(super) ended: HashMap<u64, (Status, Vec<u8>)>,
    pub(super) tag: u64,
    pub(super) now: u64,
}

pub(super) fn dummy() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

impl Lane {
    fn new(shared: &Arc<Shared>, queue_id: u16) -> Self {
        let name = QueueName { association: 1, queue_id };
        let commands = FRONT_COMMANDS.with(CommandSet::DEALLOCATE);
        let format = namespace(DATA_BYTES, commands);
        Self {
            host: HostQueue::new(HOST, None),
            gateway: {
                let front = ControllerQueue::new(FRONT, vec![format], None);
                GatewayQueue::new(Arc::clone(shared), name, front, FRONT.queue_depth)
            },
            target: None,
            ended: HashMap::new(),
            tag: 0,
            now: SECOND,
        }
    }

    fn connect(&mut self, epoch: u64, incarnation: u64) {
        let queue_id = self.gateway.name.queue_id;
        let target = |confirmed| {
            let milestone = Some(milestone(incarnation, 0));
            Incarnation { number: incarnation, confirmed, milestone }
        };
        let connect = |link: &mut Link| link.connect(epoch, &target(link.milestone()));
        self.gateway.shared.link(connect).unwrap();
        let queue = HostQueue::new(BACK, Some(secure(queue_id, epoch, incarnation)));
        let bound_to = (epoch, incarnation);
        let back = Back::new(Connection::new(dummy()), queue, bound_to, BACK.transfer_max);
        self.gateway.add_back(back, self.now);
        let commands = CommandSet::DEALLOCATE.with(CommandSet::WRITE_IF);
        self.target = Some(ControllerQueue::new(
            BACK_CONTROLLER,
            vec![namespace(BLOCK_BYTES, commands)],
            Some(secure(queue_id, epoch, incarnation)),
        ));
    }

    pub(super) fn lose(&mut self) {
        self.target = None;
        self.gateway.lose_back(Reason::QueueClosed, None, "cut", self.now);
    }

    pub(super) fn submit(&mut self, command: HostCommand) -> u64 {
        self.tag += 1;
        self.host.submit(self.tag, command).unwrap();
        self.tag
    }

    /// Answers a queue's first command, which asks for the store's openings.
    fn greet(&mut self, disk: &mut Disk) {
        let (Some(target), Some(back)) = (&mut self.target, self.gateway.backs.last_mut()) else {
            return;
        };
        if !back.has_openings_answer {
            target.receive(&back.queue.transmit().take());
            let Some(ControllerEvent::Received(command)) = target.next_event() else {
                panic!("a command");
            };
            assert_eq!(command.operation, Operation::Openings);
            disk.execute(back.queue.name(), target, command);
            back.queue.receive(&target.transmit().take());
            self.gateway.take_back_events(self.now);
        }
    }

    /// Transfers all pending bytes once; returns whether there were any. With `cut`, only so many
    /// bytes to and from the target arrive, and then the connection is lost.
    pub(super) fn step(&mut self, disk: &mut Disk, cut: Option<(usize, usize)>) -> bool {
        self.greet(disk);
        let down = self.host.transmit().take();
        self.gateway.front.receive(&down);
        assert_eq!(self.gateway.take_front_events(self.now), None);
        self.gateway.take_back_events(self.now);
        self.gateway.handle_timeout(self.now);
        self.gateway.submit(self.now);
        let mut moved = !down.is_empty();
        if let (Some(target), Some(back)) = (&mut self.target, self.gateway.backs.last_mut()) {
            let mut requests = back.queue.transmit().take();
            moved |= !requests.is_empty();
            if let Some((bytes, _)) = cut {
                requests.truncate(bytes);
            }
            target.receive(&requests);
            let name = back.queue.name();
            while let Some(event) = target.next_event() {
                match event {
                    ControllerEvent::Received(command) => disk.execute(name, target, command),
                    ControllerEvent::Failed { detail, .. } => panic!("{detail}"),
                }
            }
            let mut answers = target.transmit().take();
            moved |= !answers.is_empty();
            if let Some((_, bytes)) = cut {
                answers.truncate(bytes);
            }
            back.queue.receive(&answers);
            self.gateway.take_back_events(self.now);
        }
        if cut.is_some() && self.target.is_some() {
            self.lose();
        }
        let up = self.gateway.front.transmit().take();
        self.host.receive(&up);
        while let Some(event) = self.host.next_event() {
            let HostEvent::Completed { tag, status, data, .. } = event else {
                panic!("the front end failed: {event:?}")
            };
            self.ended.insert(tag, (status, data));
        }
        moved || !up.is_empty()
    }

    pub(super) fn settle(&mut self, disk: &mut Disk) {
        while self.step(disk, None) {}
    }

    pub(super) fn run(&mut self, disk: &mut Disk, command: HostCommand) -> (Status, Vec<u8>) {
        let tag = self.submit(command);
        self.settle(disk);
        self.ended.remove(&tag).expect("the command ended")
    }

    fn write(&mut self, disk: &mut Disk, lba: u64, byte: u8) -> Status {
        let data = vec![byte; DATA_BYTES];
        self.run(disk, HostCommand::Write { lba, data, is_forced: false }).0
    }

    /// Has the target execute the submitted command and end its association. Returns its answer,
    /// which has not reached the gateway.
    fn executed(&mut self, disk: &mut Disk) -> Vec<u8> {
        self.greet(disk);
        let down = self.host.transmit().take();
        self.gateway.front.receive(&down);
        assert_eq!(self.gateway.take_front_events(self.now), None);
        self.gateway.submit(self.now);
        let requests = self.gateway.backs[0].queue.transmit().take();
        let mut target = self.target.take().unwrap();
        target.receive(&requests);
        let Some(ControllerEvent::Received(command)) = target.next_event() else {
            panic!("a command");
        };
        disk.execute(self.gateway.backs[0].queue.name(), &mut target, command);
        target.transmit().take()
    }

    pub(super) fn read(&mut self, disk: &mut Disk, lba: u64) -> u8 {
        let (status, data) = self.run(disk, HostCommand::Read { lba, blocks: 1 });
        assert_eq!(status, Status::SUCCESS);
        assert!(data.iter().all(|byte| *byte == data[0]));
        data[0]
    }
}

pub(super) fn world() -> (Lane, Disk) {
    let mut lane = Lane::new(&shared(settings()), 1);
    let disk = Disk { incarnation: 1, ..Disk::default() };
    lane.connect(1, 1);
    (lane, disk)
}

pub(super) fn failure_of(status: Status) -> Status {
    Status::from_field(status.code() << 1)
}

#[test]
fn unflushed_writes_survive_a_target_that_restarts() {
    let (mut lane, mut disk) = world();
    assert_eq!(lane.write(&mut disk, 3, 7), Status::SUCCESS);
    assert_eq!(lane.write(&mut disk, 4, 8), Status::SUCCESS);
    let deallocate = HostCommand::Deallocate(vec![LbaRange { lba: 4, blocks: 1 }]);
    assert_eq!(lane.run(&mut disk, deallocate).0, Status::SUCCESS);
    lane.lose();
    disk.restart();
    assert!(disk.current.is_empty());
    lane.connect(2, disk.incarnation);
    assert_eq!((lane.read(&mut disk, 3), lane.read(&mut disk, 4)), (7, 0));
}

#[test]
fn a_flush_forgets_exactly_what_was_acknowledged_before_it() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 1, 1);
    assert_eq!(lane.run(&mut disk, HostCommand::Flush).0, Status::SUCCESS);
    lane.write(&mut disk, 2, 2);
    lane.lose();
    disk.restart();
    disk.writes.clear();
    lane.connect(2, disk.incarnation);
    assert_eq!(lane.read(&mut disk, 1), 1);
    let sent_again: Vec<u64> = disk.writes.iter().map(|(lba, _)| *lba).collect();
    assert_eq!(sent_again, [2]);
}

#[test]
fn a_flush_answered_by_an_incarnation_that_is_over_is_asked_again() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 1, 1);
    let flush = lane.submit(HostCommand::Flush);
    let answers = lane.executed(&mut disk);
    // The target's owner rolls its disk back to before the flush, whose answer is still in the
    // socket, and another queue connects first.
    disk.durable.clear();
    disk.restart();
    Lane::new(&lane.gateway.shared, 2).connect(2, disk.incarnation);
    lane.gateway.backs[0].queue.receive(&answers);
    lane.gateway.take_back_events(lane.now);
    assert!(!lane.gateway.shared.link(|link| link.journal.is_empty()));
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&flush].0, Status::SUCCESS);
    assert_eq!(
        (lane.read(&mut disk, 1), disk.flushes),
        (1, 3),
        "including the journal's own flush"
    );
}

#[test]
fn a_write_answered_by_an_incarnation_that_is_over_is_sent_again() {
    let (mut lane, mut disk) = world();
    let data = vec![5; DATA_BYTES];
    let write = lane.submit(HostCommand::Write { lba: 9, data, is_forced: false });
    let answers = lane.executed(&mut disk);
    // The target restarts and loses the write, whose answer is still in the socket, and another
    // queue connects first.
    disk.restart();
    Lane::new(&lane.gateway.shared, 2).connect(2, disk.incarnation);
    lane.gateway.backs[0].queue.receive(&answers);
    lane.gateway.take_back_events(lane.now);
    assert!(lane.gateway.shared.link(|link| link.journal.is_empty()));
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&write].0, Status::SUCCESS);
    assert_eq!(lane.read(&mut disk, 9), 5);
}

#[test]
fn a_write_is_sent_again_as_the_identical_ciphertext() {
    let (mut lane, mut disk) = world();
    let data = vec![5; DATA_BYTES];
    let tag = lane.submit(HostCommand::Write { lba: 9, data, is_forced: false });
    // The write is executed and its answer is lost; then the write itself is lost.
    lane.step(&mut disk, Some((usize::MAX, 0)));
    assert_eq!(lane.ended.get(&tag), None);
    let first = disk.writes.clone();
    disk.restart();
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).unwrap().0, Status::SUCCESS);
    assert_eq!(disk.writes, [first.clone(), first].concat());
}

/// A change is made and its answer is lost; then another gateway changes its blocks.
fn lost_and_overwritten(command: HostCommand) -> (Lane, Disk, Status) {
    let (mut lane, mut disk) = world();
    for lba in 0..4 {
        lane.write(&mut disk, lba, 1);
    }
    let tag = lane.submit(command);
    lane.step(&mut disk, Some((usize::MAX, 0)));
    assert_eq!(lane.ended.get(&tag), None);
    // As if by another gateway: all blocks have other contents.
    for lba in 0..4 {
        disk.current.insert(lba, Box::new([9; BLOCK_BYTES]));
    }
    let (others, before) = (disk.current.clone(), disk.writes.len());
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    let status = lane.ended.remove(&tag).expect("the command ended").0;
    assert!(disk.current == others, "the change was made twice");
    assert_eq!(disk.writes.len(), before);
    (lane, disk, status)
}

#[test]
fn a_change_whose_answer_was_lost_is_not_made_twice() {
    for is_forced in [false, true] {
        let data = vec![2; DATA_BYTES];
        let command = HostCommand::Write { lba: 1, data, is_forced };
        let (lane, disk, status) = lost_and_overwritten(command);
        assert_eq!((status, disk.asked), (Status::SUCCESS, 1));
        assert!(!lane.gateway.shared.link(|link| link.journal.is_empty()), "it isn't flushed");
    }
    let ranges = vec![LbaRange { lba: 0, blocks: 1 }, LbaRange { lba: 2, blocks: 2 }];
    assert_eq!(lost_and_overwritten(HostCommand::Deallocate(ranges)).2, Status::SUCCESS);
}

#[test]
fn a_change_that_was_not_made_is_sent_again_and_one_that_failed_is_not() {
    let failed = Ended { number: 2, status: Status::WRITE_FAULT, ranges: 0, mark: 0 };
    for (known, ended) in [(None, Status::SUCCESS), (Some(failed), Status::WRITE_FAULT)] {
        let (mut lane, mut disk) = world();
        let name = lane.gateway.backs[0].queue.name();
        let tag =
            lane.submit(HostCommand::Write { lba: 9, data: vec![5; DATA_BYTES], is_forced: false });
        lane.step(&mut disk, Some((0, 0)));
        disk.ended.entry(name).or_default().extend(known);
        lane.connect(2, disk.incarnation);
        lane.settle(&mut disk);
        assert_eq!(lane.ended.remove(&tag).unwrap().0, ended);
        assert_eq!(disk.writes.len(), usize::from(known.is_none()));
        let held = lane.gateway.shared.link(|link| link.begin(std::slice::from_ref(&(9..10)), 10));
        assert_eq!(held, link::Begin::Begun, "its blocks are free again");
    }
}

#[test]
fn a_question_that_is_lost_is_asked_again_of_the_first_queue() {
    let (mut lane, mut disk) = world();
    let data = vec![5; DATA_BYTES];
    let tag = lane.submit(HostCommand::Write { lba: 9, data, is_forced: false });
    lane.step(&mut disk, Some((usize::MAX, 0)));
    for epoch in 2..5 {
        lane.connect(epoch, disk.incarnation);
        lane.step(&mut disk, Some((usize::MAX, 0)));
    }
    assert_eq!(disk.asked, 3);
    lane.connect(5, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).unwrap().0, Status::SUCCESS);
    assert_eq!((disk.writes.len(), disk.asked), (1, 4));
}

#[test]
fn a_change_that_its_target_has_forgotten_is_not_claimed_and_not_made_again() {
    let (mut lane, mut disk) = world();
    let data = vec![5; DATA_BYTES];
    let tag = lane.submit(HostCommand::Write { lba: 9, data, is_forced: false });
    lane.step(&mut disk, Some((0, 0)));
    lane.connect(2, disk.incarnation);
    lane.gateway.submit(lane.now);
    let asked = lane.gateway.backs[0].queue.outstanding();
    assert_eq!(asked, 2, "the openings, and the outcome of the write");
    let name = secure(1, 1, 1).name();
    lane.gateway.take_outcomes(name, Status::SUCCESS, &[0; BLOCK_BYTES]);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).unwrap().0, Status::INTERNAL_PATH_ERROR.final_());
    assert!(disk.writes.is_empty());
}

#[test]
fn the_rest_of_a_deallocation_that_was_done_in_part_is_done() {
    let (mut lane, mut disk) = world();
    for lba in 0..3 {
        lane.write(&mut disk, lba, 1);
    }
    let name = lane.gateway.backs[0].queue.name();
    let ranges = (0..3).map(|lba| LbaRange { lba, blocks: 1 }).collect();
    let tag = lane.submit(HostCommand::Deallocate(ranges));
    lane.step(&mut disk, Some((0, 0)));
    let aborted = Ended { number: 5, status: Status::ABORTED, ranges: 2, mark: 0 };
    disk.ended.entry(name).or_default().push(aborted);
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).unwrap().0, Status::SUCCESS);
    let left: Vec<u64> = (0..3).filter(|lba| disk.current.contains_key(lba)).collect();
    assert_eq!(left, [0, 1], "ranges done before may have been changed by others");
    // A target that restarts has lost all of it.
    lane.lose();
    disk.restart();
    disk.durable.clear();
    lane.connect(3, disk.incarnation);
    assert!((0..3).all(|lba| lane.read(&mut disk, lba) == 0));
}

#[test]
fn a_replay_never_undoes_a_write_acknowledged_as_durable() {
    // Changes of blocks 3 and 4; the last argument says whether a write is durable when answered.
    let write = |lba, count: usize, byte, is_forced| HostCommand::Write {
        lba,
        data: vec![byte; count * DATA_BYTES],
        is_forced,
    };
    let deallocate = HostCommand::Deallocate(vec![LbaRange { lba: 3, blocks: 2 }]);
    let histories = [
        vec![write(3, 1, 1, false), write(3, 1, 2, true)],
        vec![write(2, 3, 1, false), write(3, 1, 2, true)],
        vec![deallocate, write(3, 1, 2, true), write(4, 1, 3, false)],
        vec![write(3, 2, 1, false), write(3, 1, 2, true), write(4, 1, 3, false)],
    ];
    for history in histories {
        // Target and gateway die again after some bytes of the replay have arrived.
        for bytes in (0..40_000).step_by(1000) {
            let (mut lane, mut disk) = world();
            for command in history.clone() {
                assert_eq!(lane.run(&mut disk, command).0, Status::SUCCESS);
            }
            lane.lose();
            disk.restart();
            lane.connect(2, disk.incarnation);
            lane.step(&mut disk, Some((bytes, 0)));
            // Whether or not the current blocks are durable.
            for left in [&disk.durable, &disk.current] {
                let block = left.get(&3).expect("it was durable").as_ref();
                let mut plain = [0; DATA_BYTES];
                lane.gateway.shared.keys.open(3, block, &mut plain).expect("opens");
                assert!(plain == [2; DATA_BYTES], "{bytes} bytes of the replay arrived");
            }
        }
    }
}

#[test]
fn only_acknowledged_changes_are_marked_as_sent_again() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 3, 7);
    let ranges = vec![LbaRange { lba: 4, blocks: 1 }];
    assert_eq!(lane.run(&mut disk, HostCommand::Deallocate(ranges)).0, Status::SUCCESS);
    // The host still waits for this one: it may be ordered after anything acknowledged to others.
    let data = vec![9; DATA_BYTES];
    let tag = lane.submit(HostCommand::Write { lba: 5, data, is_forced: false });
    lane.lose();
    disk.restart();
    assert_eq!(disk.sent_again, 0);
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).expect("answered").0, Status::SUCCESS);
    assert_eq!(disk.sent_again, 2, "the write and the deallocation of the journal");
}

#[test]
fn a_replay_is_flushed_before_anything_else_is_sent() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 3, 7);
    lane.lose();
    disk.restart();
    lane.connect(2, disk.incarnation);
    let read = lane.submit(HostCommand::Read { lba: 3, blocks: 1 });
    lane.step(&mut disk, None);
    assert_eq!((disk.writes.len(), disk.flushes), (2, 0));
    lane.step(&mut disk, None);
    assert_eq!(disk.flushes, 1);
    assert!(!lane.ended.contains_key(&read));
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&read].1, vec![7; DATA_BYTES]);
    disk.restart();
    assert_eq!(disk.current.len(), 1);
    assert!(lane.gateway.shared.link(|link| link.journal.is_empty()));
}

#[test]
fn pieces_made_by_an_interrupted_replay_are_not_sent_again() {
    let common = shared(settings());
    let mut lanes = [Lane::new(&common, 1), Lane::new(&common, 2)];
    let mut disk = Disk { incarnation: 1, ..Disk::default() };
    lanes[0].connect(1, 1);
    for lba in 0..6 {
        lanes[0].write(&mut disk, lba, 1);
    }
    lanes[0].lose();
    disk.restart();
    disk.writes.clear();
    lanes[0].connect(2, disk.incarnation);
    // Three blocks arrive, but none of the answers.
    lanes[0].step(&mut disk, Some((3 * (BLOCK_BYTES + 72) + 10, 0)));
    let arrived: Vec<u64> = disk.writes.iter().map(|(lba, _)| *lba).collect();
    assert_eq!(arrived.len(), 3);
    // Another gateway overwrites them. Another queue continues the replay.
    for lba in &arrived {
        disk.current.insert(*lba, Box::new([9; BLOCK_BYTES]));
    }
    lanes[1].connect(3, disk.incarnation);
    for _ in 0..4 {
        for lane in &mut lanes {
            lane.settle(&mut disk);
        }
    }
    assert_eq!(common.link(|link| link.phase()), Phase::Ready);
    let mut sent: Vec<u64> = disk.writes.iter().map(|(lba, _)| *lba).collect();
    sent.sort_unstable();
    assert_eq!(sent, [0, 1, 2, 3, 4, 5], "each is sent once");
    assert!(arrived.iter().all(|lba| *disk.current[lba] == [9; BLOCK_BYTES]));
    assert_eq!(disk.asked, 1);
}

/// A gateway, and a target whose store keeps marks and is in its first opening.
fn marked_world() -> (Lane, Disk) {
    let mut lane = Lane::new(&shared(settings()), 1);
    let openings = Some(Openings { now: milestone(1, 0), earlier: Vec::new() });
    let disk = Disk { incarnation: 1, openings, ..Disk::default() };
    lane.connect(1, 1);
    (lane, disk)
}

impl Disk {
    /// Restarts with these earlier openings, latest first: each one's number and how far it had
    /// come.
    fn restart_after(&mut self, earlier: &[(u64, u64)]) {
        self.restart();
        self.writes.clear();
        let earlier = earlier.iter().map(|(opening, found)| milestone(*opening, *found)).collect();
        self.openings = Some(Openings { now: milestone(self.incarnation, 1000), earlier });
    }

    fn write(&mut self, lane: &mut Lane, lba: u64, mark: u64) {
        self.mark = mark;
        assert_eq!(lane.write(self, lba, lba as u8), Status::SUCCESS);
    }

    fn written(&self) -> Vec<u64> {
        self.writes.iter().map(|(lba, _)| *lba).collect()
    }
}

#[test]
fn changes_that_the_store_contains_are_not_replayed() {
    let (mut lane, mut disk) = marked_world();
    for (lba, mark) in [(3, 5), (4, 7), (5, 8)] {
        disk.write(&mut lane, lba, mark);
    }
    lane.lose();
    disk.restart_after(&[(1, 7)]);
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(disk.written(), [5]);
    assert_eq!(disk.flushes, 1, "changes that were left out are flushed as well");
    assert!(lane.gateway.shared.link(|link| link.journal.is_empty()));
}

#[test]
fn answers_about_outcomes_carry_marks_as_well() {
    let (mut lane, mut disk) = marked_world();
    disk.mark = 5;
    let write = HostCommand::Write { lba: 3, data: vec![3; DATA_BYTES], is_forced: false };
    let tag = lane.submit(write);
    lane.step(&mut disk, Some((usize::MAX, 0)));
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).unwrap().0, Status::SUCCESS);
    lane.lose();
    disk.restart_after(&[(1, 5)]);
    lane.connect(3, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(disk.written(), []);
}

#[test]
fn a_replayed_change_has_the_mark_of_the_incarnation_that_acknowledged_it() {
    let (mut lane, mut disk) = marked_world();
    disk.write(&mut lane, 3, 5);
    lane.lose();
    disk.restart_after(&[(1, 4)]);
    disk.fails_flush = true;
    disk.mark = 1005;
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(disk.written(), [3]);
    disk.fails_flush = false;
    disk.restart_after(&[(2, 1005), (1, 4)]);
    lane.connect(3, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(disk.written(), []);
    assert_eq!(lane.gateway.shared.link(|link| link.phase()), Phase::Ready);
}

#[test]
fn a_gateway_that_was_absent_while_others_changed_something_fails() {
    // In the second case nothing was changed in opening 2, so it isn't listed.
    for (earlier, phase) in
        [(&[(2, 1001), (1, 4)][..], Phase::Failed), (&[(1, 4)][..], Phase::Ready)]
    {
        let (mut lane, mut disk) = marked_world();
        disk.write(&mut lane, 3, 5);
        lane.lose();
        disk.restart();
        disk.restart_after(earlier);
        lane.connect(2, disk.incarnation);
        let read = lane.submit(HostCommand::Read { lba: 3, blocks: 1 });
        lane.settle(&mut disk);
        assert_eq!(lane.gateway.shared.link(|link| link.phase()), phase);
        let failed = Status::INTERNAL_ERROR.final_();
        let expected = if phase == Phase::Failed { failed } else { Status::SUCCESS };
        assert_eq!(lane.ended[&read].0, expected);
    }
}

#[test]
fn a_gateway_whose_own_change_is_the_only_newer_one_goes_on() {
    let (mut lane, mut disk) = marked_world();
    for lba in 3..6 {
        disk.write(&mut lane, lba, 5);
    }
    lane.lose();
    disk.restart_after(&[(1, 4)]);
    disk.mark = 1001;
    lane.connect(2, disk.incarnation);
    // One piece arrives and is answered; then the connection ends.
    lane.greet(&mut disk);
    lane.step(&mut disk, Some((BLOCK_BYTES + 72 + 10, usize::MAX)));
    assert_eq!(disk.written().len(), 1);
    let first = disk.written()[0];
    disk.restart_after(&[(2, 1001), (1, 4)]);
    lane.connect(3, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.gateway.shared.link(|link| link.phase()), Phase::Ready);
    let mut written = disk.written();
    written.sort_unstable();
    assert_eq!(written, (3..6).filter(|lba| *lba != first).collect::<Vec<_>>());
}

#[test]
fn a_lost_compare_and_write_is_neither_executed_twice_nor_reported_as_failed() {
    for (is_executed, is_restarted) in [(true, false), (false, false), (true, true)] {
        let (mut lane, mut disk) = world();
        lane.write(&mut disk, 6, 1);
        let tag = lane.submit(HostCommand::CompareAndWrite {
            lba: 6,
            expected: vec![1; DATA_BYTES],
            data: vec![2; DATA_BYTES],
        });
        lane.step(&mut disk, None);
        lane.step(&mut disk, Some(if is_executed { (usize::MAX, 0) } else { (0, 0) }));
        let has_new = disk.writes.len() == 2;
        assert_eq!(has_new, is_executed);
        if is_restarted {
            disk.durable = disk.current.clone();
            disk.restart();
        }
        lane.connect(2, disk.incarnation);
        lane.settle(&mut disk);
        assert_eq!(lane.ended.remove(&tag).unwrap().0, Status::SUCCESS);
        assert_eq!(lane.read(&mut disk, 6), 2);
    }
}

#[test]
fn a_compare_and_write_of_unknown_outcome_is_not_reported_as_successful() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 6, 1);
    lane.write(&mut disk, 7, 1);
    assert_eq!(lane.run(&mut disk, HostCommand::Flush).0, Status::SUCCESS);
    let (expected, data) = (vec![1; DATA_BYTES], vec![2; DATA_BYTES]);
    let tag = lane.submit(HostCommand::CompareAndWrite { lba: 6, expected, data });
    lane.step(&mut disk, None);
    lane.step(&mut disk, Some((0, 0)));
    // It might have been executed and overwritten since.
    let others = disk.current[&7].clone();
    disk.durable.insert(6, others);
    disk.restart();
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).unwrap().0, Status::INTERNAL_PATH_ERROR.final_());
}

#[test]
fn a_compare_and_write_fails_if_other_data_are_stored() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 6, 1);
    let (expected, data) = (vec![9; DATA_BYTES], vec![2; DATA_BYTES]);
    let swap = HostCommand::CompareAndWrite { lba: 6, expected, data };
    assert_eq!(failure_of(lane.run(&mut disk, swap).0), Status::COMPARE_FAILURE);
    let compare = HostCommand::Compare { lba: 6, data: vec![1; DATA_BYTES] };
    assert_eq!(lane.run(&mut disk, compare).0, Status::SUCCESS);
    let compare = HostCommand::Compare { lba: 5, data: vec![1; DATA_BYTES] };
    assert_eq!(failure_of(lane.run(&mut disk, compare).0), Status::COMPARE_FAILURE);
    assert_eq!(lane.run(&mut disk, HostCommand::Verify { lba: 0, blocks: 64 }).0, Status::SUCCESS);
    assert_eq!(lane.read(&mut disk, 6), 1);
}

#[test]
fn a_compare_and_write_compares_with_another_gateways_write_in_between() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 6, 1);
    lane.write(&mut disk, 7, 1);
    let others = disk.current[&7].clone();
    let (expected, data) = (vec![1; DATA_BYTES], vec![2; DATA_BYTES]);
    let tag = lane.submit(HostCommand::CompareAndWrite { lba: 6, expected, data });
    lane.step(&mut disk, None);
    // Sealed for another LBA: it doesn't open when it is read again, and is never replaced.
    disk.current.insert(6, others);
    lane.settle(&mut disk);
    assert_eq!(failure_of(lane.ended.remove(&tag).unwrap().0), Status::GUARD_CHECK);
    assert_eq!(disk.current_iv(6), disk.current_iv(7));
}

#[test]
fn commands_are_held_for_a_back_end_and_then_given_up() {
    let (mut lane, mut disk) = world();
    lane.lose();
    let tag = lane.submit(HostCommand::Read { lba: 0, blocks: 1 });
    lane.now += 59 * SECOND;
    lane.settle(&mut disk);
    assert!(lane.ended.is_empty());
    assert_eq!(lane.gateway.next_timeout(), Some(61 * SECOND));
    lane.now += SECOND;
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&tag].0, Status::INTERNAL_PATH_ERROR);
    let (status, _) = lane.run(&mut disk, HostCommand::Flush);
    assert_eq!(status, Status::INTERNAL_PATH_ERROR, "new commands fail, too, and at once");
    lane.connect(2, disk.incarnation);
    assert_eq!(lane.read(&mut disk, 0), 0);
}

#[test]
fn answered_commands_are_measured_and_those_in_flight_are_not() {
    let (mut lane, mut disk) = world();
    let shared = Arc::clone(&lane.gateway.shared);
    let measured = || Io::ALL.map(|io| shared.latencies.count(io));
    lane.submit(HostCommand::Read { lba: 0, blocks: 1 });
    lane.target = None;
    lane.settle(&mut disk);
    assert_eq!(measured(), [0, 0, 0]);
    lane.lose();
    lane.now += 60 * SECOND;
    lane.settle(&mut disk);
    assert_eq!(measured(), [1, 0, 0], "given up, which is an answer, too");
    lane.connect(2, disk.incarnation);
    assert_eq!(lane.write(&mut disk, 0, 1), Status::SUCCESS);
    assert_eq!(measured(), [1, 1, 0]);
    lane.run(&mut disk, HostCommand::Flush);
    assert_eq!(measured(), [1, 1, 1]);
}

#[test]
fn a_silent_target_is_given_up_after_the_command_time_out() {
    let (mut lane, mut disk) = world();
    let tag = lane.submit(HostCommand::Read { lba: 0, blocks: 1 });
    lane.target = None;
    lane.settle(&mut disk);
    assert_eq!(lane.gateway.next_timeout(), Some(31 * SECOND));
    lane.now += 30 * SECOND;
    lane.settle(&mut disk);
    assert_eq!(lane.gateway.shared.link(|link| link.phase()), Phase::Lost);
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&tag].0, Status::SUCCESS);
}

#[test]
fn a_journal_is_flushed_before_writes_have_to_wait_for_it() {
    let (mut lane, mut disk) = world();
    for index in 0..JOURNAL_BYTES_MIN / BLOCK_BYTES + 8 {
        assert_eq!(lane.write(&mut disk, index as u64 % BLOCKS, index as u8), Status::SUCCESS);
        assert!(lane.gateway.shared.link(|link| link.journal.bytes()) <= JOURNAL_BYTES_MIN);
    }
    assert_eq!(disk.flushes, 2, "whenever it is half full");
}

#[test]
fn keys_are_replaced_before_they_are_used_up_and_nothing_is_lost() {
    let mut lane =
        Lane::new(&shared(GatewaySettings { commands_per_key_max: 17, ..settings() }), 1);
    let mut disk = Disk { incarnation: 1, ..Disk::default() };
    lane.connect(1, 1);
    for index in 0..14 {
        lane.write(&mut disk, index, 1);
    }
    let kinds = |lane: &Lane| {
        let events = lane.gateway.shared.events.take();
        events.into_iter().map(|event| event.kind).collect::<Vec<_>>()
    };
    assert_eq!(kinds(&lane), ["rekey_due"]);
    for index in 14..16 {
        lane.write(&mut disk, index, 1);
    }
    // The keys are used up: the next command waits for new ones.
    let data = vec![1; DATA_BYTES];
    let tag = lane.submit(HostCommand::Write { lba: 16, data, is_forced: false });
    lane.settle(&mut disk);
    assert!(!lane.ended.contains_key(&tag));
    lane.connect(1, 1);
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&tag].0, Status::SUCCESS);
    assert_eq!(kinds(&lane), ["queue_rekeyed"]);
}

#[test]
fn a_journal_that_the_target_refuses_fails_the_volume() {
    let (mut lane, mut disk) = world();
    lane.write(&mut disk, 60, 7);
    lane.lose();
    disk.restart();
    lane.connect(2, disk.incarnation);
    let small = NamespaceFormat { block_count: 8, ..namespace(BLOCK_BYTES, CommandSet::NONE) };
    lane.target = Some(ControllerQueue::new(
        BACK_CONTROLLER,
        vec![small],
        Some(secure(1, 2, disk.incarnation)),
    ));
    let tag = lane.submit(HostCommand::Read { lba: 0, blocks: 1 });
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&tag].0, Status::INTERNAL_ERROR.final_());
    let events = lane.gateway.shared.events.take();
    let failed = events.iter().find(|event| event.kind == "volume_failed").unwrap();
    assert_eq!(failed.reason, "journal.refused");
}

#[test]
fn reads_wait_until_changes_that_may_have_been_seen_are_made_again() {
    for is_in_flight in [false, true] {
        let common = shared(settings());
        let (mut writer, mut reader) = (Lane::new(&common, 1), Lane::new(&common, 2));
        let mut disk = Disk { incarnation: 1, ..Disk::default() };
        writer.connect(1, 1);
        reader.connect(1, 1);
        let data = vec![5; DATA_BYTES];
        writer.submit(HostCommand::Write { lba: 9, data, is_forced: false });
        let mut tag = None;
        if is_in_flight {
            tag = Some(reader.submit(HostCommand::Read { lba: 9, blocks: 1 }));
            let down = reader.host.transmit().take();
            reader.gateway.front.receive(&down);
            assert_eq!(reader.gateway.take_front_events(reader.now), None);
            reader.gateway.submit(reader.now);
        }
        writer.step(&mut disk, Some((usize::MAX, 0)));
        disk.restart();
        reader.target = None;
        reader.connect(2, disk.incarnation);
        let tag = tag.unwrap_or_else(|| reader.submit(HostCommand::Read { lba: 9, blocks: 1 }));
        reader.settle(&mut disk);
        assert!(reader.ended.is_empty(), "the write hasn't been made again");
        writer.connect(2, disk.incarnation);
        writer.settle(&mut disk);
        reader.settle(&mut disk);
        assert_eq!(reader.ended[&tag].1, vec![5; DATA_BYTES]);
    }
}

#[test]
fn unsent_writes_of_a_host_that_is_gone_are_dropped() {
    let (mut lane, mut disk) = world();
    let data = vec![5; DATA_BYTES];
    lane.submit(HostCommand::Write { lba: 9, data, is_forced: false });
    lane.step(&mut disk, Some((0, 0)));
    lane.gateway.abandon();
    lane.connect(2, disk.incarnation);
    lane.greet(&mut disk);
    lane.gateway.submit(lane.now);
    let back = lane.gateway.backs.last_mut().unwrap();
    assert_eq!(back.queue.transmit().pending_bytes(), 0, "something was sent");
    assert!(lane.gateway.parts.is_empty());
    let blocks = 9..10;
    let begun = lane.gateway.shared.link(|link| link.begin(std::slice::from_ref(&blocks), 10));
    assert_eq!(begun, link::Begin::Begun, "its blocks are free again");
}

#[test]
fn a_queue_that_ends_with_commands_at_the_target_ends_the_association() {
    let (mut lane, mut disk) = world();
    let data = vec![5; DATA_BYTES];
    lane.submit(HostCommand::Write { lba: 9, data, is_forced: false });
    lane.target = None;
    lane.settle(&mut disk);
    let shared = Arc::clone(&lane.gateway.shared);
    drop(lane);
    assert_eq!(shared.link(|link| link.phase()), Phase::Lost);
}

/// The host's view of one block: its value, and that of a pending change.
#[derive(Clone, Default)]
struct Known {
    value: u8,
    pending: Option<u8>,
}

/// Runs random commands on two queues with random cuts and restarts; reads must not be stale.
/// Before each step, `before` is called with a number and the lane.
pub(super) fn chaos(seed: u64, before: &dyn Fn(u64, &mut Lane)) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let common = shared(settings());
    let mut lanes = [Lane::new(&common, 1), Lane::new(&common, 2)];
    let mut disk = Disk { incarnation: 1, ..Disk::default() };
    let mut known = vec![Known::default(); BLOCKS as usize];
    let mut pending: Vec<(usize, u64, u64, HostCommandKind)> = Vec::new();
    let mut epoch = 1;
    for lane in &mut lanes {
        lane.connect(epoch, 1);
    }
    for turn in 0..600u32 {
        let which = random.next_u32() as usize % 2;
        let lba = u64::from(random.next_u32()) % BLOCKS;
        let value = random.next_u32() as u8 | 1;
        let is_free = known[lba as usize].pending.is_none()
            && !pending.iter().any(|(_, _, other, _)| *other == lba);
        if is_free && pending.len() < 20 {
            let expected = known[lba as usize].value;
            let (command, kind) = match random.next_u32() % 8 {
                0..4 => (
                    HostCommand::Write {
                        lba,
                        data: vec![value; DATA_BYTES],
                        is_forced: value % 8 == 1,
                    },
                    HostCommandKind::Sets(value),
                ),
                4 => (
                    HostCommand::Deallocate(vec![LbaRange { lba, blocks: 1 }]),
                    HostCommandKind::Sets(0),
                ),
                5 => (
                    HostCommand::CompareAndWrite {
                        lba,
                        expected: vec![expected; DATA_BYTES],
                        data: vec![value; DATA_BYTES],
                    },
                    HostCommandKind::Sets(value),
                ),
                6 => (HostCommand::Read { lba, blocks: 1 }, HostCommandKind::Reads),
                _ => (HostCommand::Flush, HostCommandKind::Flushes),
            };
            if let HostCommandKind::Sets(value) = kind {
                known[lba as usize].pending = Some(value);
            }
            let tag = lanes[which].submit(command);
            pending.push((which, tag, lba, kind));
        }
        let cut = random
            .next_u32()
            .is_multiple_of(12)
            .then(|| (random.next_u32() as usize % 20_000, random.next_u32() as usize % 10_000));
        before(seed * 10_000 + u64::from(turn), &mut lanes[which]);
        lanes[which].step(&mut disk, cut);
        if common.link(|link| link.phase()) == Phase::Lost && random.next_u32().is_multiple_of(2) {
            if random.next_u32().is_multiple_of(2) {
                disk.restart();
            }
            epoch += 1;
            for lane in &mut lanes {
                lane.target = None;
                lane.connect(epoch, disk.incarnation);
            }
        }
        check(seed, turn, &mut lanes, &mut known, &mut pending);
    }
    if common.link(|link| link.phase()) == Phase::Lost {
        epoch += 1;
        for lane in &mut lanes {
            lane.target = None;
            lane.connect(epoch, disk.incarnation);
        }
    }
    let mut rounds = 0;
    while !pending.is_empty() {
        for lane in &mut lanes {
            before(seed, lane);
            lane.step(&mut disk, None);
        }
        check(seed, u32::MAX, &mut lanes, &mut known, &mut pending);
        rounds += 1;
        assert!(rounds < 1000, "seed {seed}: {} commands never end", pending.len());
    }
    lanes[0].gateway.switch_acceleration(Switch::Off);
    for lba in 0..BLOCKS {
        assert_eq!(lanes[0].read(&mut disk, lba), known[lba as usize].value, "seed {seed}");
    }
    let mut ivs = HashMap::new();
    for (lba, iv) in &disk.writes {
        assert_eq!(ivs.entry(*iv).or_insert(*lba), lba, "seed {seed}: an IV at two LBAs");
    }
}

#[derive(Clone, Copy)]
enum HostCommandKind {
    Sets(u8),
    Reads,
    Flushes,
}

fn check(
    seed: u64,
    turn: u32,
    lanes: &mut [Lane; 2],
    known: &mut [Known],
    pending: &mut Vec<(usize, u64, u64, HostCommandKind)>,
) {
    pending.retain(|(which, tag, lba, kind)| {
        let Some((status, data)) = lanes[*which].ended.remove(tag) else { return true };
        assert_eq!(status, Status::SUCCESS, "seed {seed}, turn {turn}, block {lba}");
        let block = &mut known[*lba as usize];
        match kind {
            HostCommandKind::Sets(value) => {
                *block = Known { value: *value, pending: None };
            }
            HostCommandKind::Reads => {
                assert_eq!(data[0], block.value, "seed {seed}, turn {turn}, block {lba}: stale");
            }
            HostCommandKind::Flushes => {}
        }
        false
    });
}

#[test]
fn no_read_is_stale_whatever_is_cut_and_lost() {
    for seed in 0..60 {
        chaos(seed, &|_, _| ());
    }
}

/// A volume without unwritten sectors.
fn sealed_world() -> (Lane, Disk) {
    let mut lane = Lane::new(&shared_of(settings(), true), 1);
    let disk = Disk { incarnation: 1, ..Disk::default() };
    lane.connect(1, 1);
    (lane, disk)
}

#[test]
fn a_fully_sealed_volume_accepts_no_unwritten_sector() {
    let (mut lane, mut disk) = sealed_world();
    assert_eq!(lane.write(&mut disk, 4, 1), Status::SUCCESS);
    let (status, _) = lane.run(&mut disk, HostCommand::Read { lba: 4, blocks: 2 });
    assert_eq!(failure_of(status), Status::APPLICATION_TAG_CHECK);
    assert_eq!(lane.read(&mut disk, 4), 1);
}

#[test]
fn a_fully_sealed_volume_seals_zeroes_once_and_sends_the_same_bytes_again() {
    let (mut lane, mut disk) = sealed_world();
    // More than one command to the target can carry.
    let zeroes = HostCommand::WriteZeroes { lba: 3, blocks: 20, deallocate: true };
    let tag = lane.submit(zeroes);
    lane.step(&mut disk, Some((1 << 20, 0)));
    disk.restart();
    lane.connect(2, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&tag).expect("ended").0, Status::SUCCESS);
    assert_eq!(disk.current.len(), 20);
    assert!((3..23).all(|lba| lane.read(&mut disk, lba) == 0));
    let sealed = lane.gateway.shared.counters.sectors_sealed.load(Ordering::Relaxed);
    assert_eq!(sealed, 20, "sent again, not sealed again");
}

#[test]
fn changes_acknowledged_during_a_flush_are_kept() {
    let common = shared(settings());
    let mut lanes = [Lane::new(&common, 1), Lane::new(&common, 2)];
    let mut disk = Disk { incarnation: 1, ..Disk::default() };
    for lane in &mut lanes {
        lane.connect(1, 1);
    }
    lanes[0].write(&mut disk, 1, 1);
    let flush = lanes[0].submit(HostCommand::Flush);
    let answers = lanes[0].executed(&mut disk);
    assert_eq!(lanes[1].write(&mut disk, 2, 2), Status::SUCCESS);
    lanes[0].gateway.backs[0].queue.receive(&answers);
    lanes[0].settle(&mut disk);
    assert_eq!(lanes[0].ended[&flush].0, Status::SUCCESS);
    lanes.iter_mut().for_each(Lane::lose);
    disk.restart();
    for lane in &mut lanes {
        lane.connect(2, disk.incarnation);
    }
    assert_eq!(lanes[0].read(&mut disk, 2), 2);
}

#[test]
fn an_answer_to_a_command_that_was_given_up_does_not_end_its_successor() {
    let (mut lane, mut disk) = world();
    let write =
        |byte| HostCommand::Write { lba: 9, data: vec![byte; DATA_BYTES], is_forced: false };
    let first = lane.submit(write(5));
    lane.step(&mut disk, Some((0, 0)));
    disk.restart();
    // It is sent again, and answered after it was given up and another command has its slot.
    lane.now += 50 * SECOND;
    lane.connect(2, disk.incarnation);
    let answers = lane.executed(&mut disk);
    lane.now += 11 * SECOND;
    lane.settle(&mut disk);
    assert_eq!(lane.ended.remove(&first).unwrap().0, Status::INTERNAL_PATH_ERROR);
    let second = lane.submit(write(6));
    lane.gateway.backs[0].queue.receive(&answers);
    lane.settle(&mut disk);
    assert!(!lane.ended.contains_key(&second), "the target never received it");
    lane.connect(3, disk.incarnation);
    lane.settle(&mut disk);
    assert_eq!(lane.ended[&second].0, Status::SUCCESS);
    assert_eq!(lane.read(&mut disk, 9), 6);
}

#[test]
fn a_failed_flush_of_the_journal_fails_only_commands_that_need_room() {
    let common = shared(settings());
    let mut lanes = [Lane::new(&common, 1), Lane::new(&common, 2)];
    let mut disk = Disk { incarnation: 1, fails_flush: true, ..Disk::default() };
    for lane in &mut lanes {
        lane.connect(1, 1);
    }
    let mut lba = 0;
    while !common.link(|link| link.journal.is_half_full()) {
        lba = (lba + 1) % BLOCKS;
        assert_eq!(lanes[0].write(&mut disk, lba, 1), Status::SUCCESS);
    }
    // The first queue flushes; before that fails, the second one has used up the room.
    lanes[0].submit(HostCommand::Write { lba: 0, data: vec![1; DATA_BYTES], is_forced: false });
    let answers = lanes[0].executed(&mut disk);
    let waiting = loop {
        lba = lba % (BLOCKS - 1) + 1;
        let data = vec![2; DATA_BYTES];
        let tag = lanes[1].submit(HostCommand::Write { lba, data, is_forced: false });
        lanes[1].settle(&mut disk);
        if lanes[1].ended.remove(&tag).is_none() {
            break tag;
        }
    };
    lanes[0].gateway.backs[0].queue.receive(&answers);
    let read = lanes[0].submit(HostCommand::Read { lba: 5, blocks: 1 });
    lanes[0].settle(&mut disk);
    assert!(!lanes[0].ended.contains_key(&read), "it needs no room");
    lanes[1].settle(&mut disk);
    assert_eq!(failure_of(lanes[1].ended[&waiting].0), failure_of(Status::WRITE_FAULT));
}
