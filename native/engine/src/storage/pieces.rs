//! Search of a file for known pieces: the proof that a store holds no plaintext.

use std::fs::File;
use std::io;
use std::path::Path;

use aho_corasick::AhoCorasick;

/// Most occurrences reported; one is already too many.
pub const OCCURRENCES_MAX: usize = 1000;

/// Finds which pieces occur where in a file, as (index of the piece, byte offset).
/// Overlapping occurrences are reported once.
pub fn find_pieces(path: &Path, pieces: &[Vec<u8>]) -> io::Result<Vec<(usize, u64)>> {
    if pieces.iter().any(Vec::is_empty) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a piece must not be empty"));
    }
    let automaton = AhoCorasick::new(pieces).map_err(io::Error::other)?;
    let file = File::open(path)?;
    let mut found = Vec::new();
    for occurrence in automaton.stream_find_iter(file).take(OCCURRENCES_MAX) {
        let occurrence = occurrence?;
        found.push((occurrence.pattern().as_usize(), occurrence.start() as u64));
    }
    Ok(found)
}
