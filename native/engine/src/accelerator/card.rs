//! A card behind a Unix socket, such as the emulated one (`sealane-dpu`).
//!
//! The card's process is hostile here: every byte that it may write is copied before it is looked
//! at, an index is compared with what is in flight, and a job's name is good for one completion.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, send, sendmsg,
    shutdown, socket_with, socketpair,
};
use sealane_proto::aead::{Secret, TAG_BYTES};
use sealane_proto::sector::{AAD_BYTES, DATA_BYTES};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::wire::{
    Answer, Completion, HEADROOM_BYTES, MESSAGE_BYTES_MAX, Operation, QUEUE_DESCRIPTORS,
    Submission, VERSION, Welcome, arena_bytes, data_offset, entry_offset, ring_bytes, tag_offset,
};
use super::{
    Broken, Capabilities, Cookie, DEPTH_MAX, Device, Done, KeySlot, Queue, Record, SealJob,
};
use crate::calls::Calls;
use crate::shared_memory::{PeerAccess, SharedMemory};

/// How long the card has to answer a request.
const ANSWER: Duration = Duration::from_secs(1);

/// A connected card.
#[derive(Debug)]
pub struct Card {
    capabilities: Capabilities,
    requests: Mutex<Connection>,
    record: Arc<Record>,
}

impl Card {
    /// Connects; `InvalidData` if the card speaks another version or offers nothing of use.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let mut connection = Connection::open(path)?;
        let answer = connection.ask(Operation::Hello, &VERSION.to_le_bytes(), &[])?;
        let welcome = Welcome::read_from_bytes(&answer)
            .map_err(|_| invalid("its answer to a hello has another length"))?;
        if welcome.version.get() != VERSION {
            let version = welcome.version.get();
            return Err(invalid(&format!("it speaks version {version}, not {VERSION}")));
        }
        let profile = welcome.profile.split(|byte| *byte == 0).next().unwrap_or_default();
        let capabilities = Capabilities {
            profile: String::from_utf8_lossy(profile).into_owned(),
            depth: welcome.depth.get().min(DEPTH_MAX),
            key_slots: welcome.key_slots.get(),
            aad_bytes_max: welcome.aad_bytes_max.get(),
            has_protected_bus: welcome.has_protected_bus.get() == 1,
        };
        if capabilities.depth == 0 || capabilities.key_slots == 0 {
            return Err(invalid("it offers no queue or no place for a key"));
        }
        if usize::from(capabilities.aad_bytes_max) < AAD_BYTES {
            return Err(invalid("it takes too little additional data for a sector"));
        }
        Ok(Self { capabilities, requests: Mutex::new(connection), record: Arc::default() })
    }

    fn ask(&self, operation: Operation, payload: &[u8]) -> io::Result<Vec<u8>> {
        self.requests().ask(operation, payload, &[])
    }

    fn requests(&self) -> MutexGuard<'_, Connection> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for Card {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn record(&self) -> &Arc<Record> {
        &self.record
    }

    fn evidence(&self, nonce: &[u8; 32]) -> io::Result<Vec<u8>> {
        self.ask(Operation::Evidence, nonce)
    }

    fn load(&self, secret: &Secret) -> io::Result<KeySlot> {
        let answer = self.ask(Operation::Load, secret.bytes())?;
        let slot = answer.try_into().map_err(|_| invalid("its answer names no slot"))?;
        Ok(KeySlot(u16::from_le_bytes(slot)))
    }

    fn unload(&self, key: KeySlot) -> io::Result<()> {
        self.ask(Operation::Unload, &key.0.to_le_bytes()).map(drop)
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(CardQueue::open(&mut self.requests(), &self.capabilities)?))
    }
}

/// One connection: requests and answers alternate. After an error it is of no more use, because an
/// answer may still arrive.
#[derive(Debug)]
struct Connection {
    /// Closed by a thread of its own.
    socket: Option<OwnedFd>,
    has_failed: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Messages that were not received may carry descriptors whose closing takes as long as the
        // card likes (SO_LINGER).
        let socket = self.socket.take();
        let _ = std::thread::Builder::new().name("card-close".into()).spawn(move || drop(socket));
    }
}

impl Connection {
    fn open(path: &Path) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let (address, deadline) = (SocketAddrUnix::new(path)?, Instant::now() + ANSWER);
        loop {
            // Each attempt has a deadline of its own, and a signal ends it.
            set_socket_timeout(&socket, Timeout::Send, Some(left(deadline)?))?;
            match connect(&socket, &address) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                connected => {
                    connected?;
                    return Ok(Self { socket: Some(socket), has_failed: false });
                }
            }
        }
    }

    fn ask(
        &mut self,
        operation: Operation,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<Vec<u8>> {
        if self.has_failed {
            return Err(io::Error::new(io::ErrorKind::NotConnected, "an earlier request failed"));
        }
        self.has_failed = true;
        let Some(socket) = &self.socket else { unreachable!("only a drop takes it") };
        let number = (operation as u32).to_le_bytes();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUE_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let parts = [IoSlice::new(&number), IoSlice::new(payload)];
        let deadline = Instant::now() + ANSWER;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        in_time(socket, PollFlags::OUT, deadline, || sendmsg(socket, &parts, &mut control, flags))?;
        let mut message = vec![0; MESSAGE_BYTES_MAX];
        // No room for descriptors: the kernel closes those that a card sends. That may take as long
        // as the card likes (SO_LINGER), so requests are never made on a thread that moves sectors.
        let got = in_time(socket, PollFlags::IN, deadline, || {
            let mut parts = [IoSliceMut::new(&mut message)];
            recvmsg(socket, &mut parts, &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT)
        })?;
        message.truncate(got.bytes);
        let Some((status, answer)) = message.split_first_chunk() else {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the card gave no answer"));
        };
        self.has_failed = false;
        match u32::from_le_bytes(*status) {
            number if number == Answer::Done as u32 => Ok(answer.to_vec()),
            number if number == Answer::Full as u32 => {
                Err(io::Error::new(io::ErrorKind::StorageFull, "the card has no place left"))
            }
            _ => Err(io::Error::other("the card refused the request")),
        }
    }
}

/// The time until the deadline; `TimedOut` if it has passed.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        let message = format!("the card did not answer within {} s", ANSWER.as_secs());
        return Err(io::Error::new(io::ErrorKind::TimedOut, message));
    }
    Ok(left)
}

/// Makes a call that doesn't block, as soon as the socket lets it succeed; `TimedOut` after the
/// deadline, however many signals arrive.
fn in_time<T>(
    socket: &OwnedFd,
    ready: PollFlags,
    deadline: Instant,
    mut call: impl FnMut() -> rustix::io::Result<T>,
) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::AGAIN | Errno::INTR) => {}
            outcome => return Ok(outcome?),
        }
        let timeout = Timespec::try_from(left(deadline)?).unwrap_or_default();
        if let Err(error) = poll(&mut [PollFd::new(socket, ready)], Some(&timeout))
            && error != Errno::INTR
        {
            return Err(error.into());
        }
    }
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the card: {message}"))
}

/// A queue of a card.
#[derive(Debug)]
pub struct CardQueue {
    /// Each byte wakes the card; closing it ends the queue there. It is shut down for reading, so the
    /// card can't send anything whose closing would block. (An eventfd wouldn't do either: the card
    /// could fill its counter and clear O_NONBLOCK, and the next call would block.)
    doorbell: OwnedFd,
    depth: u16,
    aad_bytes_max: usize,
    arena: SharedMemory,
    submissions: SharedMemory,
    completions: SharedMemory,
    /// The card wakes us, as does the end of its doorbell.
    calls: Calls,
    is_gone: bool,
    submitted: u64,
    rung: u64,
    completed: u64,
    /// The job in each slot, and whether the card has completed it.
    jobs: Vec<Option<(Cookie, bool)>>,
    free: Vec<u16>,
}

impl CardQueue {
    fn open(requests: &mut Connection, capabilities: &Capabilities) -> io::Result<Self> {
        let depth = capabilities.depth;
        let create = SharedMemory::create;
        let arena = create("card-arena", arena_bytes(depth), PeerAccess::Writes)?;
        let submissions = create(
            "card-submissions",
            ring_bytes(depth, size_of::<Submission>()),
            PeerAccess::Reads,
        )?;
        let completions = create(
            "card-completions",
            ring_bytes(depth, size_of::<Completion>()),
            PeerAccess::Writes,
        )?;
        let (calls, bell) = Calls::create()?;
        let flags = SocketFlags::CLOEXEC;
        let (doorbell, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        shutdown(&doorbell, Shutdown::Read)?;
        calls.watch_end(&doorbell)?;
        let descriptors =
            [arena.file(), submissions.file(), completions.file(), bell.as_fd(), theirs.as_fd()];
        requests.ask(Operation::Open, &depth.to_le_bytes(), &descriptors)?;
        Ok(Self {
            doorbell,
            depth,
            aad_bytes_max: HEADROOM_BYTES.min(capabilities.aad_bytes_max.into()),
            arena,
            submissions,
            completions,
            calls,
            is_gone: false,
            submitted: 0,
            rung: 0,
            completed: 0,
            jobs: vec![None; depth.into()],
            free: (0..depth).rev().collect(),
        })
    }
}

impl Queue for CardQueue {
    fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    fn submit(&mut self, job: &SealJob<'_>) -> Option<Cookie> {
        if job.aad.len() > self.aad_bytes_max {
            return None;
        }
        let slot = self.free.pop()?;
        let at = data_offset(slot);
        self.arena.copy_in(at - job.aad.len() as u64, job.aad);
        self.arena.copy_in(at, job.plain);
        let cookie = self.submitted * u64::from(self.depth) + u64::from(slot);
        let mut entry = Submission::new_zeroed();
        entry.cookie = cookie.into();
        entry.slot = u32::from(slot).into();
        entry.key = job.key.0.into();
        entry.aad_bytes = (job.aad.len() as u16).into();
        entry.nonce = job.nonce;
        let offset = entry_offset(self.submitted, self.depth, size_of::<Submission>());
        self.submissions.copy_in(offset, entry.as_bytes());
        self.submitted += 1;
        self.jobs[usize::from(slot)] = Some((cookie, false));
        Some(cookie)
    }

    fn ring(&mut self) {
        if self.rung == self.submitted {
            return;
        }
        self.rung = self.submitted;
        // Publishes the entries and what they refer to.
        self.submissions.word(0).store(self.submitted, Ordering::Release);
        // Fails only if the card is gone, or is awake and has many of these to read.
        let _ = send(&self.doorbell, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), Broken> {
        let written = self.completions.word(0).load(Ordering::Acquire);
        let in_flight = u64::from(self.depth) - self.free.len() as u64;
        if written.wrapping_sub(self.completed) > in_flight {
            return Err(Broken::Overrun);
        }
        while self.completed != written {
            let mut bytes = [0; size_of::<Completion>()];
            let offset = entry_offset(self.completed, self.depth, bytes.len());
            self.completions.copy_out(offset, &mut bytes);
            self.completed += 1;
            let Ok(entry) = Completion::read_from_bytes(&bytes) else { unreachable!() };
            let cookie = entry.cookie.get();
            match self.jobs.get_mut((cookie % u64::from(self.depth)) as usize) {
                Some(Some((own, is_done))) if *own == cookie && !*is_done => *is_done = true,
                _ => return Err(Broken::Cookie),
            }
            done.push(Done { cookie, is_sealed: entry.is_sealed.get() == 1 });
        }
        if self.is_gone { Err(Broken::Gone) } else { Ok(()) }
    }

    fn take(&mut self, cookie: Cookie, into: &mut [u8; DATA_BYTES]) -> [u8; TAG_BYTES] {
        let slot = (cookie % u64::from(self.depth)) as u16;
        let job = self.jobs[usize::from(slot)].take();
        assert_eq!(job, Some((cookie, true)), "a job that has ended is taken once");
        let mut tag = [0; TAG_BYTES];
        self.arena.copy_out(data_offset(slot), into);
        self.arena.copy_out(tag_offset(slot), &mut tag);
        self.free.push(slot);
        tag
    }

    fn hear(&mut self) {
        self.is_gone |= self.calls.take();
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.calls.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use rand_chacha::ChaCha8Rng;
    use rand_core::{Rng, SeedableRng};
    use rustix::net::RecvAncillaryMessage;

    use super::*;

    const DEPTH: u16 = 8;

    /// A queue whose card is this test: it gets the arena, the completions and its socket.
    fn queue_of_ours() -> (CardQueue, SharedMemory, SharedMemory, OwnedFd) {
        let kind = SocketType::SEQPACKET;
        let (ours, card) =
            socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let serve = thread::spawn(move || {
            let mut message = [0; 64];
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUE_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut message)];
            recvmsg(&card, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            let mut got = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    got.extend(rights);
                }
            }
            send(&card, &(Answer::Done as u32).to_le_bytes(), SendFlags::empty()).unwrap();
            got
        });
        let capabilities = Capabilities {
            profile: "test".into(),
            depth: DEPTH,
            key_slots: 1,
            aad_bytes_max: 64,
            has_protected_bus: false,
        };
        let mut requests = Connection { socket: Some(ours), has_failed: false };
        let queue = CardQueue::open(&mut requests, &capabilities).unwrap();
        let got = <[OwnedFd; QUEUE_DESCRIPTORS]>::try_from(serve.join().unwrap()).unwrap();
        let [arena, submissions, completions, _, socket] = got;
        assert!(
            SharedMemory::attach(submissions, PeerAccess::Writes).is_err(),
            "the card reads it"
        );
        let attach = |file| SharedMemory::attach(file, PeerAccess::Writes).unwrap();
        (queue, attach(arena), attach(completions), socket)
    }

    #[test]
    fn a_card_can_send_nothing_on_the_doorbell() {
        let (mut queue, _arena, _completions, socket) = queue_of_ours();
        let sent = send(&socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        assert_eq!(sent, Err(Errno::PIPE));
        submit(&mut queue, 1).unwrap();
        queue.ring();
        let mut byte = [0; 4];
        let mut slices = [IoSliceMut::new(&mut byte)];
        let mut control = RecvAncillaryBuffer::default();
        let got = recvmsg(&socket, &mut slices, &mut control, RecvFlags::DONTWAIT).unwrap();
        assert_eq!(got.bytes, 1, "it hears the daemon");
    }

    #[test]
    fn the_end_of_a_card_is_noticed_at_once_and_what_it_completed_counts() {
        let (mut queue, _arena, completions, socket) = queue_of_ours();
        let is_called = |queue: &CardQueue| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            poll(&mut [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)], Some(&now)) == Ok(1)
        };
        let cookie = submit(&mut queue, 1).unwrap();
        submit(&mut queue, 2).unwrap();
        queue.ring();
        let mut byte = [0; 4];
        let mut slices = [IoSliceMut::new(&mut byte)];
        recvmsg(&socket, &mut slices, &mut RecvAncillaryBuffer::default(), RecvFlags::DONTWAIT)
            .unwrap();
        assert!(!is_called(&queue), "that the card reads calls nobody");
        queue.hear();
        assert_eq!(queue.poll(&mut Vec::new()), Ok(()));

        complete(&completions, 0, cookie);
        drop(socket);
        assert!(is_called(&queue));
        queue.hear();
        let mut done = Vec::new();
        assert_eq!(queue.poll(&mut done), Err(Broken::Gone));
        assert_eq!(done, [Done { cookie, is_sealed: true }]);
        assert!(is_called(&queue), "it stays gone");
        queue.hear();
        assert_eq!(queue.poll(&mut done), Err(Broken::Gone));
    }

    fn submit(queue: &mut CardQueue, nonce: u8) -> Option<Cookie> {
        let plain = [nonce; DATA_BYTES];
        queue.submit(&SealJob { key: KeySlot(0), nonce: [nonce; 12], aad: &[1; 33], plain: &plain })
    }

    fn complete(completions: &SharedMemory, number: u64, cookie: u64) {
        let entry = Completion { cookie: cookie.into(), is_sealed: 1.into() };
        let offset = entry_offset(number, DEPTH, size_of::<Completion>());
        completions.copy_in(offset, entry.as_bytes());
        completions.word(0).store(number + 1, Ordering::Release);
    }

    #[test]
    fn a_completion_counts_once_and_only_for_a_job_in_flight() {
        for wrong in [1_u64, u64::MAX, 0] {
            let (mut queue, _arena, completions, _socket) = queue_of_ours();
            let cookie = submit(&mut queue, 1).unwrap();
            submit(&mut queue, 2).unwrap();
            queue.ring();
            complete(&completions, 0, cookie);
            let mut done = Vec::new();
            assert_eq!(queue.poll(&mut done), Ok(()));
            assert_eq!(done, [Done { cookie, is_sealed: true }]);
            // Again, unknown, or the name that the slot had before.
            let taken = wrong == 1;
            if taken {
                queue.take(cookie, &mut [0; DATA_BYTES]);
            }
            let cookie = if wrong == u64::MAX { u64::MAX } else { cookie };
            complete(&completions, 1, cookie);
            assert_eq!(queue.poll(&mut done), Err(Broken::Cookie), "{wrong}");
            assert_eq!(done.len(), 1);
        }
    }

    #[test]
    fn what_a_card_writes_after_the_end_of_a_queue_reaches_nobody() {
        let is_mapped = |memory: &SharedMemory| {
            let inode = rustix::fs::fstat(memory.file()).unwrap().st_ino.to_string();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
        };
        let (mut queue, arena, completions, _socket) = queue_of_ours();
        submit(&mut queue, 1).unwrap();
        queue.ring();
        assert_eq!((is_mapped(&arena), is_mapped(&completions)), (2, 2), "the card's and ours");
        drop(queue);
        assert_eq!((is_mapped(&arena), is_mapped(&completions)), (1, 1), "only the card's");
        let (mut next, theirs, ..) = queue_of_ours();
        let cookie = submit(&mut next, 2).unwrap();
        // The card still has the memory of the queue that has ended.
        for memory in [&arena, &completions] {
            memory.copy_in(0, &vec![0xee; memory.len()]);
        }
        let mut canary = [0; DATA_BYTES];
        theirs.copy_out(data_offset((cookie % u64::from(DEPTH)) as u16), &mut canary);
        assert_eq!(canary, [2; DATA_BYTES]);
        assert_eq!(next.poll(&mut Vec::new()), Ok(()), "nothing has ended");
    }

    #[test]
    fn more_completions_than_jobs_are_refused_before_one_is_read() {
        for announced in [2, 9, 1 << 40, u64::MAX] {
            let (mut queue, _arena, completions, _socket) = queue_of_ours();
            submit(&mut queue, 1).unwrap();
            completions.word(0).store(announced, Ordering::Release);
            let mut done = Vec::new();
            assert_eq!(queue.poll(&mut done), Err(Broken::Overrun), "{announced}");
            assert!(done.is_empty());
        }
    }

    #[test]
    fn additional_data_longer_than_the_headroom_are_not_taken() {
        let (mut queue, ..) = queue_of_ours();
        let plain = [0; DATA_BYTES];
        let job = SealJob { key: KeySlot(0), nonce: [0; 12], aad: &[0; 65], plain: &plain };
        assert_eq!(queue.submit(&job), None);
        assert!(queue.has_room());
    }

    #[test]
    fn a_ring_full_of_anything_completes_only_jobs_in_flight_and_each_once() {
        let (mut queue, arena, completions, _socket) = queue_of_ours();
        let is_over = AtomicBool::new(false);
        let mut random = ChaCha8Rng::seed_from_u64(1);
        thread::scope(|scope| {
            // It writes to the slots all the time.
            scope.spawn(|| {
                let mut byte = 0_u8;
                while !is_over.load(Ordering::Relaxed) {
                    byte = byte.wrapping_add(1);
                    arena.copy_in(0, &vec![byte; arena.len()]);
                }
            });
            let (mut in_flight, mut used) = (HashSet::new(), HashSet::new());
            for _ in 0..20_000 {
                while let Some(cookie) = submit(&mut queue, random.next_u32() as u8) {
                    assert!(used.insert(cookie), "a name used twice");
                    in_flight.insert(cookie);
                }
                queue.ring();
                let next = queue.completed;
                let known = in_flight.iter().copied().max().unwrap_or_default();
                let cookie = match random.next_u32() % 4 {
                    0 => random.next_u64(),
                    1 => known.wrapping_sub(u64::from(random.next_u32() % 64)),
                    _ => *in_flight.iter().next().expect("some are in flight"),
                };
                complete(&completions, next, cookie);
                let mut done = Vec::new();
                let polled = queue.poll(&mut done);
                assert_eq!(polled.is_ok(), !done.is_empty());
                for done in done {
                    assert!(in_flight.remove(&done.cookie));
                    queue.take(done.cookie, &mut [0; DATA_BYTES]);
                }
            }
            is_over.store(true, Ordering::Relaxed);
            assert!(used.len() > 10_000, "{} jobs", used.len());
        });
    }
}
