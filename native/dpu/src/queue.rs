//! One queue of the card: takes submissions, seals, completes.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sealane_engine::accelerator::wire::{
    Completion, SLOT_BYTES, Submission, arena_bytes, data_offset, entry_offset, ring_bytes,
    tag_offset,
};
use sealane_engine::calls::call;
use sealane_engine::shared_memory::{PeerAccess, SharedMemory};
use sealane_proto::aead::AeadKey;
use sealane_proto::sector::DATA_BYTES;
use zerocopy::{FromBytes, IntoBytes};

use crate::faults::{Fault, Faults};

/// A queue's memory and its state.
#[derive(Debug)]
pub struct CardQueue {
    depth: u16,
    arena: SharedMemory,
    submissions: SharedMemory,
    completions: SharedMemory,
    bell: OwnedFd,
    taken: u64,
    completed: u64,
    later: Vec<(Instant, Later)>,
    /// Completions that wait for the next one.
    held: Vec<Completion>,
    /// Nonce of the job before.
    earlier: Option<[u8; 12]>,
    is_dead: bool,
}

#[derive(Debug)]
enum Later {
    Complete(Completion),
    /// Completes what still waits for the next one.
    Release,
    Write(u16),
}

impl CardQueue {
    /// Maps the memory of a new queue; `None` if the daemon's descriptors are not what they should
    /// be.
    pub fn open(depth: u16, descriptors: [OwnedFd; 4]) -> Option<Self> {
        let [arena, submissions, completions, bell] = descriptors;
        let arena = SharedMemory::attach(arena, PeerAccess::Writes).ok()?;
        let submissions = SharedMemory::attach(submissions, PeerAccess::Reads).ok()?;
        let completions = SharedMemory::attach(completions, PeerAccess::Writes).ok()?;
        let fits = depth > 0
            && arena.len() >= arena_bytes(depth)
            && submissions.len() >= ring_bytes(depth, size_of::<Submission>())
            && completions.len() >= ring_bytes(depth, size_of::<Completion>());
        fits.then_some(Self {
            depth,
            arena,
            submissions,
            completions,
            bell,
            taken: 0,
            completed: 0,
            later: Vec::new(),
            held: Vec::new(),
            earlier: None,
            is_dead: false,
        })
    }

    /// When [`Self::work`] must next be called if the daemon says nothing.
    pub fn next_time(&self) -> Option<Instant> {
        self.later.iter().map(|(time, _)| *time).min()
    }

    /// Does everything that can be done now.
    pub fn work(
        &mut self,
        keys: Option<&HashMap<u16, AeadKey>>,
        faults: &mut Faults,
        ledger: &mut Option<File>,
    ) -> io::Result<()> {
        let before = self.completed;
        let now = Instant::now();
        let (due, later) =
            std::mem::take(&mut self.later).into_iter().partition(|(time, _)| *time <= now);
        self.later = later;
        let due: Vec<(Instant, Later)> = due;
        for (_, due) in due {
            match due {
                Later::Complete(completion) => self.complete(completion),
                Later::Release => self.release(),
                Later::Write(slot) => self.arena.copy_in(data_offset(slot), &[0xee; DATA_BYTES]),
            }
        }
        let written = self.submissions.word(0).load(Ordering::Acquire);
        while self.taken < written && !self.is_dead {
            let mut bytes = [0; size_of::<Submission>()];
            self.submissions
                .copy_out(entry_offset(self.taken, self.depth, bytes.len()), &mut bytes);
            self.taken += 1;
            let Ok(job) = Submission::read_from_bytes(&bytes) else { unreachable!() };
            let key = keys.and_then(|keys| keys.get(&job.key.get()));
            self.seal(&job, key, faults, ledger)?;
        }
        if self.completed > before {
            self.completions.word(0).store(self.completed, Ordering::Release);
            call(&self.bell);
        }
        Ok(())
    }

    fn seal(
        &mut self,
        job: &Submission,
        key: Option<&AeadKey>,
        faults: &mut Faults,
        ledger: &mut Option<File>,
    ) -> io::Result<()> {
        let cookie = job.cookie.get();
        let done = |is_sealed: bool| Completion {
            cookie: cookie.into(),
            is_sealed: u64::from(is_sealed).into(),
        };
        if faults.draw(Fault::Dead) {
            self.is_dead = true;
            return Ok(());
        }
        let (Some(key), Ok(slot)) = (key, u16::try_from(job.slot.get())) else {
            self.complete(done(false));
            return Ok(());
        };
        if usize::from(slot) * SLOT_BYTES >= self.arena.len() || faults.draw(Fault::Refused) {
            self.complete(done(false));
            return Ok(());
        }
        let (at, aad_bytes) = (data_offset(slot), usize::from(job.aad_bytes.get()).min(64));
        let (mut aad, mut data) = (vec![0; aad_bytes], vec![0; DATA_BYTES]);
        self.arena.copy_out(at - aad_bytes as u64, &mut aad);
        self.arena.copy_out(at, &mut data);
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
        self.arena.copy_in(at, &data);
        self.arena.copy_in(tag_offset(slot), &tag);
        let after = |milliseconds| Instant::now() + Duration::from_millis(milliseconds);
        if faults.draw(Fault::LateWrite) {
            self.later.push((after(1), Later::Write(slot)));
        }
        if faults.draw(Fault::Latency) {
            self.later.push((after(1 + faults.number() % 20), Later::Complete(done(true))));
        } else if faults.draw(Fault::Reorder) {
            self.held.push(done(true));
            self.later.push((after(1), Later::Release));
        } else if !faults.draw(Fault::Lost) {
            self.complete(done(true));
            if faults.draw(Fault::Duplicate) {
                self.complete(done(true));
            }
        }
        if faults.draw(Fault::Overrun) {
            self.completed += 1 << 40;
        }
        if faults.draw(Fault::Invented) {
            let invented = Completion { cookie: faults.number().into(), is_sealed: 1.into() };
            self.complete(invented);
        }
        Ok(())
    }

    fn complete(&mut self, completion: Completion) {
        let offset = entry_offset(self.completed, self.depth, size_of::<Completion>());
        self.completions.copy_in(offset, completion.as_bytes());
        self.completed += 1;
        self.release();
    }

    fn release(&mut self) {
        for completion in std::mem::take(&mut self.held) {
            self.complete(completion);
        }
    }
}
