//! Starts, counts and stops the queue threads of one volume.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

use crate::clock::sharpen_timers;

#[derive(Debug, Clone)]
struct Running {
    association: u64,
    stop: Arc<OwnedFd>,
    /// Taken by the first caller that waits for the thread; it holds the lock until the thread has
    /// ended, so every other caller that stops the queue waits, too.
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Running {
    fn has_ended(&self) -> bool {
        match self.thread.try_lock() {
            Ok(thread) => thread.as_ref().is_none_or(JoinHandle::is_finished),
            Err(_) => false,
        }
    }
}

/// Queue threads of one volume.
#[derive(Debug, Default)]
pub struct Queues {
    running: Mutex<Vec<Running>>,
}

impl Queues {
    /// Starts a thread. `body` gets a descriptor that becomes readable when it must stop.
    pub fn start(
        &self,
        name: String,
        association: u64,
        body: impl FnOnce(Arc<OwnedFd>) + Send + 'static,
    ) -> io::Result<()> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let for_thread = Arc::clone(&stop);
        let run = move || {
            sharpen_timers();
            body(for_thread);
        };
        let thread = std::thread::Builder::new().name(name).spawn(run)?;
        let thread = Arc::new(Mutex::new(Some(thread)));
        let mut running = self.lock();
        running.retain(|queue| !queue.has_ended());
        running.push(Running { association, stop, thread });
        Ok(())
    }

    /// Stops the queues of one association, or all, and waits until they are drained, including
    /// those that another caller is already stopping.
    pub fn stop(&self, association: Option<u64>) {
        let mut stopping = self.lock().clone();
        stopping.retain(|queue| association.is_none_or(|wanted| wanted == queue.association));
        for queue in &stopping {
            // Fails only if the counter is full; then the thread is already signalled.
            let _ = rustix::io::write(&*queue.stop, &1u64.to_ne_bytes());
        }
        for queue in stopping {
            let mut thread = queue.thread.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(thread) = thread.take() {
                // A thread that panicked has stopped, too.
                let _ = thread.join();
            }
        }
        self.lock().retain(|queue| !queue.has_ended());
    }

    /// Number of queues whose thread is still running.
    pub fn running(&self) -> usize {
        self.lock().iter().filter(|queue| !queue.has_ended()).count()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        self.stop(None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;

    #[test]
    fn everybody_who_stops_a_queue_waits_until_it_is_drained() {
        let queues = Queues::default();
        let (drain, drained) = channel::<()>();
        queues.start("draining".into(), 1, move |_| drained.recv().unwrap()).unwrap();
        queues.start("other".into(), 2, |_| ()).unwrap();
        let (report, reports) = channel();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (queues, report) = (&queues, report.clone());
                scope.spawn(move || {
                    queues.stop(Some(1));
                    report.send(()).unwrap();
                });
            }
            let early = reports.recv_timeout(Duration::from_millis(50));
            drain.send(()).unwrap();
            assert_eq!(early, Err(RecvTimeoutError::Timeout));
            assert_eq!([reports.recv(), reports.recv()], [Ok(()), Ok(())]);
        });
        queues.stop(None);
        assert_eq!(queues.running(), 0);
    }
}
