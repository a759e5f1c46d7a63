//! The running queue threads of one volume: started, counted, stopped and waited for.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

#[derive(Debug)]
struct Running {
    association: u64,
    stop: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

/// Queue threads of one volume.
#[derive(Debug, Default)]
pub struct Queues {
    running: Mutex<Vec<Running>>,
}

impl Queues {
    /// Starts a thread; `body` is given a descriptor that becomes readable when it must stop.
    pub fn start(
        &self,
        name: String,
        association: u64,
        body: impl FnOnce(Arc<OwnedFd>) + Send + 'static,
    ) -> io::Result<()> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let for_thread = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name(name).spawn(move || body(for_thread))?;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|queue| !queue.thread.is_finished());
        running.push(Running { association, stop, thread });
        Ok(())
    }

    /// Stops the queues of one association, or all, and waits until they are drained.
    pub fn stop(&self, association: Option<u64>) {
        let stopping: Vec<Running> = {
            let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
            let all = std::mem::take(&mut *running);
            let (stopping, staying): (Vec<_>, Vec<_>) = all
                .into_iter()
                .partition(|queue| association.is_none_or(|wanted| wanted == queue.association));
            *running = staying;
            stopping
        };
        for queue in &stopping {
            // It fails only when the counter is full, and then the thread is told already.
            let _ = rustix::io::write(&*queue.stop, &1u64.to_ne_bytes());
        }
        for queue in stopping {
            // A thread that panicked is as stopped as one that ended.
            let _ = queue.thread.join();
        }
    }

    /// Queues whose thread still runs.
    pub fn running(&self) -> usize {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.iter().filter(|queue| !queue.thread.is_finished()).count()
    }
}

impl Drop for Queues {
    fn drop(&mut self) {
        self.stop(None);
    }
}
