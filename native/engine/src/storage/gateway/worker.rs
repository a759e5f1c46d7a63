//! The thread of one front-end queue: moves bytes between its sockets and the state machine.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sealane_proto::link::Nanos;
use sealane_proto::nvme::Reason;
use sealane_proto::nvme::controller_queue::ControllerQueue;

use super::super::connection::{Connection, Gone};
use super::Mailbox;
use super::front::Front;
use super::queue::{Ended, GatewayQueue, HOST_WINDOW};
use crate::clock::now;

/// How long a queue that stops, or whose host is gone, waits for its commands at the target. After
/// that it gives up its association, and the fence ends the commands.
const DRAIN: Nanos = 5_000_000_000;

/// Runs until the host is gone or `stop` is readable, and nothing is in flight to the target.
pub(super) fn run(
    mut queue: GatewayQueue<ControllerQueue>,
    mut front: Connection,
    mailbox: &Mailbox,
    stop: &OwnedFd,
) -> Ended {
    // Freeing the host's dirty pages may depend on this thread, so it must not wait for that.
    // Without the capability (CAP_SYS_RESOURCE) it runs as an ordinary thread.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let mut drained_by = None;
    let ended = serve(&mut queue, &mut front, mailbox, stop, &mut drained_by);
    queue.abandon();
    front.shut_down(queue.front.transmit());
    // The host must see the end now, so that it can reconnect while the rest drains.
    drop(front);
    drain(&mut queue, mailbox, drained_by.unwrap_or_else(|| now() + DRAIN));
    ended
}

/// Serves the host. Once `stop` is readable, `drained_by` is set and it takes no more commands; it
/// returns when none is at the target: a host repeats an unanswered command on another path, and
/// the one at the target must not come after what the host writes there.
fn serve(
    queue: &mut GatewayQueue<ControllerQueue>,
    front: &mut Connection,
    mailbox: &Mailbox,
    stop: &OwnedFd,
    drained_by: &mut Option<Nanos>,
) -> Ended {
    loop {
        if drained_by.is_some_and(|until| queue.parts.is_empty() || now() >= until) {
            return ("", "stopped".into());
        }
        let pending = queue.front.transmit().pending_bytes();
        let takes = drained_by.is_none();
        let interest = Connection::interest(takes && pending < HOST_WINDOW, pending);
        let first = [
            PollFd::new(stop, if takes { PollFlags::IN } else { PollFlags::empty() }),
            PollFd::from_borrowed_fd(mailbox.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(front.as_fd(), interest),
        ];
        let ready = match ready_until(queue, first, *drained_by) {
            Ok(ready) => ready,
            Err(error) => return ("", error.to_string()),
        };
        let (&[stopped, woken, front_ready], backs_ready) =
            ready.split_first_chunk().expect("as many as were polled");
        if !stopped.is_empty() {
            *drained_by = Some(now() + DRAIN);
        }
        if drained_by.is_some() {
            if front_ready.intersects(!PollFlags::OUT) {
                return ("", "stopped".into());
            }
        } else if front_ready.intersects(!PollFlags::OUT) {
            mailbox.hear();
            if let Err(Gone(detail)) = front.receive(&mut queue.front) {
                return ("", detail);
            }
        }
        // Answers first: after a new back end is added, those of an older association are of no
        // use.
        receive(queue, backs_ready);
        if !woken.is_empty() {
            take_mail(queue, mailbox);
        }
        let time = now();
        if let Some(ended) = queue.take_front_events(time) {
            return ended;
        }
        queue.take_back_events(time);
        queue.handle_timeout(time);
        // Send to the host first, which makes room for submissions.
        if let Err(Gone(detail)) = front.send(queue.front.transmit()) {
            return ("", detail);
        }
        queue.submit(time);
        send(queue);
        // Submitting may have answered commands.
        if let Err(Gone(detail)) = front.send(queue.front.transmit()) {
            return ("", detail);
        }
        mailbox.unanswered.store(queue.front.outstanding(), Ordering::Relaxed);
    }
}

/// Waits until the parts at the target have ended.
fn drain(queue: &mut GatewayQueue<impl Front>, mailbox: &Mailbox, deadline: Nanos) {
    while !queue.parts.is_empty() && now() < deadline {
        let first = [PollFd::from_borrowed_fd(mailbox.as_fd(), PollFlags::IN)];
        let Ok(ready) = ready_until(queue, first, Some(deadline)) else { return };
        receive(queue, &ready[1..]);
        if !ready[0].is_empty() {
            // Back ends for a queue whose host is gone are dropped.
            drop(mailbox.take());
            take_switch(queue, mailbox);
        }
        let time = now();
        queue.take_back_events(time);
        queue.handle_timeout(time);
        queue.submit(time);
        send(queue);
    }
}

pub(super) fn take_mail(queue: &mut GatewayQueue<impl Front>, mailbox: &Mailbox) {
    for back in mailbox.take() {
        queue.add_back(back, now());
    }
    take_switch(queue, mailbox);
}

fn take_switch(queue: &mut GatewayQueue<impl Front>, mailbox: &Mailbox) {
    if let Some(switch) = mailbox.take_acceleration() {
        queue.switch_acceleration(switch);
    }
}

/// Waits for the descriptors, the back ends and then the accelerator, no longer than `until`.
pub(super) fn ready_until<const N: usize>(
    queue: &mut GatewayQueue<impl Front>,
    first: [PollFd<'_>; N],
    until: Option<Nanos>,
) -> rustix::io::Result<Vec<PollFlags>> {
    let until = [until, queue.next_timeout()].into_iter().flatten().min();
    let mut descriptors: Vec<PollFd<'_>> = first.into();
    let interests: Vec<PollFlags> = queue
        .backs
        .iter_mut()
        .map(|back| Connection::interest(true, back.queue.transmit().pending_bytes()))
        .collect();
    for (back, interest) in queue.backs.iter().zip(interests) {
        descriptors.push(PollFd::from_borrowed_fd(back.connection.as_fd(), interest));
    }
    if let Some(acceleration) = &queue.acceleration {
        descriptors.push(PollFd::from_borrowed_fd(acceleration.fd(), PollFlags::IN));
    }
    loop {
        let left = until.map(|until| Duration::from_nanos(until.saturating_sub(now())));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut descriptors, timeout.as_ref()) {
            Ok(_) => return Ok(descriptors.iter().map(PollFd::revents).collect()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Receives from the back ends that are ready, and hears the accelerator.
pub(super) fn receive(queue: &mut GatewayQueue<impl Front>, ready: &[PollFlags]) {
    let is_called = ready.get(queue.backs.len()).is_some_and(|ready| !ready.is_empty());
    if is_called && let Some(acceleration) = &mut queue.acceleration {
        acceleration.hear();
    }
    let mut lost = None;
    for (back, ready) in queue.backs.iter_mut().zip(ready) {
        if ready.intersects(!PollFlags::OUT)
            && let Err(Gone(detail)) = back.connection.receive(&mut back.queue)
        {
            lost = Some(detail);
        }
    }
    if let Some(detail) = lost {
        let time = now();
        // Answers received before the end still count.
        queue.take_back_events(time);
        queue.lose_back(Reason::QueueClosed, None, &detail, time);
    }
}

pub(super) fn send(queue: &mut GatewayQueue<impl Front>) {
    let mut lost = None;
    for back in &mut queue.backs {
        if let Err(Gone(detail)) = back.connection.send(back.queue.transmit()) {
            lost = Some(detail);
        }
    }
    if let Some(detail) = lost {
        queue.lose_back(Reason::QueueClosed, None, &detail, now());
    }
}
