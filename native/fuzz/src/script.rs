//! The bytes of a fuzz input as numbers; zero once they are used up.

/// The rest of the input.
#[derive(Debug, Clone, Copy)]
pub struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    /// Starts at the beginning of the input.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes all the rest.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// At most `count` bytes.
    pub fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn number<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let taken = self.take(N);
        bytes[..taken.len()].copy_from_slice(taken);
        bytes
    }

    /// One byte.
    pub fn byte(&mut self) -> u8 {
        u8::from_le_bytes(self.number())
    }

    /// Two bytes.
    pub fn half(&mut self) -> u16 {
        u16::from_le_bytes(self.number())
    }

    /// Eight bytes.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(self.number())
    }
}
