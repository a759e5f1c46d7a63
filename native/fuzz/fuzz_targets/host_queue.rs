//! libFuzzer entry of `sealane_fuzz::host_queue`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::host_queue(data));
