//! libFuzzer entry of `sealane_fuzz::job_ring`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sealane_fuzz::job_ring(data));
