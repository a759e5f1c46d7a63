//! Writes over a device that does everything wrong, in the world of [`super::tests`].

use std::collections::{BTreeMap, HashSet};
use std::os::fd::AsFd;

use sealane_proto::aead::{AeadKey, NONCE_BYTES, TAG_BYTES};

use super::acceleration::{Acceleration, AtDevice, Switch};
use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::VolumeIdentity;

use super::tests::{Disk, Lane, SECOND, chaos, dummy, failure_of, settings, world};
use super::*;
use crate::accelerator::processor::Processor;
use crate::accelerator::{self, Broken, Cookie, Device as _, Done, KeySlot, Queue, SealJob};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Lost,
    Refused,
    WrongTag,
    WrongCiphertext,
    WrongPlaintext,
    OldNonce,
    HiddenNonce,
}

const FAULTS: [Fault; 7] = [
    Fault::Lost,
    Fault::Refused,
    Fault::WrongTag,
    Fault::WrongCiphertext,
    Fault::WrongPlaintext,
    Fault::OldNonce,
    Fault::HiddenNonce,
];

/// Nonces of all jobs that any device got.
type Given = Arc<Mutex<Vec<[u8; NONCE_BYTES]>>>;
type Sealed = (Box<[u8; DATA_BYTES]>, [u8; TAG_BYTES], bool);

/// A device that completes jobs in any order, and one in `good` wrongly.
#[derive(Debug)]
struct Device {
    key: AeadKey,
    depth: usize,
    good: u32,
    only: Option<Fault>,
    breaks: bool,
    is_gone: bool,
    random: ChaCha8Rng,
    given: Given,
    earlier: Option<[u8; NONCE_BYTES]>,
    next: Cookie,
    pending: BTreeMap<Cookie, Option<Sealed>>,
    ended: HashMap<Cookie, Sealed>,
    bell: OwnedFd,
}

impl Queue for Device {
    fn has_room(&self) -> bool {
        self.pending.len() + self.ended.len() < self.depth
    }

    fn submit(&mut self, job: &SealJob<'_>) -> Option<Cookie> {
        assert_eq!(job.key, KeySlot(4));
        self.given.lock().unwrap().push(job.nonce);
        let is_wrong = self.random.next_u32().is_multiple_of(self.good);
        let drawn = FAULTS[self.random.next_u32() as usize % FAULTS.len()];
        let fault = is_wrong.then(|| self.only.unwrap_or(drawn));
        let bit = self.random.next_u32() as usize;
        let mut data = Box::new(*job.plain);
        let is_old = matches!(fault, Some(Fault::OldNonce | Fault::HiddenNonce));
        let nonce = self.earlier.filter(|_| is_old).unwrap_or(job.nonce);
        self.earlier = Some(job.nonce);
        if fault == Some(Fault::WrongPlaintext) {
            data.iter_mut().for_each(|byte| *byte ^= 1);
        }
        let mut tag = self.key.seal(nonce, job.aad, &mut data[..]);
        match fault {
            Some(Fault::WrongTag) => tag[bit % TAG_BYTES] ^= 1,
            Some(Fault::WrongCiphertext) => data[bit % DATA_BYTES] ^= 1,
            Some(Fault::HiddenNonce) => {
                let mut opened = [0; DATA_BYTES];
                let _ = self.key.seal(job.nonce, &[], &mut opened);
                opened.iter_mut().zip(&data[..]).for_each(|(to, from)| *to ^= from);
                tag = self.key.seal(job.nonce, job.aad, &mut opened);
            }
            _ => {}
        }
        self.next += 1;
        let result = (data, tag, fault != Some(Fault::Refused));
        self.pending.insert(self.next, Some(result).filter(|_| fault != Some(Fault::Lost)));
        Some(self.next)
    }

    fn ring(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Broken> {
        for cookie in self.pending.keys().copied().collect::<Vec<_>>() {
            let is_due = self.random.next_u32().is_multiple_of(2);
            if is_due && let Some(Some(result)) = self.pending.get_mut(&cookie).map(Option::take) {
                self.pending.remove(&cookie);
                done.push(Done { cookie, is_sealed: result.2 });
                self.ended.insert(cookie, result);
            }
        }
        let is_broken = self.breaks && self.random.next_u32().is_multiple_of(150);
        match (self.is_gone && !self.pending.is_empty(), is_broken) {
            (true, _) => Err(Broken::Gone),
            (false, true) => Err(Broken::Cookie),
            (false, false) => Ok(()),
        }
    }

    fn take(&mut self, cookie: Cookie, into: &mut [u8; DATA_BYTES]) -> [u8; TAG_BYTES] {
        let (data, tag, _) = self.ended.remove(&cookie).expect("taken once");
        *into = *data;
        tag
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    fn hear(&mut self) {}
}

fn device(seed: u64, good: u32, only: Option<Fault>, given: &Given) -> Device {
    Device {
        key: AeadKey::new(&Secret::take(&mut [3; 32])),
        depth: 6,
        good,
        only,
        breaks: false,
        is_gone: false,
        random: ChaCha8Rng::seed_from_u64(seed),
        given: Arc::clone(given),
        earlier: None,
        next: 0,
        pending: BTreeMap::new(),
        ended: HashMap::new(),
        bell: dummy(),
    }
}

fn on(device: Device) -> Switch {
    on_counted(device, &Arc::default())
}

fn on_counted(device: Device, at_device: &Arc<AtDevice>) -> Switch {
    at_device.insert(1, KeySlot(4));
    Switch::To(Box::new(Acceleration::new(Box::new(device), Arc::clone(at_device), [5; 32])))
}

fn counted(lane: &Lane, counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
    counter(&lane.gateway.shared.counters).load(Ordering::Relaxed)
}

/// Steps until nothing waits for the device, as its completions wake the thread.
fn settle(lane: &mut Lane, disk: &mut Disk) {
    for _ in 0..200 {
        lane.settle(disk);
    }
}

fn write(lane: &mut Lane, disk: &mut Disk, lba: u64, data: Vec<u8>) -> Status {
    let tag = lane.submit(HostCommand::Write { lba, data, is_forced: false });
    settle(lane, disk);
    lane.ended.remove(&tag).expect("the command ended").0
}

/// Plaintext whose sectors differ.
fn data(blocks: usize) -> Vec<u8> {
    (0..blocks * DATA_BYTES).map(|at| (at / 512 + at / DATA_BYTES * 31) as u8).collect()
}

#[test]
fn a_device_seals_what_it_has_room_for_and_the_processor_the_rest() {
    let (mut lane, mut disk) = world();
    let given = Given::default();
    let at_device = Arc::default();
    lane.gateway.switch_acceleration(on_counted(device(1, u32::MAX, None, &given), &at_device));
    // 20 sectors in parts of four; the device has room for six.
    assert_eq!(write(&mut lane, &mut disk, 3, data(20)), Status::SUCCESS);
    let (status, read) = lane.run(&mut disk, HostCommand::Read { lba: 3, blocks: 20 });
    assert!(status.is_success() && read == data(20));
    let accelerated = counted(&lane, |counters| &counters.sectors_accelerated);
    let inline = counted(&lane, |counters| &counters.sectors_inline);
    assert_eq!(accelerated + inline, 20);
    let figures = [&at_device.record.sealed, &at_device.record.inline, &at_device.record.nanos];
    let figures = figures.map(|figure| figure.load(Ordering::Relaxed));
    assert_eq!(figures[..2], [accelerated, inline], "noted at the device, too");
    assert!((6..20).contains(&accelerated), "{accelerated} by the device");
    assert_eq!(counted(&lane, |counters| &counters.sectors_sealed), 20);
    let acceleration = lane.gateway.acceleration.as_ref().expect("in use");
    let nanos = counted(&lane, |counters| &counters.accelerator_nanos);
    assert_eq!(acceleration.latencies.recorded(), (accelerated, nanos), "in the histogram");
    assert_eq!(figures[2], nanos);
    // Without it, nothing is given away.
    lane.gateway.switch_acceleration(Switch::Off);
    assert_eq!(write(&mut lane, &mut disk, 3, data(20)), Status::SUCCESS);
    assert_eq!(given.lock().unwrap().len() as u64, accelerated);
}

#[test]
fn a_device_at_rest_ends_its_jobs_and_gets_no_more() {
    let (mut lane, mut disk) = world();
    let (given, at_device) = (Given::default(), Arc::default());
    lane.gateway.switch_acceleration(on_counted(device(1, u32::MAX, None, &given), &at_device));
    let tag = lane.submit(HostCommand::Write { lba: 3, data: data(4), is_forced: false });
    while at_device.jobs() == 0 {
        lane.step(&mut disk, None);
    }
    lane.gateway.switch_acceleration(Switch::Rest);
    let jobs = given.lock().unwrap().len();
    settle(&mut lane, &mut disk);
    assert_eq!(lane.ended[&tag].0, Status::SUCCESS);
    assert_eq!(at_device.jobs(), 0);
    let accelerated = counted(&lane, |counters| &counters.sectors_accelerated);
    assert_eq!(accelerated, jobs as u64, "by the device, not again by the processor");
    assert_eq!(write(&mut lane, &mut disk, 3, data(4)), Status::SUCCESS);
    assert_eq!(given.lock().unwrap().len(), jobs, "no more");
    assert_eq!(counted(&lane, |counters| &counters.accelerator_jobs), jobs as u64);
    assert_eq!(counted(&lane, |counters| &counters.sectors_inline), 0, "it isn't full");
    lane.gateway.switch_acceleration(on_counted(device(2, u32::MAX, None, &given), &at_device));
    assert_eq!(write(&mut lane, &mut disk, 3, data(4)), Status::SUCCESS);
    assert!(given.lock().unwrap().len() > jobs, "used again");
}

#[test]
fn jobs_of_a_device_that_is_given_up_or_of_a_queue_that_ends_are_no_longer_counted() {
    let (mut lane, mut disk) = world();
    let (given, at_device) = (Given::default(), Arc::default());
    let lost = |seed| on_counted(device(seed, 1, Some(Fault::Lost), &given), &at_device);
    lane.gateway.switch_acceleration(lost(1));
    lane.submit(HostCommand::Write { lba: 9, data: data(2), is_forced: false });
    lane.settle(&mut disk);
    assert_eq!(at_device.jobs(), 2);
    lane.gateway.switch_acceleration(Switch::Off);
    assert_eq!(at_device.jobs(), 0);
    lane.gateway.switch_acceleration(lost(2));
    lane.submit(HostCommand::Write { lba: 20, data: data(2), is_forced: false });
    lane.settle(&mut disk);
    assert_eq!(at_device.jobs(), 2);
    drop(lane);
    assert_eq!(at_device.jobs(), 0);
}

#[test]
fn nothing_that_a_device_does_wrong_is_sent() {
    for fault in FAULTS {
        let (mut lane, mut disk) = world();
        let given = Given::default();
        // All results are wrong, but for the very first one of a nonce that can't be older.
        let at_device = Arc::<AtDevice>::default();
        let device = device(1, 1, Some(fault), &given);
        lane.gateway.switch_acceleration(on_counted(device, &at_device));
        let tag = lane.submit(HostCommand::Write { lba: 0, data: data(8), is_forced: false });
        lane.settle(&mut disk);
        if fault == Fault::Lost {
            assert!(!lane.ended.contains_key(&tag), "it waits for the device");
            let deadline = lane.gateway.next_timeout().expect("a deadline");
            assert!(deadline <= lane.now + 50_000_000);
            lane.now = deadline;
        }
        settle(&mut lane, &mut disk);
        assert_eq!(lane.ended[&tag].0, Status::SUCCESS, "{fault:?}");
        let (status, read) = lane.run(&mut disk, HostCommand::Read { lba: 0, blocks: 8 });
        assert!(status.is_success() && read == data(8), "{fault:?}");
        let used: HashSet<_> = given.lock().unwrap().iter().copied().collect();
        assert_eq!(used.len(), given.lock().unwrap().len(), "{fault:?}: a nonce given twice");
        let refused = counted(&lane, |counters| &counters.accelerator_refusals);
        let is_old = matches!(fault, Fault::OldNonce | Fault::HiddenNonce);
        assert_eq!(refused > 0, fault != Fault::Lost, "{fault:?}");
        assert_eq!(counted(&lane, |counters| &counters.accelerators_lost), 1, "{fault:?}");
        assert!(lane.gateway.acceleration.is_none(), "{fault:?}");
        let lost = lane.gateway.shared.events.take();
        let lost = lost.iter().find(|event| event.kind == "accelerator_lost").expect("an event");
        let late = fault == Fault::Lost;
        assert_eq!(lost.reason, if late { "accelerator.late" } else { "accelerator.wrong" });
        let record = &at_device.record;
        assert!(record.loss().is_some_and(|loss| loss.starts_with(lost.reason)), "{fault:?}");
        let noted = [&record.losses, &record.refusals, &record.jobs];
        let noted = noted.map(|figure| figure.load(Ordering::Relaxed));
        assert_eq!(noted, [1, refused, used.len() as u64], "{fault:?}");
        let kept = disk.writes.iter().filter(|(_, iv)| used.contains(iv)).count();
        assert!(kept <= usize::from(is_old), "{fault:?}: an IV that was given away is used up");
    }
}

#[test]
fn what_a_device_that_is_gone_has_is_sealed_at_once() {
    let (mut lane, mut disk) = world();
    let (given, at_device) = (Given::default(), Arc::<AtDevice>::default());
    let dies = Device { is_gone: true, ..device(1, 1, Some(Fault::Lost), &given) };
    lane.gateway.switch_acceleration(on_counted(dies, &at_device));
    let before = lane.now;
    assert_eq!(write(&mut lane, &mut disk, 0, data(8)), Status::SUCCESS);
    assert!(lane.now < before + 50_000_000, "without a deadline");
    assert!(!given.lock().unwrap().is_empty());
    let (status, read) = lane.run(&mut disk, HostCommand::Read { lba: 0, blocks: 8 });
    assert!(status.is_success() && read == data(8));
    let events = lane.gateway.shared.events.take();
    let lost = events.iter().find(|event| event.kind == "accelerator_lost").expect("an event");
    assert_eq!(lost.reason, "accelerator.gone");
    assert!(at_device.record.loss().is_some_and(|loss| loss.starts_with("accelerator.gone")));
}

#[test]
fn any_other_reason_says_more_than_that_a_device_is_gone() {
    let record = accelerator::Record::default();
    let said = [
        ("accelerator.gone: 1", "accelerator.gone: 1"),
        ("accelerator.gone: 2", "accelerator.gone: 1"),
        ("accelerator.wrong: 3", "accelerator.wrong: 3"),
        ("accelerator.late: 4", "accelerator.wrong: 3"),
        ("accelerator.gone: 5", "accelerator.wrong: 3"),
    ];
    for (why, loss) in said {
        record.lose(why);
        assert_eq!(record.loss().as_deref(), Some(loss));
    }
    assert_eq!(record.losses.load(Ordering::Relaxed), 5);
}

#[test]
fn a_host_that_is_gone_leaves_nothing_at_the_device() {
    let (mut lane, mut disk) = world();
    let given = Given::default();
    let lost = device(1, 1, Some(Fault::Lost), &given);
    lane.gateway.switch_acceleration(on(lost));
    lane.submit(HostCommand::Write { lba: 9, data: data(2), is_forced: false });
    lane.settle(&mut disk);
    lane.gateway.abandon();
    let blocks = 9..11;
    let begun = lane.gateway.shared.link(|link| link.begin(std::slice::from_ref(&blocks), 10));
    assert_eq!(begun, link::Begin::Begun, "its blocks are free again");
    lane.now += SECOND;
    lane.gateway.submit(lane.now);
    assert!(lane.gateway.acceleration.is_none(), "late");
    assert!(lane.gateway.again.is_empty(), "nothing is sealed for nobody");
}

#[test]
fn commands_given_up_at_a_device_end_once() {
    let (mut lane, mut disk) = world();
    let given = Given::default();
    lane.gateway.switch_acceleration(on(device(1, 1, Some(Fault::Lost), &given)));
    let data = data(2);
    let tag = lane.submit(HostCommand::Write { lba: 9, data, is_forced: false });
    lane.settle(&mut disk);
    lane.lose();
    lane.gateway.shared.fail(lane.gateway.name, "volume.test", String::new());
    lane.settle(&mut disk);
    assert_eq!(failure_of(lane.ended[&tag].0), failure_of(Status::INTERNAL_ERROR));
    lane.now += SECOND;
    settle(&mut lane, &mut disk);
    assert!(lane.gateway.again.is_empty() && disk.writes.is_empty());
}

#[test]
fn no_read_is_stale_whatever_a_device_does() {
    for seed in 0..60 {
        let given = Given::default();
        let renew = |seed, lane: &mut Lane| {
            lane.now += 3_000_000;
            if lane.gateway.acceleration.is_none() {
                let mut device = device(seed, 6, None, &given);
                device.breaks = true;
                lane.gateway.switch_acceleration(on(device));
            }
        };
        chaos(seed, &renew);
        let given = given.lock().unwrap();
        let different: HashSet<_> = given.iter().collect();
        assert_eq!(different.len(), given.len(), "seed {seed}: a nonce given twice");
        assert!(given.len() > 20, "seed {seed}: {} jobs", given.len());
    }
}

#[test]
fn a_part_that_lacks_counters_leaves_no_job_behind() {
    let (mut lane, mut disk) = world();
    let given = Given::default();
    lane.gateway.switch_acceleration(on(device(1, u32::MAX, None, &given)));
    lane.gateway.counters = None;
    let leased = std::mem::take(&mut *lane.gateway.shared.leased());
    for _ in 0..8 {
        // Enough for one sector of two.
        lane.gateway.counters = CounterRange::new(2, 1, 1, 1 + COUNTERS_PER_SECTOR).ok();
        let status = write(&mut lane, &mut disk, 0, data(2));
        assert_eq!(failure_of(status), failure_of(Status::from(Reason::LeaseExhausted)));
    }
    assert_eq!(given.lock().unwrap().len(), 8);
    *lane.gateway.shared.leased() = leased;
    lane.gateway.counters = None;
    assert_eq!(write(&mut lane, &mut disk, 0, data(4)), Status::SUCCESS);
    assert_eq!(given.lock().unwrap().len(), 12, "the device has room");
}

#[test]
fn a_device_gets_new_queues_and_keys_when_it_is_given_again_and_loses_all_in_the_end() {
    let identity = VolumeIdentity { volume_id: [1; 16], generation: 1 };
    let keys = KeyRing::new(identity, 1, 1, &Secret::take(&mut [3; 32])).unwrap();
    let format = VolumeFormat { block_count: 8, is_fully_sealed: false, is_read_only: false };
    let volume = GatewayVolume::new(keys, format, settings(), None).unwrap();
    let mailbox = |queue_id| {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let name = QueueName { association: 1, queue_id };
        volume.shared.mailboxes().insert(name, Arc::clone(&mailbox));
        mailbox
    };
    let is_on = |mailbox: &Mailbox| match mailbox.take_acceleration() {
        Some(Switch::To(_)) => Some(true),
        Some(Switch::Off) => Some(false),
        Some(Switch::Rest) | None => None,
    };
    let processor = Arc::new(Processor::default());
    let device: Arc<dyn accelerator::Device> = processor.clone();
    let first = mailbox(1);
    volume.accelerate(Some(Arc::clone(&device))).unwrap();
    assert_eq!(is_on(&first), Some(true));
    volume.add_key(2, &Secret::take(&mut [4; 32])).unwrap();
    let second = mailbox(2);
    volume.accelerate(Some(Arc::clone(&device))).unwrap();
    assert_eq!((is_on(&first), is_on(&second)), (None, Some(true)), "only what is new");
    let next = processor.load(&Secret::take(&mut [5; 32])).unwrap();
    assert_eq!(next, KeySlot(2), "both keys are loaded");
    // Nothing uses the older one any more.
    volume.shared.accelerator().as_mut().unwrap().loaded -= KEPT;
    volume.accelerate(Some(Arc::clone(&device))).unwrap();
    let next = processor.load(&Secret::take(&mut [5; 32])).unwrap();
    assert_eq!(next, KeySlot(0), "the older key is unloaded");
    // A queue that has not heard of it is waited for.
    assert_eq!(volume.rest_accelerator(), 2);
    assert!(matches!(first.take_acceleration(), Some(Switch::Rest)));
    assert_eq!(volume.rest_accelerator(), 1);
    assert!(matches!(second.take_acceleration(), Some(Switch::Rest)));
    assert_eq!(volume.rest_accelerator(), 0);
    // Another one instead.
    let other = Arc::new(Processor::default());
    volume.accelerate(Some(other.clone())).unwrap();
    assert_eq!((is_on(&first), is_on(&second)), (Some(true), Some(true)));
    assert_eq!(processor.load(&Secret::take(&mut [6; 32])).unwrap(), KeySlot(1), "unloaded");
    assert_eq!(other.load(&Secret::take(&mut [6; 32])).unwrap(), KeySlot(1));
    volume.accelerate(None).unwrap();
    assert_eq!((is_on(&first), is_on(&second)), (Some(false), Some(false)));
    volume.accelerate(Some(Arc::clone(&device))).unwrap();
    drop(volume);
    assert_eq!(processor.load(&Secret::take(&mut [7; 32])).unwrap(), KeySlot(3), "unloaded");
}

/// A device that forgets no key.
#[derive(Debug, Default)]
struct Retentive(Processor);

impl accelerator::Device for Retentive {
    fn capabilities(&self) -> &accelerator::Capabilities {
        self.0.capabilities()
    }

    fn record(&self) -> &Arc<accelerator::Record> {
        self.0.record()
    }

    fn evidence(&self, nonce: &[u8; 32]) -> io::Result<Vec<u8>> {
        self.0.evidence(nonce)
    }

    fn load(&self, secret: &Secret) -> io::Result<KeySlot> {
        self.0.load(secret)
    }

    fn unload(&self, _: KeySlot) -> io::Result<()> {
        Err(io::Error::other("the card refused the request"))
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        self.0.queue()
    }
}

#[test]
fn a_device_that_does_not_forget_a_key_is_given_up() {
    let identity = VolumeIdentity { volume_id: [1; 16], generation: 1 };
    let keys = KeyRing::new(identity, 1, 1, &Secret::take(&mut [3; 32])).unwrap();
    let format = VolumeFormat { block_count: 8, is_fully_sealed: false, is_read_only: false };
    let volume = GatewayVolume::new(keys, format, settings(), None).unwrap();
    let device = Arc::new(Retentive::default());
    volume.accelerate(Some(device.clone())).unwrap();
    assert_eq!(device.record().loss(), None);
    volume.accelerate(Some(Arc::new(Processor::default()))).unwrap();
    let loss = device.record().loss();
    assert_eq!(loss.as_deref(), Some("it did not forget a key: the card refused the request"));
}
