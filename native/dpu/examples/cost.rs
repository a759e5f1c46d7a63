//! What it costs a gateway's thread to have sectors sealed by a card, and how long that takes, in
//! batches of several sizes. With `processor` in place of a socket, the thread seals by itself.
//!
//! `cost SOCKET|processor JOBS BATCH…` prints one line of JSON for each size. A benchmark of
//! `python -m benchmarks.offload`, which measures the card's own time.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use sealane_engine::accelerator::card::Card;
use sealane_engine::accelerator::{Device, Done, KeySlot, Queue, SealJob};
use sealane_proto::aead::{AeadKey, Sample, Secret};
use sealane_proto::sector::{AAD_BYTES, DATA_BYTES};

const AAD: [u8; AAD_BYTES] = [9; AAD_BYTES];

/// Processor time of this thread.
fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a time since its start")
}

struct Work {
    key: AeadKey,
    card: Option<(KeySlot, Box<dyn Queue>)>,
    count: u64,
    plain: [u8; DATA_BYTES],
    /// Where the ciphertext goes.
    made: [u8; DATA_BYTES],
}

impl Work {
    fn nonce(&self, number: u64) -> [u8; 12] {
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&(self.count + number).to_le_bytes());
        nonce
    }

    /// Has a batch sealed, and what a card sealed checked as a gateway does.
    fn seal(&mut self, batch: u64) {
        let Some((slot, mut queue)) = self.card.take() else {
            for number in 0..batch {
                self.made = self.plain;
                let _ = self.key.seal(self.nonce(number), &AAD, &mut self.made);
            }
            self.count += batch;
            return;
        };
        let first = self.count;
        let mut cookies = Vec::new();
        for number in 0..batch {
            let nonce = self.nonce(number);
            let job = SealJob { key: slot, nonce, aad: &AAD, plain: &self.plain };
            cookies.push((queue.submit(&job).expect("a batch fits in a queue"), nonce));
        }
        queue.ring();
        let mut done: Vec<Done> = Vec::new();
        while done.len() < cookies.len() {
            let mut bell = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
            poll(&mut bell, None).expect("a poll");
            queue.hear();
            queue.poll(&mut done).expect("a card that keeps to the protocol");
        }
        for (cookie, nonce) in cookies {
            let tag = queue.take(cookie, &mut self.made);
            let sample = Sample::Block((first % 256) as u32);
            let both = (&self.plain[..], &self.made[..]);
            self.key.check_sealed(nonce, &AAD, both, &tag, sample).expect("a right result");
        }
        self.count += batch;
        self.card = Some((slot, queue));
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, jobs, batches @ ..] = &arguments[..] else {
        panic!("cost SOCKET|processor JOBS BATCH…");
    };
    let jobs: u64 = jobs.parse().expect("jobs: a number");
    let secret = Secret::take(&mut [7; 32]);
    let device = (socket != "processor")
        .then(|| Card::connect(Path::new(socket)).expect("a card that answers"));
    let depth = device.as_ref().map_or(u64::MAX, |device| device.capabilities().depth.into());
    let card = device.as_ref().map(|device| {
        (device.load(&secret).expect("a place for a key"), device.queue().expect("a queue"))
    });
    let plain = [3; DATA_BYTES];
    let mut work = Work { key: AeadKey::new(&secret), card, count: 0, plain, made: plain };
    for batch in batches {
        let batch: u64 = batch.parse().expect("batch: a number");
        if batch > depth {
            continue;
        }
        (0..16).for_each(|_| work.seal(batch));
        let rounds = jobs.div_ceil(batch);
        let mut latencies = Vec::with_capacity(rounds as usize);
        let (start, used) = (Instant::now(), thread_time());
        for _ in 0..rounds {
            let start = Instant::now();
            work.seal(batch);
            latencies.push(start.elapsed());
        }
        let (took, used) = (start.elapsed(), thread_time().saturating_sub(used));
        latencies.sort_unstable();
        let sectors = rounds * batch;
        let quantile = |percent: usize| latencies[(latencies.len() - 1) * percent / 100];
        println!(
            r#"{{"batch": {batch}, "sectors": {sectors}, "seconds": {:.6}, "thread_ns": {:.1}, "p50_us": {:.2}, "p99_us": {:.2}}}"#,
            took.as_secs_f64(),
            used.as_nanos() as f64 / sectors as f64,
            quantile(50).as_nanos() as f64 / 1e3,
            quantile(99).as_nanos() as f64 / 1e3,
        );
    }
}
