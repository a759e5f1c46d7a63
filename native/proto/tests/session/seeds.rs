//! The committed seeds of the fuzz target `session_packet`: the fuzzer only gets past the first
//! checks while they are packets and frames of the current version.

use std::collections::BTreeSet;
use std::fs;
use std::mem::discriminant;
use std::path::Path;

use sealane_proto::session::frame::Frames;
use sealane_proto::session::packet::Header;
use sealane_proto::session::{PATHS_MAX, Version};

/// Number of frame types.
const FRAMES: usize = 16;

#[test]
fn seeds_of_packets_and_of_every_frame_are_accepted() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/session_packet");
    let mut kinds = BTreeSet::new();
    for seed in fs::read_dir(corpus).unwrap() {
        let seed = seed.unwrap();
        let (name, bytes) = (seed.file_name(), fs::read(seed.path()).unwrap());
        if !name.to_str().unwrap().starts_with("frame-") {
            assert!(Header::decode(&bytes).is_ok(), "{name:?}");
            continue;
        }
        let frames: Vec<_> = Frames::new(&bytes, Version::V6, PATHS_MAX).collect();
        let [Ok(frame)] = frames[..] else { panic!("{name:?}") };
        kinds.insert(format!("{:?}", discriminant(&frame)));
    }
    assert_eq!(kinds.len(), FRAMES, "cargo run --example seeds, in native/fuzz");
}
