//! Both ends of the shared memory at once, on two threads: what a reader sees of a receive is whole.
//!
//! `RING_ROUNDS` sets the number of messages (`make ring-stress`: 10^7).

use std::sync::atomic::{AtomicBool, Ordering};

use super::layout::Layout;
use super::region::{JobAccess, SharedMemory};
use super::ring::{Completion, DaemonRing, JobRing, Operation, Submission};

const CHUNKS: u64 = 8;
const CHUNK_BYTES: u32 = 64;
const SLOTS: u16 = 4;
const REGION_BYTES: u64 = CHUNKS * CHUNK_BYTES as u64;

/// The daemon's end: takes receives, lands their chunks with the handle as content, completes.
fn land(ring: &mut DaemonRing, region: &SharedMemory, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Acquire) {
        let Some((handle, submission)) = ring.take().expect("an honest job") else {
            std::thread::yield_now();
            continue;
        };
        let slot = (handle % u64::from(SLOTS)) as u16;
        ring.slot_posted(slot, handle, CHUNKS as u32);
        // Not in order: which chunk lands first is the network's affair.
        for step in 0..CHUNKS {
            let chunk = (step * 5 + handle) % CHUNKS;
            let content = [handle as u8; CHUNK_BYTES as usize];
            region.copy_in(submission.offset + chunk * u64::from(CHUNK_BYTES), &content);
            ring.chunk_landed(slot, chunk as u32);
            if handle % 4 == 0 {
                // Let the reader look in between, however few cores there are.
                std::thread::yield_now();
            }
        }
        ring.complete(&Completion { handle, ..Completion::default() });
    }
}

/// The job's end, one receive at a time: looks at the bitmap while it lands.
fn watch(ring: &mut JobRing, region: &SharedMemory, rounds: u64) -> u64 {
    let receive =
        Submission { kind: Operation::Receive, offset: 0, length: REGION_BYTES, user_data: 0 };
    let mut seen_early = 0;
    for _ in 0..rounds {
        let handle = ring.post(&receive).expect("there is room");
        loop {
            let completions = ring.completions(1).expect("a sound ring");
            if let Some(bytes) = ring.bitmap(handle, CHUNKS as usize) {
                for chunk in (0..CHUNKS).filter(|chunk| bytes[*chunk as usize] == 1) {
                    let mut content = [0; CHUNK_BYTES as usize];
                    region.copy_out(chunk * u64::from(CHUNK_BYTES), &mut content);
                    assert_eq!(content, [handle as u8; CHUNK_BYTES as usize], "bit before bytes");
                }
                seen_early += u64::from(completions.is_empty() && bytes.contains(&1));
            }
            if let Some(completion) = completions.first() {
                assert_eq!(completion.handle, handle);
                assert_eq!(ring.bitmap(handle, CHUNKS as usize), Some(vec![1; CHUNKS as usize]));
                break;
            }
            std::thread::yield_now();
        }
    }
    seen_early
}

#[test]
fn chunk_is_seen_only_after_its_bytes() {
    let rounds =
        std::env::var("RING_ROUNDS").map_or(20_000, |text| text.parse().expect("a number"));
    let layout =
        Layout { entries: 8, region_bytes: REGION_BYTES, slots: SLOTS, chunk_bytes: CHUNK_BYTES };
    let create = |bytes, access| SharedMemory::create("stress", bytes, access).unwrap();
    let attach = |memory: &SharedMemory, access| {
        SharedMemory::attach(memory.file().try_clone_to_owned().unwrap(), access).unwrap()
    };
    let region = create(REGION_BYTES as usize, JobAccess::Writes);
    let submission = create(layout.submission_bytes(), JobAccess::Writes);
    let completion = create(layout.completion_bytes(), JobAccess::Reads);
    let job_region = attach(&region, JobAccess::Writes);
    let job_submission = attach(&submission, JobAccess::Writes);
    let job_completion = attach(&completion, JobAccess::Reads);
    let mut daemon = DaemonRing::new(layout, submission, completion);
    let mut job = JobRing::new(job_submission, job_completion).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| land(&mut daemon, &region, &is_over));
        let watching = scope.spawn(|| watch(&mut job, &job_region, rounds));
        let seen_early = watching.join();
        is_over.store(true, Ordering::Release);
        let seen_early = seen_early.expect("the reader found nothing wrong");
        assert!(seen_early > 0, "nobody looked in the middle of a message");
        println!("{rounds} messages, {seen_early} looks in the middle of one");
    });
}
