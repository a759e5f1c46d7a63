//! The loop that drives one session machine: socket, rings and clock in; datagrams and completions
//! out.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sealane_proto::link::Nanos;
use sealane_proto::session::{Arrival, CloseReason, Ecn, Follow, Memory, Plan, Session, Source};

use super::doorbell::DaemonBell;
use super::endings::{REASON_JOB_GONE, close_code, of_permit};
use super::endpoint::{EndpointConfig, ForJob};
use super::lanes::Lanes;
use super::layout::Layout;
use super::limits::Limits;
use super::operations::Operations;
use super::pauses::Pauses;
use super::presence::Presence;
use super::region::Region;
use super::report::{Report, STATISTICS_NANOS, State};
use super::ring::{DaemonRing, RingFault};
use super::share::Flow;
use super::wire::WireAddress;
use crate::clock::{nanos, now, sharpen_timers, timespec};
use crate::permit::Permit;

/// Most receive calls and sent datagrams per turn, so that neither starves the other.
const RECEIVES_PER_TURN: usize = 16;
const DATAGRAMS_PER_TURN: usize = 256;
/// Datagrams between two reads of the clock: some microseconds.
const DATAGRAMS_PER_LOOK: usize = 8;
/// How long to wait for room to send, at least, unless something arrives.
const BLOCKED_NANOS: Nanos = 500_000;

/// The job's region, and the bitmap of what has landed in it.
#[derive(Debug)]
pub(super) struct JobMemory {
    pub(super) region: Region,
    pub(super) ring: DaemonRing,
}

impl Memory for JobMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        self.region.memory.copy_out(offset, into);
    }

    fn append(&self, offset: u64, length: usize, out: &mut Vec<u8>) {
        self.region.memory.append_out(offset, length, out);
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        self.region.memory.copy_in(offset, from);
    }

    fn chunk_landed(&mut self, slot: u16, chunk: u32) {
        self.ring.chunk_landed(slot, chunk);
    }

    fn chunks_cleared(&mut self, slot: u16, chunk_count: u32) {
        self.ring.chunks_cleared(slot, chunk_count);
    }
}

/// Everything owned by one session's thread.
pub(super) struct Worker {
    pub(super) session: Session,
    pub(super) lanes: Lanes,
    /// Local address of each path.
    pub(super) local_addresses: Vec<WireAddress>,
    /// Whether the peer may be behind a relay: until a path is validated, send to the source of the
    /// newest authentic packet on it.
    pub(super) follows_peer: bool,
    /// Minimum sleep times, so that several paced packets leave in one call.
    pub(super) pauses: Pauses,
    /// The sizes that the memories were created for.
    pub(super) shape: EndpointConfig,
    pub(super) job: ForJob,
    pub(super) layout: Layout,
    pub(super) memory: JobMemory,
    /// `None` once the session is over: the job reads the end of the stream.
    pub(super) bell: Option<DaemonBell>,
    pub(super) stop: OwnedFd,
    pub(super) report: Arc<Report>,
    /// A plan to install before the next submission.
    pub(super) next_plan: Arc<Mutex<Option<Plan>>>,
    pub(super) limits: Limits,
    /// The session ends when this permit no longer holds. `None`: no permit limits it.
    pub(super) permit: Option<Arc<Permit>>,
    /// Its part of its job's account; without one it has the line to itself.
    pub(super) flow: Option<Flow>,
    pub(super) progress: Progress,
}

/// State that the worker keeps between turns.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // independent of each other
pub(super) struct Progress {
    pub(super) operations: Operations,
    /// Whether a drain was requested and begun.
    pub(super) is_draining: bool,
    /// Why this side ended the session, if it did.
    pub(super) reason: Option<String>,
    presence: Presence,
    /// When the statistics were last published.
    pub(super) published: Nanos,
    pub(super) is_stale: bool,
    pub(super) must_ring: bool,
    /// A send has succeeded since the last `publish`.
    pub(super) has_sent: bool,
    pub(super) has_more: bool,
    /// Bytes of datagrams received in the last turn.
    received_bytes: usize,
    pub(super) is_over: bool,
}

impl Progress {
    /// Nothing done yet; receives land in this region.
    pub(super) fn new(region: &Region) -> Self {
        Self {
            operations: Operations::new(Arc::clone(&region.landing)),
            is_draining: false,
            reason: None,
            presence: Presence::default(),
            published: 0,
            is_stale: false,
            must_ring: false,
            has_sent: false,
            has_more: false,
            received_bytes: 0,
            is_over: false,
        }
    }

    /// How long to keep sleeping even if more may have arrived, if at all.
    fn sleeps_on(&self, moderation: Option<Nanos>) -> Option<Nanos> {
        moderation.filter(|_| !self.has_more)
    }
}

impl Worker {
    /// Runs until the session is over and the peer has been notified.
    pub(super) fn run(mut self) {
        sharpen_timers();
        self.progress.presence = Presence::new(now());
        loop {
            assert!(!self.lanes.has_failed(), "a path thread has failed");
            self.progress.received_bytes = 0;
            // Before receiving from or sending to the peer, since an ended session does neither.
            self.end_unpermitted();
            self.receive();
            self.note_drops();
            let time = self.look();
            if self.session.next_timeout().is_some_and(|at| at <= time) {
                self.session.handle_timeout(time);
                self.lanes.moved(self.session.take_moved());
            }
            self.lanes.update(&self.session);
            self.expire(time);
            if !self.progress.is_over && self.session.has_unit() {
                self.submit();
            }
            let is_early = self.pauses.is_early(&mut self.session, self.flow.as_ref(), now());
            if !is_early || self.lanes.is_blocked() {
                self.transmit();
            }
            self.drain_events();
            self.publish();
            if self.progress.is_over && self.session.is_closed() {
                return;
            }
            self.look();
            self.wait();
        }
    }

    /// The current time. Reports to the machine a period in which the thread did not run, which is
    /// not silence of the peer.
    fn look(&mut self) -> Nanos {
        let time = now();
        if let Some(away) = self.progress.presence.look(time) {
            self.session.was_away(away);
        }
        time
    }

    fn receive(&mut self) {
        let Self { session, lanes, follows_peer, memory, progress, .. } = self;
        for _ in 0..RECEIVES_PER_TURN {
            let time = now();
            let received = lanes.receive(|(path, source), datagram, meta| {
                let follows = *follows_peer || session.is_validated(path);
                let source = match source {
                    Source::Elsewhere if !follows => Source::Foreign,
                    source => source,
                };
                let ecn = Ecn::from_bits(meta.ecn.map_or(0, |codepoint| codepoint as u8));
                let arrival = Arrival { path, source, ecn };
                let follow = session.receive_packet(datagram, arrival, memory, time);
                follow.unwrap_or(Follow::Nowhere)
            });
            match received {
                None => return,
                Some(Ok(received)) => progress.received_bytes += received.bytes,
                // An error is a late ICMP error about an earlier packet, which is lost.
                Some(Err(_)) => {}
            }
        }
        if !lanes.has_datagrams() {
            return;
        }
        progress.has_more = true;
    }

    /// Tells the session what this host has dropped, before missing packets count as lost.
    fn note_drops(&mut self) {
        let Self { session, lanes, .. } = self;
        for path in lanes.paths() {
            if session.misses_packets(path) {
                session.host_dropped(path, lanes.receive_drops_on(path), now());
            }
        }
    }

    pub(super) fn end_for(&mut self, fault: RingFault) {
        self.end(fault.reason(), CloseReason::Requested);
    }

    /// Ends the session unless it has ended: this end records the full reason, the peer gets a
    /// code.
    pub(super) fn end(&mut self, reason: String, code: CloseReason) {
        self.progress.reason.get_or_insert(reason);
        self.session.close(code, now());
    }

    /// Ends the session if its peer may no longer act.
    fn end_unpermitted(&mut self) {
        if let Some(permit) = self.permit.as_ref().filter(|permit| !permit.holds()) {
            let reason = of_permit(permit.reason()).to_owned();
            let code = close_code(&reason, self.progress.is_draining);
            // The session is closed from here on, regardless of the permit.
            self.permit = None;
            self.end(reason, code);
        }
    }

    /// Begins the drain that the daemon has requested, if it has.
    pub(super) fn begin_drain(&mut self) {
        if !self.progress.is_draining && self.report.is_to_drain.load(Ordering::Acquire) {
            self.progress.is_draining = true;
            self.session.drain(now());
        }
    }

    /// Carries out the daemon's requests.
    fn obey(&mut self) {
        self.begin_drain();
        let asked = self.report.end.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(reason) = asked {
            let code = close_code(&reason, self.progress.is_draining);
            self.end(reason, code);
        }
    }

    fn transmit(&mut self) {
        self.transmit_turn();
        let Self { session, flow, .. } = self;
        if let Some(flow) = flow {
            flow.end_turn(session, now());
        }
    }

    fn transmit_turn(&mut self) {
        let Self { session, lanes, memory, progress, flow, .. } = self;
        // Batches that the kernel did not accept last time go first; batches being gathered
        // continue.
        lanes.flush(true);
        let mut time = now();
        for index in 0..DATAGRAMS_PER_TURN {
            if lanes.is_blocked() {
                // What was gathered for other paths need not wait.
                lanes.flush(false);
                return;
            }
            if index % DATAGRAMS_PER_LOOK == 0 {
                time = now();
                if index > 0 && memory.ring.is_next_urgent() {
                    break;
                }
            }
            session.hold_units(flow.as_ref().is_some_and(Flow::is_spent));
            let before = session.wire_bytes_sent();
            let pushed = lanes.push(|train| {
                session.next_packet(&*memory, time, train).then(|| session.departure())
            });
            if let Some(flow) = flow {
                flow.spend(session.wire_bytes_sent() - before);
                if !pushed && session.has_held_units(time) && flow.ask(time) {
                    continue;
                }
            }
            if !pushed {
                lanes.flush(false);
                return;
            }
        }
        progress.has_more = true;
    }

    fn wait(&mut self) {
        let moderation = self.session.moderation(self.progress.received_bytes as u64);
        let moderation = self.progress.sleeps_on(moderation);
        let timeout = self.timeout(moderation.unwrap_or(Nanos::MAX));
        let is_deaf = !self.progress.has_more
            && !self.lanes.is_blocked()
            && self.pauses.is_deaf(&self.session, now());
        let gathers = moderation.is_some() || is_deaf;
        let timeout = if self.lanes.fall_asleep(!gathers) { timeout } else { Some(timespec(0)) };
        let has_left_some = std::mem::take(&mut self.progress.has_more);
        let watch = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds = vec![watch(self.stop.as_fd())];
        fds.extend(self.flow.as_ref().map(|flow| watch(flow.wake())));
        fds.extend(self.bell.iter().flat_map(DaemonBell::poll_fds));
        let others = fds.len();
        fds.extend(self.lanes.poll_fds(!gathers));
        let due = timeout.map(|timeout| now().saturating_add(nanos(timeout)));
        let polled = poll(&mut fds, timeout.as_ref());
        Pauses::woken(&mut self.session, is_deaf, has_left_some);
        self.progress.presence.slept(due, now());
        if polled.is_err() {
            return; // EINTR: the loop looks at everything again
        }
        let of_lanes: Vec<_> = fds.iter().skip(others).map(PollFd::revents).collect();
        let mut rest = fds.iter().map(|fd| !fd.revents().is_empty());
        let stop = rest.next() == Some(true);
        let is_granted = self.flow.is_some() && rest.next() == Some(true);
        let is_called = self.bell.is_some() && rest.next() == Some(true);
        let is_job_gone = self.bell.is_some() && rest.next() == Some(true);
        self.lanes.polled(!gathers, &of_lanes);
        if let Some(flow) = self.flow.as_ref().filter(|_| is_granted) {
            flow.woken();
        }
        if stop {
            crate::event::clear(&self.stop);
            self.obey();
        }
        if let Some(bell) = self.bell.as_ref().filter(|_| is_called) {
            bell.take_calls();
        }
        if is_job_gone {
            self.end(REASON_JOB_GONE.into(), CloseReason::Requested);
        }
    }

    /// Time until something needs to be done even if nothing arrives, at most `longest`.
    fn timeout(&mut self, longest: Nanos) -> Option<Timespec> {
        if self.progress.has_more {
            return Some(timespec(0));
        }
        let time = now();
        let is_blocked = self.lanes.is_blocked();
        let at = self.pauses.until(&mut self.session, self.flow.as_ref(), is_blocked, time);
        let of_lanes = self.lanes.due_in().map(|time_left| {
            time.saturating_add(Nanos::try_from(time_left.as_nanos()).unwrap_or(Nanos::MAX))
        });
        let at = at.into_iter().chain(self.progress.operations.next_deadline());
        let at = at.chain(of_lanes).min()?;
        let fresh_until = self.progress.published.saturating_add(STATISTICS_NANOS);
        let at = if self.progress.is_stale { at.min(fresh_until) } else { at };
        // What is due can't leave before the kernel or a path thread says that there is room.
        let at = if is_blocked { at.max(time.saturating_add(BLOCKED_NANOS)) } else { at };
        let at = at.min(time.saturating_add(longest));
        Some(timespec(at.saturating_sub(time)))
    }
}

impl Drop for Worker {
    /// Also after a panic: nobody may wait for a session without a thread.
    fn drop(&mut self) {
        if !self.progress.is_over {
            let reason = "session.worker.failed";
            self.memory.ring.publish_closed(reason);
            self.report.set(State::Closed { reason: reason.into() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_sleeps_on_only_when_it_has_taken_all() {
        let region = Region::new(4096).unwrap();
        let after =
            |has_more| Progress { has_more, ..Progress::new(&region) }.sleeps_on(Some(50_000));
        assert_eq!(after(false), Some(50_000));
        assert_eq!(after(true), None, "there is work left");
    }
}
