//! Both ends of the shared memory at once, on two threads: whatever a reader sees of a receive is
//! complete.
//!
//! `RING_ROUNDS` sets the number of messages, at least [`ROUNDS_MIN`] (`make ring-stress`: 10^7).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sealane_proto::session::Reliability;

use super::layout::Layout;
use super::ring::{Completion, DaemonRing, JobRing, Operation, Submission, Terms};
use crate::shared_memory::{PeerAccess, SharedMemory};

const CHUNKS: u64 = 8;
const CHUNK_BYTES: u32 = 64;
const SLOTS: u16 = 4;
/// With fewer messages the two threads hardly meet.
const ROUNDS_MIN: u64 = 1000;
const REGION_BYTES: u64 = CHUNKS * CHUNK_BYTES as u64;

/// Waits until the reader has looked at the bitmap again, from beginning to end.
fn await_look(looks: &AtomicU64, is_over: &AtomicBool) {
    // Relaxed, so that it orders none of the reader's accesses after the writer's.
    let begun = looks.load(Ordering::Relaxed);
    while looks.load(Ordering::Relaxed) < begun + 2 && !is_over.load(Ordering::Relaxed) {
        std::thread::yield_now();
    }
}

/// The daemon's end: takes receives, lands their chunks with the handle as content, completes them.
fn land(ring: &mut DaemonRing, region: &SharedMemory, looks: &AtomicU64, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Acquire) {
        let Some((handle, submission)) = ring.take().expect("an honest job") else {
            std::thread::yield_now();
            continue;
        };
        let slot = (handle % u64::from(SLOTS)) as u16;
        ring.slot_posted(slot, handle, CHUNKS as u32);
        // Out of order, since the network determines which chunk lands first.
        for step in 0..CHUNKS {
            let chunk = (step * 5 + handle) % CHUNKS;
            let content = [handle as u8; CHUNK_BYTES as usize];
            region.copy_in(submission.offset + chunk * u64::from(CHUNK_BYTES), &content);
            ring.chunk_landed(slot, chunk as u32);
            if handle % 4 == 0 && step == handle / 4 % CHUNKS {
                // On few cores, the two would hardly meet.
                await_look(looks, is_over);
            }
        }
        ring.complete(&Completion { handle, ..Completion::default() });
    }
}

/// The job's end, one receive at a time: reads the bitmap while chunks land.
fn watch(ring: &mut JobRing, region: &SharedMemory, looks: &AtomicU64, rounds: u64) -> u64 {
    let receive =
        Submission { kind: Operation::Receive, offset: 0, length: REGION_BYTES, user_data: 0 };
    let mut seen_early = 0;
    for _ in 0..rounds {
        let handle = ring.post(&receive).expect("there is room");
        loop {
            let completions = ring.completions(1).expect("a sound ring");
            let bitmap = ring.bitmap(handle, CHUNKS as usize);
            if let Some(bytes) = bitmap.and_then(|bitmap| bitmap.read()) {
                for chunk in (0..CHUNKS).filter(|chunk| bytes[*chunk as usize] == 1) {
                    let mut content = [0; CHUNK_BYTES as usize];
                    region.copy_out(chunk * u64::from(CHUNK_BYTES), &mut content);
                    assert_eq!(content, [handle as u8; CHUNK_BYTES as usize], "bit before bytes");
                }
                seen_early += u64::from(completions.is_empty() && bytes.contains(&1));
            }
            looks.fetch_add(1, Ordering::Relaxed);
            if let Some(completion) = completions.first() {
                assert_eq!(completion.handle, handle);
                let bitmap = ring.bitmap(handle, CHUNKS as usize).expect("no later receive");
                assert_eq!(bitmap.read(), Some(vec![1; CHUNKS as usize]));
                break;
            }
            std::thread::yield_now();
        }
    }
    seen_early
}

/// The daemon's end: takes all submissions, and completes a random one of those it holds.
fn reorder(ring: &mut DaemonRing, is_over: &AtomicBool) {
    let (mut held, mut random) = (Vec::new(), 1_u64);
    while !is_over.load(Ordering::Acquire) {
        while let Some((handle, submission)) = ring.take().expect("an honest job") {
            held.push((handle, submission.user_data));
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if held.is_empty() {
            std::thread::yield_now();
            continue;
        }
        let (handle, user_data) = held.swap_remove((random >> 33) as usize % held.len());
        ring.complete(&Completion { handle, user_data, length: !handle, ..Completion::default() });
    }
}

/// The job's end: keeps the ring full, and counts the completions.
fn fill(ring: &mut JobRing, rounds: u64) {
    let (mut posted, mut open) = (0, BTreeSet::new());
    while posted < rounds || !open.is_empty() {
        while posted < rounds {
            let receive =
                Submission { kind: Operation::Receive, offset: 0, length: 1, user_data: !posted };
            let Ok(handle) = ring.post(&receive) else { break };
            assert_eq!(handle, posted, "handles count the posts");
            open.insert(handle);
            posted += 1;
        }
        let completions = ring.completions(3).expect("a sound ring");
        if completions.is_empty() {
            std::thread::yield_now();
        }
        for Completion { handle, user_data, length, .. } in completions {
            assert!(open.remove(&handle), "{handle} completed twice, or was never posted");
            assert_eq!((user_data, length), (!handle, !handle), "another entry's bytes");
        }
    }
}

/// Both ends meet at the beginning of a round.
#[derive(Default)]
struct Meeting([AtomicU64; 2]);

impl Meeting {
    fn meet(&self, end: usize, round: u64) {
        self.0[end].store(round, Ordering::Release);
        let mut spins = 0_u64;
        while self.0[1 - end].load(Ordering::Acquire) < round {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(1000) {
                // On a busy core the other end may wait for this one's.
                std::thread::yield_now();
            }
        }
    }
}

/// Both ends act at once, round after round: the daemon's returns whether it wakes the job, the job's
/// whether it has seen what the daemon's did. Each calls what it is given when it is ready. Returns
/// how often the job neither saw it nor was to be woken, and how often each end was the later one.
fn act_at_once(
    rounds: u64,
    mut daemon: impl FnMut(&dyn Fn()) -> bool + Send,
    mut job: impl FnMut(&dyn Fn()) -> bool,
) -> (u64, [u64; 2]) {
    let (begin, end, is_woken) = (Meeting::default(), Meeting::default(), AtomicBool::new(false));
    // Changes which end is the earlier one.
    let dawdle = |turns: u64| (0..turns).for_each(|_| std::hint::spin_loop());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=rounds {
                let wakes = daemon(&|| {
                    begin.meet(0, round);
                    dawdle(round % 8);
                });
                is_woken.store(wakes, Ordering::Relaxed);
                end.meet(0, round);
            }
        });
        let (mut missed, mut found) = (0, [0; 2]);
        for round in 1..=rounds {
            let has_seen = job(&|| {
                begin.meet(1, round);
                dawdle(round / 8 % 8);
            });
            end.meet(1, round);
            let is_woken = is_woken.load(Ordering::Relaxed);
            missed += u64::from(!has_seen && !is_woken);
            found[0] += u64::from(is_woken);
            found[1] += u64::from(has_seen);
        }
        (missed, found)
    })
}

/// In each round a chunk lands while the job asks to be woken for it.
fn land_and_want(rounds: u64) -> (u64, [u64; 2]) {
    let (mut daemon, job) = ends(View::Attached);
    daemon.slot_posted(0, 0, 1);
    let bitmap = job.bitmap(0, 1).expect("its slot is posted");
    act_at_once(
        rounds,
        |meet| {
            daemon.slot_posted(0, 0, 1);
            meet();
            daemon.chunk_landed(0, 0);
            daemon.take_chunk_wake()
        },
        |meet| {
            job.wake_for_chunks(false);
            meet();
            job.wake_for_chunks(true);
            bitmap.read().expect("no later receive") == [1]
        },
    )
}

/// In each round a send ends while the job asks to be woken for it.
fn end_and_want(rounds: u64) -> (u64, [u64; 2]) {
    let (mut daemon, mut job) = ends(View::Attached);
    let kind = Operation::Send(Terms::new(Reliability::SelectiveRepeat));
    let send = Submission { kind, offset: 0, length: 1, user_data: 0 };
    let mut unread = 0;
    act_at_once(
        rounds,
        |meet| {
            meet();
            let (handle, _) = daemon.take().expect("an honest job").expect("it was posted");
            daemon.complete(&Completion { handle, ..Completion::default() });
            daemon.is_send_wanted()
        },
        |meet| {
            unread -= job.completions(unread).expect("a sound ring").len();
            assert_eq!(unread, 0, "what was not seen at once is there later");
            job.quiet_sends(true);
            job.post(&send).expect("there is room");
            meet();
            job.quiet_sends(false);
            unread = 1 - job.completions(1).expect("a sound ring").len();
            unread == 0
        },
    )
}

/// How the job sees the memories: through its own mappings, like a real job, or through the
/// daemon's, so that ThreadSanitizer recognises them as the same memory.
#[derive(Clone, Copy)]
enum View {
    Attached,
    Aliased,
}

impl View {
    fn of(self, memory: &SharedMemory, access: PeerAccess) -> SharedMemory {
        match self {
            Self::Aliased => memory.alias().unwrap(),
            Self::Attached => {
                SharedMemory::attach(memory.file().try_clone_to_owned().unwrap(), access).unwrap()
            }
        }
    }
}

fn rounds(default: u64) -> u64 {
    let set = std::env::var("RING_ROUNDS").map(|text| text.parse().expect("a number"));
    let rounds = set.unwrap_or(default);
    assert!(rounds >= ROUNDS_MIN, "RING_ROUNDS={rounds} would test nothing");
    rounds
}

fn ends(view: View) -> (DaemonRing, JobRing) {
    let layout =
        Layout { entries: 8, region_bytes: REGION_BYTES, slots: SLOTS, chunk_bytes: CHUNK_BYTES };
    let create = |bytes, access| SharedMemory::create("stress", bytes, access).unwrap();
    let submission = create(layout.submission_bytes(), PeerAccess::Writes);
    let completion = create(layout.completion_bytes(), PeerAccess::Reads);
    let job_submission = view.of(&submission, PeerAccess::Writes);
    let job_completion = view.of(&completion, PeerAccess::Reads);
    let daemon = DaemonRing::new(layout, submission, completion);
    (daemon, JobRing::new(job_submission, job_completion).unwrap())
}

fn land_and_watch(view: View, rounds: u64) {
    let region = SharedMemory::create("stress", REGION_BYTES as usize, PeerAccess::Writes).unwrap();
    let job_region = view.of(&region, PeerAccess::Writes);
    let (mut daemon, mut job) = ends(view);
    let (looks, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| land(&mut daemon, &region, &looks, &is_over));
        let watching = scope.spawn(|| watch(&mut job, &job_region, &looks, rounds));
        let seen_early = watching.join();
        is_over.store(true, Ordering::Release);
        let seen_early = seen_early.expect("the reader must find no fault");
        assert!(seen_early > 0, "the bitmap was never read in the middle of a message");
        println!("{rounds} messages, {seen_early} looks in the middle of one");
    });
}

fn fill_and_reorder(view: View, rounds: u64) {
    let (mut daemon, mut job) = ends(view);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| reorder(&mut daemon, &is_over));
        let filling = scope.spawn(|| fill(&mut job, rounds)).join();
        is_over.store(true, Ordering::Release);
        filling.expect("the job must find no fault");
    });
}

#[test]
fn chunk_is_seen_only_after_its_bytes() {
    land_and_watch(View::Attached, rounds(20_000));
}

#[test]
fn chunk_is_seen_only_after_its_bytes_through_one_mapping() {
    land_and_watch(View::Aliased, rounds(1000));
}

/// 12,500 wraps of each queue.
#[test]
fn every_operation_completes_once_over_many_wraps() {
    fill_and_reorder(View::Attached, rounds(100_000));
}

#[test]
fn every_operation_completes_once_through_one_mapping() {
    fill_and_reorder(View::Aliased, rounds(1000));
}

/// Most attempts to have each end be the earlier one.
const MEETINGS: usize = 10;

/// The job must not sleep beside what it waits for, whichever end is the earlier one.
fn misses_nothing(attempt: impl Fn(u64) -> (u64, [u64; 2])) {
    let rounds = rounds(50_000);
    // On a busy machine, one end may be the earlier one for long.
    for _ in 0..MEETINGS {
        let (missed, found) = attempt(rounds);
        assert_eq!(missed, 0, "of {rounds}, the job would have slept");
        if found[0] > 0 && found[1] > 0 {
            return;
        }
    }
    eprintln!("the two ends never met: nothing was shown");
}

/// Processors reorder a store and a later load of another word, x86 as well.
#[test]
fn a_chunk_that_the_job_does_not_see_wakes_it() {
    misses_nothing(land_and_want);
}

#[test]
fn an_ended_send_that_the_job_does_not_see_wakes_it() {
    misses_nothing(end_and_want);
}
