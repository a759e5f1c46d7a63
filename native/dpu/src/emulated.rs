//! The emulated card: it seals at once, and misbehaves on request.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use sealane_engine::accelerator::wire::{Submission, data_offset, tag_offset};
use sealane_proto::aead::{AeadKey, Secret};
use sealane_proto::sector::DATA_BYTES;

use crate::engine::{Daemon, Engine, Limits, Owners, QueueNumber};
use crate::faults::{Fault, Faults};
use crate::rings::Rings;

/// Keys in ordinary memory, and the faults that it was told to have.
pub struct Emulated {
    limits: Limits,
    /// Jobs that a queue really has room for.
    room: usize,
    faults: Faults,
    ledger: Option<File>,
    keys: HashMap<u16, AeadKey>,
    queues: HashMap<QueueNumber, Queue>,
    /// Memory of queues that have ended, and until when it is still written to.
    ended: Vec<(Instant, Rings)>,
}

/// For how long, and how often, the memory of a queue that has ended is written to.
const AFTER_END: Duration = Duration::from_millis(100);
const AFTER_END_PAUSE: Duration = Duration::from_millis(1);

struct Queue {
    daemon: Daemon,
    rings: Rings,
    later: Vec<(Instant, Later)>,
    /// Jobs whose completions wait for the next one.
    held: Vec<u64>,
    /// Nonce of the job before.
    earlier: Option<[u8; 12]>,
    is_dead: bool,
}

enum Later {
    Complete(u64),
    /// Completes what still waits for the next one.
    Release,
    Write(u16),
}

impl Emulated {
    /// A card that writes the nonce of each seal to `ledger`.
    pub fn new(mut limits: Limits, mut faults: Faults, ledger: Option<File>) -> Self {
        let room = limits.depth.into();
        if faults.draw(Fault::Lies) {
            (limits.depth, limits.keys, limits.aad_bytes_max) = (u16::MAX, u16::MAX, u16::MAX);
        }
        let (keys, queues, ended) = (HashMap::new(), HashMap::new(), Vec::new());
        Self { limits, room, faults, ledger, keys, queues, ended }
    }
}

impl Engine for Emulated {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn load(&mut self, place: u16, secret: &Secret) -> bool {
        self.keys.insert(place, AeadKey::new(secret));
        true
    }

    fn unload(&mut self, place: u16) {
        self.keys.remove(&place);
    }

    fn open(&mut self, number: QueueNumber, daemon: Daemon, rings: Rings) -> bool {
        let (later, held) = (Vec::new(), Vec::new());
        let queue = Queue { daemon, rings, later, held, earlier: None, is_dead: false };
        self.queues.insert(number, queue);
        true
    }

    fn close(&mut self, number: QueueNumber) {
        let Some(queue) = self.queues.remove(&number) else { return };
        if self.faults.draw(Fault::AfterEnd) {
            self.ended.push((Instant::now() + AFTER_END, queue.rings));
        }
    }

    fn work(&mut self, owners: &Owners) -> io::Result<()> {
        let Self { faults, ledger, keys, queues, room, ended, .. } = self;
        ended.retain_mut(|(until, rings)| {
            rings.scribble();
            *until > Instant::now()
        });
        for queue in queues.values_mut() {
            queue.do_later();
            let mut taken = 0;
            while !queue.is_dead
                && let Some(job) = queue.rings.take()
            {
                taken += 1;
                if taken > *room {
                    continue;
                }
                let place = job.key.get();
                let key = keys.get(&place).filter(|_| owners.get(&place) == Some(&queue.daemon));
                queue.seal(&job, key, faults, ledger)?;
            }
            queue.rings.publish();
        }
        Ok(())
    }

    fn wait(&self) -> Option<Duration> {
        let times = self.queues.values().flat_map(|queue| &queue.later).map(|(time, _)| *time);
        let due = times.min().map(|time| time.saturating_duration_since(Instant::now()));
        let again = (!self.ended.is_empty()).then_some(AFTER_END_PAUSE);
        [due, again].into_iter().flatten().min()
    }
}

impl Queue {
    /// Does what is due.
    fn do_later(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self.later.extract_if(.., |(time, _)| *time <= now).collect();
        for (_, due) in due {
            match due {
                Later::Complete(cookie) => self.complete(cookie, true),
                Later::Release => self.release(),
                Later::Write(slot) => {
                    self.rings.arena.copy_in(data_offset(slot), &[0xee; DATA_BYTES]);
                }
            }
        }
    }

    fn seal(
        &mut self,
        job: &Submission,
        key: Option<&AeadKey>,
        faults: &mut Faults,
        ledger: &mut Option<File>,
    ) -> io::Result<()> {
        let cookie = job.cookie.get();
        if faults.draw(Fault::Dead) {
            self.is_dead = true;
            return Ok(());
        }
        let (Some(key), Some(slot)) = (key, self.rings.slot(job)) else {
            self.complete(cookie, false);
            return Ok(());
        };
        if faults.draw(Fault::Refused) {
            self.complete(cookie, false);
            return Ok(());
        }
        let (at, aad_bytes) = (data_offset(slot), usize::from(job.aad_bytes.get()).min(64));
        let (mut aad, mut data) = (vec![0; aad_bytes], vec![0; DATA_BYTES]);
        self.rings.arena.copy_out(at - aad_bytes as u64, &mut aad);
        self.rings.arena.copy_out(at, &mut data);
        let old = faults.draw(Fault::OldNonce);
        let hidden = faults.draw(Fault::HiddenNonce);
        let nonce = match self.earlier {
            Some(earlier) if old || hidden => earlier,
            _ => job.nonce,
        };
        self.earlier = Some(job.nonce);
        if faults.draw(Fault::WrongPlaintext) {
            data[(faults.number() % DATA_BYTES as u64) as usize] ^= 1;
        }
        if let Some(ledger) = ledger {
            ledger.write_all(&nonce)?;
        }
        let mut tag = key.seal(nonce, &aad, &mut data);
        if hidden && nonce != job.nonce {
            let mut opened = vec![0; DATA_BYTES];
            let _ = key.seal(job.nonce, &[], &mut opened);
            opened.iter_mut().zip(&data).for_each(|(to, from)| *to ^= from);
            tag = key.seal(job.nonce, &aad, &mut opened);
        }
        if faults.draw(Fault::WrongTag) {
            tag[(faults.number() % 16) as usize] ^= 1;
        }
        if faults.draw(Fault::WrongCiphertext) {
            data[(faults.number() % DATA_BYTES as u64) as usize] ^= 1;
        }
        self.rings.arena.copy_in(at, &data);
        self.rings.arena.copy_in(tag_offset(slot), &tag);
        let after = |milliseconds| Instant::now() + Duration::from_millis(milliseconds);
        if faults.draw(Fault::LateWrite) {
            self.later.push((after(1), Later::Write(slot)));
        }
        if faults.draw(Fault::Latency) {
            self.later.push((after(1 + faults.number() % 20), Later::Complete(cookie)));
        } else if faults.draw(Fault::Reorder) {
            self.held.push(cookie);
            self.later.push((after(1), Later::Release));
        } else if !faults.draw(Fault::Lost) {
            self.complete(cookie, true);
            if faults.draw(Fault::Duplicate) {
                self.complete(cookie, true);
            }
        }
        if faults.draw(Fault::Overrun) {
            self.rings.overrun();
        }
        if faults.draw(Fault::Invented) {
            self.complete(faults.number(), true);
        }
        Ok(())
    }

    fn complete(&mut self, cookie: u64, is_sealed: bool) {
        self.rings.complete(cookie, is_sealed);
        self.release();
    }

    fn release(&mut self) {
        for cookie in std::mem::take(&mut self.held) {
            self.rings.complete(cookie, true);
        }
    }
}
