//! A driver of a device: a shared object that exports what `include/sealane_driver.h` asks for.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use libloading::Library;
use sealane_engine::accelerator::wire::{Submission, data_offset};
use sealane_proto::aead::{NONCE_BYTES, Secret};
use sealane_proto::sector::AAD_BYTES;

use crate::engine::{Daemon, Engine, Limits, Owners, QueueNumber};
use crate::rings::Rings;

const VERSION: u32 = 1;
/// Most jobs of a queue.
const DEPTH: u16 = 256;
/// Jobs handed over, and completions asked for, at once.
const BURST: usize = 32;
/// How long a device may take to end the jobs of a queue or a key that goes away.
const END: Duration = Duration::from_secs(1);
const ERROR_BYTES: usize = 256;
const PAGE_BYTES: usize = 4096;
/// Rounds after which daemons' requests are heard again, however much there is to seal.
const ROUNDS: usize = 64;

#[repr(C)]
#[derive(Default)]
struct RawLimits {
    keys: u16,
    jobs: u16,
    product: [u8; 20],
}

#[repr(C)]
struct RawJob {
    data: *mut u8,
    name: u16,
    key: u16,
    nonce: [u8; NONCE_BYTES],
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct RawDone {
    name: u16,
    is_sealed: u16,
}

#[repr(C)]
struct Functions {
    version: u32,
    start: unsafe extern "C" fn(
        count: c_uint,
        arguments: *const *const c_char,
        limits: *mut RawLimits,
        error: *mut c_char,
        error_bytes: usize,
    ) -> c_int,
    load: unsafe extern "C" fn(place: u16, key: *const u8) -> c_int,
    unload: unsafe extern "C" fn(place: u16),
    attach: unsafe extern "C" fn(arena: *mut u8, bytes: usize) -> c_int,
    detach: unsafe extern "C" fn(arena: *mut u8, bytes: usize),
    submit: unsafe extern "C" fn(jobs: *const RawJob, count: c_uint) -> c_uint,
    poll: unsafe extern "C" fn(done: *mut RawDone, count: c_uint) -> c_uint,
}

/// A device behind its driver. It has what its driver says, and one thread: this one.
pub struct Driver {
    functions: &'static Functions,
    limits: Limits,
    ledger: Option<File>,
    queues: HashMap<QueueNumber, Queue>,
    in_flight: Vec<Option<InFlight>>,
    free: Vec<u16>,
    /// Whether there may be more to do without a word of a daemon.
    is_busy: bool,
    /// Why nothing more can be done.
    failure: Option<io::Error>,
}

struct Queue {
    daemon: Daemon,
    rings: Rings,
    /// Taken from the ring, and not by the device yet.
    waiting: VecDeque<Submission>,
}

#[derive(Clone, Copy)]
struct InFlight {
    queue: QueueNumber,
    cookie: u64,
    key: u16,
}

impl Driver {
    /// Loads a driver and starts its device.
    pub fn start(path: &Path, arguments: &[String], ledger: Option<File>) -> io::Result<Self> {
        let named = |error: &dyn std::fmt::Display| {
            io::Error::other(format!("driver {}: {error}", path.display()))
        };
        let unloadable = |error: libloading::Error| match std::error::Error::source(&error) {
            Some(reason) => named(&reason),
            None => named(&error),
        };
        // SAFETY: whoever may name a driver may name any program; its initialisers run as ours.
        let library = unsafe { Library::new(path) }.map_err(unloadable)?;
        // SAFETY: the header gives this name this type.
        let entry = unsafe {
            library.get::<unsafe extern "C" fn() -> *const Functions>(b"sealane_driver\0")
        }
        .map_err(unloadable)?;
        // SAFETY: as above; what it returns lives as long as the library, which is never unloaded.
        let functions = unsafe { entry().as_ref() }.ok_or_else(|| named(&"it offers nothing"))?;
        std::mem::forget(library);
        if functions.version != VERSION {
            let version = functions.version;
            return Err(named(&format!("its version is {version}, not {VERSION}")));
        }
        let arguments: Vec<CString> = arguments
            .iter()
            .map(|argument| CString::new(argument.as_str()))
            .collect::<Result<_, _>>()
            .map_err(|error| named(&error))?;
        let pointers: Vec<*const c_char> =
            arguments.iter().map(|argument| argument.as_ptr()).collect();
        let (mut limits, mut error) = (RawLimits::default(), [0_u8; ERROR_BYTES]);
        // SAFETY: the pointers are valid for the call; the driver writes at most ERROR_BYTES.
        let status = unsafe {
            (functions.start)(
                pointers.len() as c_uint,
                pointers.as_ptr(),
                &raw mut limits,
                error.as_mut_ptr().cast(),
                ERROR_BYTES,
            )
        };
        // EAL keeps what it was given.
        std::mem::forget((arguments, pointers));
        if status != 0 {
            let text = CStr::from_bytes_until_nul(&error).unwrap_or_default();
            return Err(named(&text.to_string_lossy()));
        }
        let product = limits.product.split(|byte| *byte == 0).next().unwrap_or_default();
        let product = String::from_utf8_lossy(product).into_owned();
        if limits.keys == 0 || limits.jobs == 0 || !(1..20).contains(&product.len()) {
            return Err(named(&"it has no place for a key or a job, or no name"));
        }
        Ok(Self {
            functions,
            limits: Limits {
                product,
                depth: DEPTH.min(limits.jobs),
                keys: limits.keys,
                aad_bytes_max: AAD_BYTES as u16,
            },
            ledger,
            queues: HashMap::new(),
            in_flight: vec![None; limits.jobs.into()],
            free: (0..limits.jobs).rev().collect(),
            is_busy: false,
            failure: None,
        })
    }

    /// Hands jobs over while there are any and the device takes them; whether it took one.
    fn submit(&mut self, owners: &Owners) -> io::Result<bool> {
        let Self { functions, ledger, queues, in_flight, free, .. } = self;
        let mut has_taken = false;
        for (number, queue) in queues {
            loop {
                while queue.waiting.len() < BURST
                    && let Some(job) = queue.rings.take()
                {
                    let place = job.key.get();
                    let is_own = owners.get(&place) == Some(&queue.daemon);
                    let is_sector = usize::from(job.aad_bytes.get()) == AAD_BYTES;
                    if is_own && is_sector && queue.rings.slot(&job).is_some() {
                        queue.waiting.push_back(job);
                    } else {
                        queue.rings.complete(job.cookie.get(), false);
                    }
                }
                let jobs: Vec<RawJob> = queue
                    .waiting
                    .iter()
                    .zip(free.iter().rev())
                    .map(|(job, name)| RawJob {
                        data: queue.data(job),
                        name: *name,
                        key: job.key.get(),
                        nonce: job.nonce,
                    })
                    .collect();
                if jobs.is_empty() {
                    break;
                }
                // SAFETY: the jobs lie in an arena that is attached, and stays until they end.
                let taken = unsafe { (functions.submit)(jobs.as_ptr(), jobs.len() as c_uint) };
                let taken = taken as usize;
                if taken > jobs.len() {
                    return Err(io::Error::other("the driver took more jobs than there were"));
                }
                for (job, raw) in queue.waiting.drain(..taken).zip(&jobs) {
                    free.pop();
                    in_flight[usize::from(raw.name)] =
                        Some(InFlight { queue: *number, cookie: job.cookie.get(), key: raw.key });
                    if let Some(ledger) = ledger {
                        ledger.write_all(&raw.nonce)?;
                    }
                }
                has_taken |= taken > 0;
                if taken < jobs.len() {
                    break;
                }
            }
        }
        Ok(has_taken)
    }

    /// Takes what has ended; whether there was any.
    fn poll(&mut self) -> io::Result<bool> {
        let mut done = [RawDone::default(); BURST];
        // SAFETY: there is room for as many as it is asked for.
        let count = unsafe { (self.functions.poll)(done.as_mut_ptr(), BURST as c_uint) } as usize;
        let ended = done.get(..count);
        for done in ended.ok_or_else(|| io::Error::other("the driver ended more than asked for"))? {
            let job = self.in_flight.get_mut(usize::from(done.name)).and_then(Option::take);
            let job = job.ok_or_else(|| io::Error::other("the driver ended an unknown job"))?;
            self.free.push(done.name);
            if let Some(queue) = self.queues.get_mut(&job.queue) {
                queue.rings.complete(job.cookie, done.is_sealed == 1);
            }
        }
        Ok(count > 0)
    }

    /// Waits for the jobs in flight that `are` chooses; whether they have ended.
    fn end(&mut self, are: impl Fn(&InFlight) -> bool) -> bool {
        let late = Instant::now() + END;
        while self.failure.is_none() && self.in_flight.iter().flatten().any(&are) {
            match self.poll() {
                Ok(true) => {}
                Ok(false) if Instant::now() < late => {}
                Ok(false) => self.failure = Some(io::Error::other("the device ends no jobs")),
                Err(error) => self.failure = Some(error),
            }
        }
        self.failure.is_none()
    }
}

impl Queue {
    fn data(&self, job: &Submission) -> *mut u8 {
        let offset = data_offset(job.slot.get() as u16) as usize;
        // SAFETY: the slot was found to lie in the arena when the job was taken.
        unsafe { self.rings.arena.as_mut_ptr().add(offset) }
    }

    fn arena(&self) -> (*mut u8, usize) {
        let arena = &self.rings.arena;
        (arena.as_mut_ptr(), arena.len().next_multiple_of(PAGE_BYTES))
    }
}

impl Engine for Driver {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn load(&mut self, place: u16, secret: &Secret) -> bool {
        // SAFETY: the key is valid for the call, and the place is free.
        unsafe { (self.functions.load)(place, secret.bytes().as_ptr()) == 0 }
    }

    fn unload(&mut self, place: u16) {
        for queue in self.queues.values_mut() {
            let (gone, kept) = queue.waiting.drain(..).partition(|job| job.key.get() == place);
            queue.waiting = kept;
            let gone: VecDeque<Submission> = gone;
            for job in gone {
                queue.rings.complete(job.cookie.get(), false);
            }
        }
        if self.end(|job| job.key == place) {
            // SAFETY: a key is there, and no job with it is in flight.
            unsafe { (self.functions.unload)(place) };
        }
    }

    fn open(&mut self, number: QueueNumber, daemon: Daemon, rings: Rings) -> bool {
        let queue = Queue { daemon, rings, waiting: VecDeque::new() };
        let (start, bytes) = queue.arena();
        // SAFETY: the mapping begins and ends at a page, and lives as long as the queue.
        let is_attached = unsafe { (self.functions.attach)(start, bytes) == 0 };
        if is_attached {
            self.queues.insert(number, queue);
        }
        is_attached
    }

    fn close(&mut self, number: QueueNumber) {
        if self.end(|job| job.queue == number)
            && let Some(queue) = self.queues.remove(&number)
        {
            let (start, bytes) = queue.arena();
            // SAFETY: it was attached, and no job in it is in flight.
            unsafe { (self.functions.detach)(start, bytes) };
        }
    }

    fn work(&mut self, owners: &Owners) -> io::Result<()> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        for _ in 0..ROUNDS {
            self.is_busy = self.submit(owners)? | self.poll()?;
            self.queues.values_mut().for_each(|queue| queue.rings.publish());
            if !self.is_busy {
                break;
            }
        }
        Ok(())
    }

    fn wait(&self) -> Option<Duration> {
        let is_busy = self.is_busy
            || self.in_flight.iter().any(Option::is_some)
            || self.queues.values().any(|queue| !queue.waiting.is_empty());
        is_busy.then_some(Duration::ZERO)
    }
}
