//! Messages between two ends of a session over loopback, back to back, in this process.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::AsFd;
use rustix::time::Timespec;
use sealane_engine::session::completion::Status;
use sealane_engine::session::endpoint::{Endpoint, EndpointConfig, StartConfig, State};
use sealane_engine::session::entry::{Operation, Submission, Terms};
use sealane_engine::session::job::Job;
use sealane_engine::session::region::Region;
use sealane_engine::session::statistics;
use sealane_engine::session::wire::{Bind, WireAddress};
use sealane_proto::aead::Secret;
use sealane_proto::session::{Reliability, SessionKeys, Steering, Units, Version};

use crate::Meter;

/// What is moved, and how.
struct Shape {
    /// Bytes of a message.
    message: u64,
    /// Messages in flight.
    in_flight: u64,
    /// Payload bytes of a packet.
    unit: u16,
    /// Units of a bitmap chunk.
    chunk: u16,
    paths: usize,
    /// Path threads at each end.
    threads: u8,
    seconds: f64,
    /// Rate of the session, bit/s.
    rate: u64,
}

impl Shape {
    fn parse(text: &str) -> Result<Self> {
        let mut shape = Self {
            message: 1 << 20,
            in_flight: 16,
            unit: 1408,
            chunk: 16,
            paths: 1,
            threads: 0,
            seconds: 2.0,
            rate: 400_000_000_000,
        };
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').context("NAME=VALUE")?;
            match name {
                "message" => shape.message = value.parse()?,
                "in_flight" => shape.in_flight = value.parse()?,
                "unit" => shape.unit = value.parse()?,
                "chunk" => shape.chunk = value.parse()?,
                "paths" => shape.paths = value.parse()?,
                "threads" => shape.threads = value.parse()?,
                "seconds" => shape.seconds = value.parse()?,
                "rate" => shape.rate = value.parse()?,
                _ => bail!("unknown: {name}"),
            }
        }
        Ok(shape)
    }

    fn endpoint(&self) -> Result<(Endpoint, Job)> {
        let region = Region::new((self.message * self.in_flight).next_multiple_of(4096))?;
        let config = EndpointConfig {
            ring_entries: 256,
            unit_bytes: self.unit,
            chunk_units: self.chunk,
            slots: u16::try_from(self.in_flight.next_power_of_two())?,
        };
        let bind = vec![Bind::Udp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))); self.paths];
        let mut endpoint = Endpoint::new(config, region, &bind, None, 0)?;
        let job = endpoint.take_job_descriptors().context("descriptors")?;
        let job = Job::attach(job.region, job.submission, job.completion, job.bell, None)?;
        Ok((endpoint, job))
    }

    fn start(&self, endpoint: &mut Endpoint, peer: &[WireAddress], index: u64) -> Result<()> {
        let secret = |direction: u64| Secret::take(&mut [direction as u8 + 1; 32]);
        let keys = SessionKeys {
            send: secret(index),
            receive: secret(1 - index),
            token_seed: [index as u8; 32],
        };
        let start = StartConfig {
            version: Version::V6,
            peer_addresses: peer.to_vec(),
            connection_id_local: index,
            connection_id_peer: 1 - index,
            units: Units::fixed(self.unit),
            rate_bits_per_second: self.rate,
            steering: Steering::default(),
            idle_timeout_nanos: 20_000_000_000,
            reordering_nanos: 0,
            is_initiator: index == 0,
            permit: None,
            path_threads: self.threads,
        };
        Ok(endpoint.start(&start, &keys)?)
    }

    fn post(&self, job: &mut Job, place: u64, kind: Operation) -> Result<()> {
        let (offset, length) = (place * self.message, self.message);
        job.post(&Submission { kind, offset, length, user_data: place })
            .map_err(|refused| anyhow::anyhow!("{refused:?}"))?;
        Ok(())
    }

    /// Keeps messages in flight until `end`, then lets them end; counts them in `done`. Returns the
    /// job, without which the session ends.
    fn drive(
        &self,
        mut job: Job,
        kind: Operation,
        end: &AtomicU64,
        done: &AtomicU64,
    ) -> Result<Job> {
        let mut posted = 0;
        while posted < self.in_flight {
            self.post(&mut job, posted, kind)?;
            posted += 1;
        }
        while done.load(Ordering::Relaxed) < posted {
            let completions = job.completions(64)?;
            if completions.is_empty() {
                let wait = Timespec { tv_sec: 10, tv_nsec: 0 };
                let found =
                    poll(&mut [PollFd::new(&job.doorbell().as_fd(), PollFlags::IN)], Some(&wait))?;
                ensure!(found > 0, "nothing completed for 10 s");
            }
            for completion in &completions {
                let status = completion.status;
                ensure!(
                    status == Status::Ok,
                    "a message ended: {status:?}, {}",
                    job.close_reason()
                );
            }
            done.fetch_add(completions.len() as u64, Ordering::Relaxed);
            for completion in &completions {
                if posted < end.load(Ordering::Relaxed) {
                    self.post(&mut job, completion.user_data, kind)?;
                    posted += 1;
                }
            }
        }
        Ok(job)
    }
}

fn wait_established(endpoint: &Endpoint) -> Result<()> {
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        match endpoint.state() {
            State::Established => return Ok(()),
            State::Closed { reason } => bail!("closed: {reason}"),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    bail!("not established after 10 s")
}

/// Moves messages for some seconds and prints the figures.
pub fn run(shape: &str) -> Result<()> {
    let shape = Shape::parse(shape)?;
    let ((mut near, sending), (mut far, receiving)) = (shape.endpoint()?, shape.endpoint()?);
    let (near_addresses, far_addresses) =
        (near.local_addresses().to_vec(), far.local_addresses().to_vec());
    shape.start(&mut near, &far_addresses, 0)?;
    shape.start(&mut far, &near_addresses, 1)?;
    wait_established(&near)?;
    wait_established(&far)?;
    let send = Operation::Send(Terms::new(Reliability::SelectiveRepeat));
    let end = AtomicU64::new(u64::MAX);
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let meter = std::thread::scope(|scope| {
        let sender = scope.spawn(|| shape.drive(sending, send, &end, &sent));
        let receiver = scope.spawn(|| shape.drive(receiving, Operation::Receive, &end, &received));
        // Not the start, when buffers are touched for the first time.
        std::thread::sleep(Duration::from_secs_f64(shape.seconds / 4.0));
        let (meter, before) = (Meter::start(), received.load(Ordering::Relaxed));
        std::thread::sleep(Duration::from_secs_f64(shape.seconds));
        let moved = received.load(Ordering::Relaxed) - before;
        let figures = meter.figures();
        let last = received.load(Ordering::Relaxed) + 4 * shape.in_flight;
        end.store(last, Ordering::Relaxed);
        let ended = [receiver, sender].map(|end| end.join());
        (figures, moved, ended)
    });
    let ((seconds, processor), moved, ended) = meter;
    for end in ended {
        let end = end.map_err(|_| anyhow::anyhow!("a job panicked"))?;
        if let Err(error) = end {
            bail!("{error}; sender's end: {:?}, receiver's: {:?}", near.state(), far.state());
        }
    }
    let statistics = |endpoint: &Endpoint| {
        let named = statistics::names().zip(endpoint.figures().statistics());
        let shown = named.filter(|(_, value)| *value > 0);
        shown.map(|(name, value)| format!(r#""{name}": {value}"#)).collect::<Vec<_>>().join(", ")
    };
    println!(
        r#"{{"messages": {moved}, "bytes": {}, "seconds": {seconds}, "processor_seconds": {processor}, "sender": {{{}}}, "receiver": {{{}}}}}"#,
        moved * shape.message,
        statistics(&near),
        statistics(&far),
    );
    std::process::exit(0)
}
