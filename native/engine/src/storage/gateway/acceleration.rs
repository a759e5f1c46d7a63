//! Writes whose sectors an accelerator seals.
//!
//! Their parts wait here with claimed blocks, as parts wait that can't be sent yet; the host's
//! plaintext stays in its request. A sector's IV is used up when its job is submitted. What comes
//! back is copied, then checked, and sealed again by the processor, with another IV, if it is wrong.
//! A device that is gone, late, wrong or breaks the protocol is given up: the processor seals everything
//! that it still has, and all later writes, until the control plane gives a new queue.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::aead::Sample;
use sealane_proto::key_ring::KeyRing;
use sealane_proto::link::Nanos;
use sealane_proto::nvme::controller_queue::Operation;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, Block, DATA_BYTES, Iv, Ticket};

use super::add;
use super::front::Front;
use super::journal::Change;
use super::queue::GatewayQueue;
use super::request::{Owner, Part, Request, Work};
use super::submission::{note_seal, seal_sector};
use crate::accelerator::{Broken, Cookie, Done, KeySlot, Queue, Record, SealJob};
use crate::latency::{self, Latencies};

/// How long a job may take. A sector takes a card microseconds; with more, the processor would have
/// been faster, but a busy machine may not run an emulated one for a while.
const DEADLINE: Nanos = 50_000_000;
/// Of how many sectors one is compared with its plaintext as a whole.
const WHOLE_EVERY: u32 = 64;
const BLOCKS_PER_SECTOR: u32 = (DATA_BYTES / 16) as u32;

/// What a device has of a volume: its keys, by key epoch, and the number of its jobs.
#[derive(Debug, Default)]
pub(super) struct AtDevice {
    keys: Mutex<HashMap<u32, KeySlot>>,
    jobs: AtomicUsize,
    pub(super) record: Arc<Record>,
}

impl AtDevice {
    /// Of a device that has nothing yet, with what its users note about it.
    pub(super) fn new(record: Arc<Record>) -> Self {
        Self { record, ..Self::default() }
    }

    pub(super) fn insert(&self, epoch: u32, slot: KeySlot) {
        self.keys().insert(epoch, slot);
    }

    /// Takes the keys out for which `is_taken` returns true for the epoch.
    pub(super) fn take(&self, is_taken: impl Fn(u32) -> bool) -> Vec<KeySlot> {
        self.keys().extract_if(|epoch, _| is_taken(*epoch)).map(|(_, slot)| slot).collect()
    }

    pub(super) fn get(&self, epoch: u32) -> Option<KeySlot> {
        self.keys().get(&epoch).copied()
    }

    pub(super) fn jobs(&self) -> usize {
        self.jobs.load(Ordering::Relaxed)
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<u32, KeySlot>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a queue is to do from now on.
#[derive(Debug)]
pub(super) enum Switch {
    /// Use this device.
    To(Box<Acceleration>),
    /// Give the device that is in use no more jobs; those that it has go on.
    Rest,
    /// Use none.
    Off,
}

/// A part of a write, of which a device seals sectors.
#[derive(Debug)]
struct Write {
    part: Part,
    is_forced: bool,
    /// Private memory for the sealed sectors.
    sealed: Vec<u8>,
    /// Sectors that are missing.
    left: u32,
}

#[derive(Debug)]
struct Job {
    /// Order of its part; a part that was dropped is not found.
    order: u64,
    sector: usize,
    ticket: Ticket,
    submitted: Nanos,
}

impl Job {
    fn deadline(&self) -> Nanos {
        self.submitted.saturating_add(DEADLINE)
    }
}

/// Sectors of a part that were submitted: their place, and what was used up.
pub(super) type Submitted = Vec<(Cookie, usize, Ticket)>;

/// A device's queue, and what it has.
#[derive(Debug)]
pub(super) struct Acceleration {
    queue: Box<dyn Queue>,
    at_device: Arc<AtDevice>,
    is_resting: bool,
    /// By name, so the oldest one is the first.
    jobs: BTreeMap<Cookie, Job>,
    writes: BTreeMap<u64, Write>,
    /// Bytes of these writes.
    waiting_bytes: usize,
    /// Of the jobs that have ended.
    pub(super) latencies: Latencies<1>,
    random: ChaCha8Rng,
}

impl Acceleration {
    /// `seed` must be secret: it decides which sectors are looked at more closely.
    pub(super) fn new(queue: Box<dyn Queue>, at_device: Arc<AtDevice>, seed: [u8; 32]) -> Self {
        Self {
            queue,
            at_device,
            is_resting: false,
            jobs: BTreeMap::new(),
            writes: BTreeMap::new(),
            waiting_bytes: 0,
            latencies: Latencies::new(&latency::JOBS),
            random: ChaCha8Rng::from_seed(seed),
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }

    /// When the oldest job is late.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.jobs.first_key_value().map(|(_, job)| job.deadline())
    }

    /// Whether it takes jobs at all.
    pub(super) fn takes_jobs(&self) -> bool {
        !self.is_resting
    }

    /// Bytes of the parts that wait.
    pub(super) fn waiting_bytes(&self) -> usize {
        self.waiting_bytes
    }

    pub(super) fn hear(&mut self) {
        self.queue.hear();
    }

    pub(super) fn ring(&mut self) {
        self.queue.ring();
    }

    /// Takes the parts out that `ended` names; what comes back for them is ignored.
    pub(super) fn drop_parts(&mut self, ended: impl Fn(&Part) -> bool) -> Vec<Part> {
        let is_gone = |(order, write): (&u64, &Write)| ended(&write.part).then_some(*order);
        let orders: Vec<u64> = self.writes.iter().filter_map(is_gone).collect();
        let gone: Vec<Write> =
            orders.iter().filter_map(|order| self.writes.remove(order)).collect();
        self.waiting_bytes -= gone.iter().map(|write| write.sealed.len()).sum::<usize>();
        gone.into_iter().map(|write| write.part).collect()
    }

    /// Submits a sector if the device has the key and room; otherwise gives the IV back.
    pub(super) fn submit(
        &mut self,
        keys: &KeyRing,
        iv: Iv,
        (lba, plain): (u64, &[u8; DATA_BYTES]),
    ) -> Result<(Cookie, Ticket), Iv> {
        let epoch = keys.newest_epoch();
        let Some(key) = self.at_device.get(epoch).filter(|_| self.queue.has_room()) else {
            add(&self.at_device.record.inline, 1);
            return Err(iv);
        };
        let (ticket, aad) = keys.begin(epoch, iv, lba)?;
        let job = SealJob { key, nonce: ticket.nonce(), aad: &aad, plain };
        let cookie = self.queue.submit(&job).expect("the queue has room");
        add(&self.at_device.record.jobs, 1);
        Ok((cookie, ticket))
    }

    /// Keeps submitted sectors of a part that could not be begun: nobody waits for them, but the
    /// device has to end them.
    pub(super) fn disown(&mut self, submitted: Submitted, now: Nanos) {
        self.watch(0, submitted, now);
    }

    fn watch(&mut self, order: u64, submitted: Submitted, now: Nanos) {
        self.at_device.jobs.fetch_add(submitted.len(), Ordering::Relaxed);
        for (cookie, sector, ticket) in submitted {
            self.jobs.insert(cookie, Job { order, sector, ticket, submitted: now });
        }
    }

    fn ended(&mut self, cookie: Cookie) -> Option<Job> {
        let job = self.jobs.remove(&cookie)?;
        self.at_device.jobs.fetch_sub(1, Ordering::Relaxed);
        Some(job)
    }

    fn sample(&mut self) -> Sample {
        let drawn = self.random.next_u32();
        let (which, place) = (drawn % WHOLE_EVERY, drawn / WHOLE_EVERY % BLOCKS_PER_SECTOR);
        if which == 0 { Sample::Whole } else { Sample::Block(place) }
    }
}

impl Drop for Acceleration {
    fn drop(&mut self) {
        self.at_device.jobs.fetch_sub(self.jobs.len(), Ordering::Relaxed);
    }
}

impl<F: Front> GatewayQueue<F> {
    /// Uses a device's queue from now on, or none, or no more than for what is there.
    pub(super) fn switch_acceleration(&mut self, switch: Switch) {
        match switch {
            Switch::To(acceleration) => {
                self.end_acceleration();
                self.acceleration = Some(*acceleration);
            }
            Switch::Rest => {
                if let Some(acceleration) = &mut self.acceleration {
                    acceleration.is_resting = true;
                }
            }
            Switch::Off => self.end_acceleration(),
        }
    }

    /// Lets a part wait for its submitted sectors.
    pub(super) fn wait_for_device(
        &mut self,
        mut part: Part,
        is_forced: bool,
        (sealed, submitted): (Vec<u8>, Submitted),
        now: Nanos,
    ) {
        let Some(acceleration) = &mut self.acceleration else { return };
        self.orders += 1;
        part.order = self.orders;
        let (order, left) = (part.order, submitted.len() as u32);
        acceleration.watch(order, submitted, now);
        acceleration.waiting_bytes += sealed.len();
        acceleration.writes.insert(order, Write { part, is_forced, sealed, left });
    }

    /// Takes what the device has sealed; gives it up if it is late, wrong or broken.
    pub(super) fn take_sealed(&mut self, now: Nanos) {
        let Some(mut acceleration) = self.acceleration.take() else { return };
        let mut done = Vec::new();
        let polled = acceleration.queue.poll(&mut done);
        let mut wrong = 0;
        for done in done {
            let Some(job) = acceleration.ended(done.cookie) else { continue };
            let duration = now.saturating_sub(job.submitted);
            add(&self.shared.counters.accelerator_nanos, duration);
            add(&acceleration.at_device.record.nanos, duration);
            acceleration.latencies.note(duration);
            let (order, sector) = (job.order, job.sector);
            let sealed = if self.check(&mut acceleration, job, done) {
                Ok(())
            } else {
                wrong += 1;
                self.seal_again(&mut acceleration, order, sector)
            };
            self.sector_ended(&mut acceleration, order, sealed);
        }
        add(&self.shared.counters.accelerator_refusals, wrong);
        add(&acceleration.at_device.record.refusals, wrong);
        let is_late = acceleration.deadline().is_some_and(|deadline| deadline <= now);
        self.acceleration = Some(acceleration);
        if wrong > 0 {
            self.lose_accelerator("accelerator.wrong", "a sector was not sealed as asked");
        } else if let Err(broken) = polled {
            let is_gone = broken == Broken::Gone;
            let reason = if is_gone { "accelerator.gone" } else { "accelerator.protocol" };
            self.lose_accelerator(reason, &broken.to_string());
        } else if is_late {
            self.lose_accelerator("accelerator.late", "a job took too long");
        }
    }

    /// Takes a job's result into the write's memory, and checks it there.
    fn check(&mut self, acceleration: &mut Acceleration, job: Job, done: Done) -> bool {
        let sample = acceleration.sample();
        let Acceleration { queue, writes, at_device, .. } = acceleration;
        let mut unwanted = [0; DATA_BYTES];
        let Some(write) = writes.get_mut(&job.order) else {
            queue.take(done.cookie, &mut unwanted);
            return true;
        };
        let lba = write.part.lba + job.sector as u64;
        let Some((plain, block)) = sector_of(&self.requests, write, job.sector) else {
            queue.take(done.cookie, &mut unwanted);
            return false;
        };
        let tag = queue.take(done.cookie, block.first_chunk_mut().expect("data come first"));
        let epoch = job.ticket.key_epoch();
        let finished = self.shared.keys.finish(job.ticket, plain, &tag, block, sample);
        if !done.is_sealed || finished.is_err() {
            return false;
        }
        add(&self.shared.counters.sectors_accelerated, 1);
        add(&at_device.record.sealed, 1);
        note_seal(&self.shared, (epoch, lba), plain, block).is_ok()
    }

    /// Seals a sector that the device was given, by the processor.
    fn seal_again(
        &mut self,
        acceleration: &mut Acceleration,
        order: u64,
        sector: usize,
    ) -> Result<(), Status> {
        let Some(write) = acceleration.writes.get_mut(&order) else { return Ok(()) };
        let lba = write.part.lba + sector as u64;
        let shared = Arc::clone(&self.shared);
        let iv = self.take_iv(&shared, lba)?;
        let found = sector_of(&self.requests, write, sector);
        let (plain, block) = found.ok_or(Status::ABORTED)?;
        seal_sector(&shared, iv, lba, plain, block)
    }

    /// Counts a sector of a waiting part as ended, and lets the part be sent after the last one.
    fn sector_ended(
        &mut self,
        acceleration: &mut Acceleration,
        order: u64,
        sealed: Result<(), Status>,
    ) {
        let Some(write) = acceleration.writes.get_mut(&order) else { return };
        write.left -= 1;
        // After an error its other sectors are of no more use.
        if write.left > 0 && sealed.is_ok() {
            return;
        }
        let Some(write) = acceleration.writes.remove(&order) else { return };
        let Write { mut part, is_forced, sealed: blocks, .. } = write;
        acceleration.waiting_bytes -= blocks.len();
        match sealed {
            Ok(()) => {
                let change = Change::Write { lba: part.lba, blocks: Arc::new(blocks) };
                part.work = Work::Change { change, is_forced };
                self.again.push(part);
            }
            Err(status) => {
                self.give_up(&part);
                self.part_done(&part, status);
            }
        }
    }

    fn lose_accelerator(&mut self, reason: &'static str, detail: &str) {
        add(&self.shared.counters.accelerators_lost, 1);
        // Before the event, whose reader looks there.
        if let Some(acceleration) = &self.acceleration {
            acceleration.at_device.record.lose(&format!("{reason}: {detail}"));
        }
        self.shared.event(self.name, "accelerator_lost", reason, detail.to_owned());
        self.end_acceleration();
    }

    /// Gives the device's queue up: the processor seals what it has not returned.
    pub(super) fn end_acceleration(&mut self) {
        let Some(mut acceleration) = self.acceleration.take() else { return };
        while let Some(&oldest) = acceleration.jobs.keys().next() {
            let Some(job) = acceleration.ended(oldest) else { break };
            let sealed = self.seal_again(&mut acceleration, job.order, job.sector);
            self.sector_ended(&mut acceleration, job.order, sealed);
        }
        self.again.sort_by_key(|part| part.order);
    }
}

/// A sector of a waiting write: its plaintext, which is in the host's request, and its place.
fn sector_of<'a>(
    requests: &'a [Option<Request>],
    write: &'a mut Write,
    sector: usize,
) -> Option<(&'a [u8; DATA_BYTES], &'a mut Block)> {
    let Owner::Request(slot) = write.part.owner else { return None };
    let request = requests.get(usize::from(slot))?.as_ref()?;
    let Operation::Write(plain) = &request.operation else { return None };
    let plain = plain.get(write.part.plain_range())?.as_chunks::<DATA_BYTES>().0.get(sector)?;
    Some((plain, write.sealed.as_chunks_mut::<BLOCK_BYTES>().0.get_mut(sector)?))
}
