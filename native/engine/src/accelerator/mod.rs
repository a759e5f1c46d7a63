//! Accelerators: devices that seal sectors in place of the processor.
//!
//! A device holds keys and sees plaintext, so it is attested before it gets any. It is not trusted
//! to work: whoever uses one snapshots what it wrote, checks that (`KeyRing::finish`), seals again
//! with another IV what is wrong, and gives the device up if it is late or breaks the protocol.
//!
//! A queue owns the memory that its device writes. Nothing of it is used for anything else before
//! the queue is dropped, and then it is released to the system, so a late write reaches nobody.

pub mod card;
pub mod processor;
pub mod wire;

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;
use sealane_proto::aead::{AeadKey, KEY_BYTES, NONCE_BYTES, Secret, TAG_BYTES};
use sealane_proto::sector::DATA_BYTES;

/// What a device says that it can do. It may lie: no value of it makes us read or write elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Name of its kind, for people.
    pub profile: String,
    /// Jobs that a queue may hold, 1 to [`DEPTH_MAX`].
    pub depth: u16,
    /// Keys that it can hold.
    pub key_slots: u16,
    /// Most bytes of additional data.
    pub aad_bytes_max: u16,
    /// Whether nobody can read what travels between host and device: it is part of the machine, or
    /// the bus is encrypted (PCIe IDE).
    pub has_protected_bus: bool,
}

/// Most jobs that a queue holds, whatever the device offers: 4 MiB of sectors.
pub const DEPTH_MAX: u16 = 1024;

/// Place of a key in a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeySlot(pub u16);

/// A sector to be sealed.
#[derive(Debug, Clone, Copy)]
pub struct SealJob<'a> {
    /// Where the device has the key.
    pub key: KeySlot,
    /// The nonce: used up by submitting it, whatever the device does.
    pub nonce: [u8; NONCE_BYTES],
    /// The additional data.
    pub aad: &'a [u8],
    /// The plaintext.
    pub plain: &'a [u8; DATA_BYTES],
}

/// Name of a job on its queue; each is greater than those before.
pub type Cookie = u64;

/// A job that the device says has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// The job.
    pub cookie: Cookie,
    /// Whether the device says that it did it.
    pub is_sealed: bool,
}

/// The device broke the protocol or is gone, and its queue must be dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// It completed a job that isn't in flight: unknown, or completed before.
    #[error("completed a job that is not in flight")]
    Cookie,
    /// It announced more completions than there are jobs in flight.
    #[error("announced more completions than there are jobs")]
    Overrun,
    /// It is gone: its process has ended, or has closed the queue.
    #[error("its process has ended, or has closed the queue")]
    Gone,
}

/// What the volumes that use a device had of it, since it was connected. It outlives the device.
#[derive(Debug, Default)]
pub struct Record {
    /// Sectors that it was given.
    pub jobs: AtomicU64,
    /// Sectors that it sealed.
    pub sealed: AtomicU64,
    /// Sectors that the processor sealed because it was full.
    pub inline: AtomicU64,
    /// Wrong results.
    pub refusals: AtomicU64,
    /// Queues that gave it up.
    pub losses: AtomicU64,
    /// Time of the jobs that have ended.
    pub nanos: AtomicU64,
    loss: Mutex<Option<String>>,
}

impl Record {
    /// Notes that a queue gave the device up.
    pub fn lose(&self, why: &str) {
        self.losses.fetch_add(1, Ordering::Relaxed);
        let mut loss = self.why();
        let is_gone = |why: &str| why.starts_with("accelerator.gone");
        let says_more = |known: &str| is_gone(known) && !is_gone(why);
        if loss.as_deref().is_none_or(says_more) {
            *loss = Some(why.to_owned());
        }
    }

    /// Why a queue gave the device up for the first time, if one has; rather any other reason than
    /// [`Broken::Gone`], which may only follow from it.
    #[must_use]
    pub fn loss(&self) -> Option<String> {
        self.why().clone()
    }

    fn why(&self) -> MutexGuard<'_, Option<String>> {
        self.loss.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device with keys.
pub trait Device: Debug + Send + Sync {
    /// What it says that it can do.
    fn capabilities(&self) -> &Capabilities;

    /// What its users note about it.
    fn record(&self) -> &Arc<Record>;

    /// Its statement about itself, which answers `nonce`. Blocks for up to a second.
    fn evidence(&self, nonce: &[u8; 32]) -> io::Result<Vec<u8>>;

    /// Gives it a key; `StorageFull` if it has no slot left. Blocks for up to a second.
    fn load(&self, secret: &Secret) -> io::Result<KeySlot>;

    /// Makes it forget a key. Blocks for up to a second.
    fn unload(&self, key: KeySlot) -> io::Result<()>;

    /// Opens a queue for one thread; `StorageFull` if none is left. Blocks for up to a second.
    fn queue(&self) -> io::Result<Box<dyn Queue>>;
}

/// Jobs of one thread at a device. Nothing here blocks.
pub trait Queue: Debug + Send {
    /// Whether it takes one more job.
    fn has_room(&self) -> bool;

    /// Hands a job over, with a copy of its plaintext; `None` if the queue is full, or the
    /// additional data too long for it.
    fn submit(&mut self, job: &SealJob<'_>) -> Option<Cookie>;

    /// Tells the device about the jobs submitted since the last call.
    fn ring(&mut self);

    /// Appends the jobs that have ended to `done`, also if the device is gone since. Each must then
    /// be taken.
    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Broken>;

    /// Copies the ciphertext of a job that has ended into `into`, returns its tag, and frees the
    /// job's place. From now on nothing that the device writes can reach the copy.
    fn take(&mut self, cookie: Cookie, into: &mut [u8; DATA_BYTES]) -> [u8; TAG_BYTES];

    /// Readable when there may be something to poll, until [`Self::hear`], and as soon as the device
    /// is gone.
    fn as_fd(&self) -> BorrowedFd<'_>;

    /// Clears [`Self::as_fd`]; to be called before [`Self::poll`].
    fn hear(&mut self);
}

/// Jobs of a probe.
const PROBES: u8 = 8;
/// How long a probe takes at most.
const PROBE: Duration = Duration::from_secs(1);

/// Lets a device seal sectors of its own key, and compares all of them; an error says what was
/// wrong. Blocks for some seconds at most.
pub fn probe(device: &dyn Device) -> io::Result<()> {
    let mut bytes = [0; KEY_BYTES];
    rustix::rand::getrandom(&mut bytes[..], GetRandomFlags::empty())?;
    let secret = Secret::take(&mut bytes);
    let key = device.load(&secret).map_err(|error| match error.kind() {
        io::ErrorKind::StorageFull => io::Error::other("its places for keys are all taken"),
        _ => error,
    })?;
    let outcome = probe_with(device, key, &AeadKey::new(&secret));
    device.unload(key)?;
    outcome
}

fn probe_with(device: &dyn Device, key: KeySlot, reference: &AeadKey) -> io::Result<()> {
    let mut queue = device.queue()?;
    let late = Instant::now() + PROBE;
    for number in 0..PROBES {
        let (nonce, aad) = ([number; NONCE_BYTES], [number; 33]);
        let plain = [number.wrapping_mul(37); DATA_BYTES];
        let cookie = queue
            .submit(&SealJob { key, nonce, aad: &aad, plain: &plain })
            .ok_or_else(|| io::Error::other("it took no job"))?;
        queue.ring();
        let mut done = Vec::new();
        while done.is_empty() {
            let left = late.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).unwrap_or_default();
            let mut called = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
            let polled = match poll(&mut called, Some(&timeout)) {
                // After a signal, for the time that is left.
                Err(Errno::INTR) if !left.is_zero() => continue,
                polled => polled?,
            };
            if left.is_zero() || polled == 0 {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "a probe was not answered"));
            }
            queue.hear();
            queue.poll(&mut done).map_err(io::Error::other)?;
        }
        if done != [(Done { cookie, is_sealed: true })] {
            return Err(io::Error::other("it refused a probe"));
        }
        let (mut made, mut expected) = ([0; DATA_BYTES], plain);
        let tag = queue.take(cookie, &mut made);
        if reference.seal(nonce, &aad, &mut expected) != tag || made != expected {
            return Err(io::Error::other("it sealed a probe wrongly"));
        }
    }
    Ok(())
}
