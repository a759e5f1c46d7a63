//! How many commands of hosts a namespace executes, and for how long.

use sealane_proto::link::Nanos;

use crate::clock;

/// How commands of hosts fare, as long as somebody watches.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostLoad {
    /// Commands that have ended.
    pub ended: u64,
    /// Commands being executed.
    pub running: u64,
    /// Durations of all commands so far, added up.
    pub time: Nanos,
}

/// Commands that begin and end.
#[derive(Debug, Default)]
pub(super) struct Load {
    running: u64,
    /// Since when at least one runs …
    busy_since: Nanos,
    /// … and how long that was so before.
    busy: Nanos,
    /// Background jobs that want to know how commands fare; without any it isn't kept.
    watchers: usize,
    host: HostLoad,
    /// Up to when that is known.
    seen: Nanos,
}

impl Load {
    // Both look at the clock only if it matters: they are called for each command.

    pub(super) fn begin(&mut self) {
        self.see();
        self.running += 1;
        if self.running == 1 {
            self.busy_since = clock::now();
        }
    }

    pub(super) fn end(&mut self) {
        if self.watchers > 0 {
            self.see();
            self.host.ended += 1;
        }
        self.running -= 1;
        if self.running == 0 {
            self.busy += clock::now().saturating_sub(self.busy_since);
        }
    }

    /// Begins or ends to keep how commands fare, for one watcher.
    pub(super) fn watch(&mut self, is_watched: bool) {
        if is_watched {
            if self.watchers == 0 {
                self.seen = clock::now();
            }
            self.watchers += 1;
        } else {
            self.watchers -= 1;
        }
    }

    /// How commands have fared while somebody watched.
    pub(super) fn watched(&mut self) -> HostLoad {
        self.see();
        HostLoad { running: self.running, ..self.host }
    }

    /// How long at least one command was being executed.
    pub(super) fn busy(&self) -> Nanos {
        let running =
            if self.running > 0 { clock::now().saturating_sub(self.busy_since) } else { 0 };
        self.busy + running
    }

    fn see(&mut self) {
        if self.watchers > 0 {
            let now = clock::now();
            self.host.time += self.running * now.saturating_sub(self.seen);
            self.seen = now;
        }
    }
}
