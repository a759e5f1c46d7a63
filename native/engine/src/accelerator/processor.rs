//! The processor as a device: what others must equal, and what they are compared with.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use sealane_proto::aead::{AeadKey, Secret, TAG_BYTES};
use sealane_proto::sector::DATA_BYTES;

use crate::calls::{Calls, call};

use super::{Broken, Capabilities, Cookie, Device, Done, KeySlot, Queue, Record, SealJob};

const DEPTH: u16 = 128;

type Keys = Arc<Mutex<HashMap<KeySlot, Arc<AeadKey>>>>;

/// Seals on the calling thread.
#[derive(Debug)]
pub struct Processor {
    capabilities: Capabilities,
    keys: Keys,
    record: Arc<Record>,
}

impl Default for Processor {
    fn default() -> Self {
        let capabilities = Capabilities {
            profile: "processor".into(),
            depth: DEPTH,
            key_slots: u16::MAX,
            aad_bytes_max: u16::MAX,
            has_protected_bus: true,
        };
        Self { capabilities, keys: Keys::default(), record: Arc::default() }
    }
}

impl Device for Processor {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn record(&self) -> &Arc<Record> {
        &self.record
    }

    fn evidence(&self, _: &[u8; 32]) -> io::Result<Vec<u8>> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "the node's own evidence covers it"))
    }

    fn load(&self, secret: &Secret) -> io::Result<KeySlot> {
        let mut keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let free =
            (0..self.capabilities.key_slots).map(KeySlot).find(|key| !keys.contains_key(key));
        let key = free.ok_or(io::ErrorKind::StorageFull)?;
        keys.insert(key, Arc::new(AeadKey::new(secret)));
        Ok(key)
    }

    fn unload(&self, key: KeySlot) -> io::Result<()> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        Ok(())
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let (calls, bell) = Calls::create()?;
        let keys = Arc::clone(&self.keys);
        Ok(Box::new(Work {
            keys,
            calls,
            bell,
            next: 0,
            ended: VecDeque::new(),
            taken: HashMap::new(),
        }))
    }
}

#[derive(Debug)]
struct Work {
    keys: Keys,
    calls: Calls,
    bell: OwnedFd,
    next: Cookie,
    ended: VecDeque<Done>,
    taken: HashMap<Cookie, (Box<[u8; DATA_BYTES]>, [u8; TAG_BYTES])>,
}

impl Queue for Work {
    fn has_room(&self) -> bool {
        self.taken.len() < usize::from(DEPTH)
    }

    fn submit(&mut self, job: &SealJob<'_>) -> Option<Cookie> {
        if !self.has_room() {
            return None;
        }
        let keys = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let key = keys.get(&job.key).cloned();
        drop(keys);
        let mut data = Box::new(*job.plain);
        let tag = key.map(|key| key.seal(job.nonce, job.aad, &mut data[..]));
        self.next += 1;
        self.ended.push_back(Done { cookie: self.next, is_sealed: tag.is_some() });
        self.taken.insert(self.next, (data, tag.unwrap_or_default()));
        Some(self.next)
    }

    fn ring(&mut self) {
        call(&self.bell);
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Broken> {
        done.extend(self.ended.drain(..));
        Ok(())
    }

    fn take(&mut self, cookie: Cookie, into: &mut [u8; DATA_BYTES]) -> [u8; TAG_BYTES] {
        let (data, tag) = self.taken.remove(&cookie).expect("a job that has ended is taken once");
        *into = *data;
        tag
    }

    fn hear(&mut self) {
        self.calls.take();
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.calls.as_fd()
    }
}
