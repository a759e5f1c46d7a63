//! A running emulated card.

#![allow(dead_code)] // each test file uses a part

use std::io::{self, BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use sealane_engine::accelerator::card::Card;

/// The process and its directory; both end with it.
pub struct Running {
    pub process: Child,
    pub directory: PathBuf,
}

static NUMBER: AtomicU32 = AtomicU32::new(0);

impl Running {
    /// Starts a card that listens.
    pub fn start(arguments: &[&str]) -> Self {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("sealane-dpu-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_sealane-dpu"))
            .arg("--socket")
            .arg(directory.join("card"))
            .arg("--ledger")
            .arg(directory.join("ledger"))
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("ready: "), "{line}");
        Self { process, directory }
    }

    /// Connects to it.
    pub fn connect(&self) -> Card {
        self.try_connect().unwrap()
    }

    /// Connects to it, or not.
    pub fn try_connect(&self) -> io::Result<Card> {
        Card::connect(&self.directory.join("card"))
    }

    /// The nonces that it has sealed with.
    pub fn nonces(&self) -> Vec<[u8; 12]> {
        let bytes = std::fs::read(self.directory.join("ledger")).unwrap();
        bytes.as_chunks::<12>().0.to_vec()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
