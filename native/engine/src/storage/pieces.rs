//! Search of a file for known pieces, used to show that a store holds no plaintext.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use aho_corasick::AhoCorasick;

/// Bytes searched at a time.
const WINDOW_BYTES: usize = 8 << 20;

/// Finds the first occurrence of each piece in a file, as (index of the piece, byte offset), in
/// ascending order of index. Omits pieces that don't occur. Pieces may overlap.
pub fn find_pieces(path: &Path, pieces: &[Vec<u8>]) -> io::Result<Vec<(usize, u64)>> {
    if pieces.iter().any(Vec::is_empty) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a piece must not be empty"));
    }
    let automaton = AhoCorasick::new(pieces).map_err(io::Error::other)?;
    // A piece may begin at the end of one window: those bytes are searched again with the next.
    let overlap = pieces.iter().map(Vec::len).max().unwrap_or(1) - 1;
    let mut first: Vec<Option<u64>> = vec![None; pieces.len()];
    let mut missing = pieces.len();
    let mut file = File::open(path)?;
    let mut window = Vec::with_capacity(WINDOW_BYTES + overlap);
    let mut window_start = 0;
    while missing > 0 {
        let read = file.by_ref().take(WINDOW_BYTES as u64).read_to_end(&mut window)?;
        if read == 0 {
            break;
        }
        for occurrence in automaton.find_overlapping_iter(&window) {
            let place = &mut first[occurrence.pattern().as_usize()];
            if place.is_none() {
                *place = Some(window_start + occurrence.start() as u64);
                missing -= 1;
            }
        }
        let searched = window.len().saturating_sub(overlap);
        window.drain(..searched);
        window_start += searched as u64;
    }
    let found = first.into_iter().enumerate();
    Ok(found.filter_map(|(index, place)| place.map(|offset| (index, offset))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search(content: &[u8], pieces: &[&[u8]]) -> Vec<(usize, u64)> {
        let path = std::env::temp_dir().join(format!(
            "sealane-pieces-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        std::fs::write(&path, content).unwrap();
        let pieces: Vec<_> = pieces.iter().map(|piece| piece.to_vec()).collect();
        let found = find_pieces(&path, &pieces);
        std::fs::remove_file(&path).unwrap();
        found.unwrap()
    }

    #[test]
    fn overlapping_pieces_are_all_found_at_their_first_place() {
        let found = search(b"..abcdef..abcdef", &[b"cdef", b"abcd", b"none", b"bcde"]);
        assert_eq!(found, [(0, 4), (1, 2), (3, 3)]);
    }

    #[test]
    fn a_piece_across_two_windows_is_found() {
        let mut content = vec![0; WINDOW_BYTES + 100];
        let place = WINDOW_BYTES - 3;
        content[place..place + 6].copy_from_slice(b"across");
        assert_eq!(search(&content, &[b"across"]), [(0, place as u64)]);
    }

    #[test]
    fn an_empty_piece_is_refused_and_an_empty_file_holds_none() {
        assert_eq!(search(b"", &[b"x"]), []);
        assert!(find_pieces(Path::new("/dev/null"), &[Vec::new()]).is_err());
    }
}
